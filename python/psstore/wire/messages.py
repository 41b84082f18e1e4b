"""The MessagePack bodies of control messages: one struct per operation that has one.

Bodies are maps by field name, so that a client in another language needs no schema compiler.
Bytes that only the store's processes may write travel as `Signed`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Set
from typing import Annotated, Literal, TypeVar

import msgspec

from psstore.errors import BadBody
from psstore.types import Consistency, Tensor, TensorSpec
from psstore.wire.ranges import Ranges

Role = Literal["worker", "client", "heartbeat", "standby", "operator", "elector", "resharder"]
Exist = Literal["match", "error", "overwrite"]

MAX_WAIT_S = 30 * 86400.0
"""Nobody waits longer for a peer; and it is a number that clocks can be added to."""

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
"""How long to wait; no NaN, no infinity."""


MAX_ITEMS = 1 << 17
"""Tensors that one request may name: what a reply of the largest size has room for (csrc/wire/limits.h), and no more
than a shard decodes in some 20 ms, while nobody else is served."""

Few = msgspec.Meta(max_length=MAX_ITEMS)
"""Held against what a body announces, before any of it is decoded."""

MAX_BARRIER_CHARS = 1024
"""How long the name of a barrier may be: it is remembered."""

MAX_WHY_CHARS = 1024
"""How long the reason may be for which a checkpoint came to nothing: it is remembered, too."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base of all bodies: trees without cycles, which the garbage collector need not look through."""


class Signed(Message, frozen=True, kw_only=True):
    """MessagePack of a fact, with the store's MAC: a client can carry it and cannot forge it."""

    blob: bytes
    mac: bytes


# ---- facts: what is signed ------------------------------------------------------------------------


class Member(Message, frozen=True, kw_only=True, array_like=True):
    """One member of a decision."""

    rank: int
    incarnation: int
    round: int
    weight: float
    present: Ranges = ()
    """Tensors that this member has a gradient for. Naming these, not the absent ones, keeps a decision valid for
    tensors that are created while it is on its way."""


class DecisionFact(Message, frozen=True, kw_only=True, tag="decision"):
    """The coordinator's record of one step; immutable. Members are in rank order."""

    number: int
    members: tuple[Member, ...]
    divisor: float
    skip: bool = False
    hypers: dict[int, dict[str, float]]
    """Parameter group -> all hyper-parameters of its rule."""
    early: bool = False
    """Made before its contributions were: a slice takes the step when its last contribution arrives."""
    max_norm: float | None = None
    """Slices take the step once the `Scale` of this decision is known: it clips the global norm of the reduced
    gradient to this."""
    average: bool = True
    """The divisor makes a mean of the sum. Of a tensor whose members are sorted, where no weight counts, False has the
    median or trimmed mean multiplied by the number of members."""
    loss_scales: tuple[float, ...] = ()
    """By which the members' contributions are larger than their gradients, which their weights say already; (): by
    nothing."""


class Scale(Message, frozen=True, kw_only=True, array_like=True):
    """What the reduced gradient of a decision with `max_norm` is multiplied by. Every client that asks the shards
    for the norm finds the same one, so that it needs no signature to be right."""

    decision: int
    factor: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None
    """None: the norm is not finite, and the decision is a skip."""


class DropFact(Message, frozen=True, kw_only=True, tag="drop"):
    """These tensor ids are no more; ids are never reused."""

    ids: tuple[int, ...]


class TicketFact(Message, frozen=True, kw_only=True, tag="ticket"):
    """This client is this life of this rank."""

    client: str
    rank: int
    incarnation: int


class AppliedFact(Message, frozen=True, kw_only=True, tag="applied"):
    """What a shard says of itself to the coordinator."""

    shard: int
    decision: int
    """The last decision that it has applied; all before it, too."""
    missing: tuple[tuple[int, int, int], ...] = ()
    """(rank, incarnation, round) of commits that named what was not pushed here."""


class MeasuredFact(Message, frozen=True, kw_only=True, tag="measured"):
    """What a shard says of a worker's contribution, which does not change there any more."""

    shard: int
    rank: int
    incarnation: int
    round: int
    present: Ranges
    """The tensors that are measured: all that it has of them was pushed."""
    squares: float
    """Sum of the squares of what was pushed here of them; not finite if that is not."""


class SaveFact(Message, frozen=True, kw_only=True, tag="save"):
    """The coordinator's word that shards shall write their part of a checkpoint, and where: nobody else can have a
    shard write anything."""

    url: str
    version: int
    """The decision as of which it is."""
    attempt: str
    """In the names of its files."""
    reader: int
    """Who holds that decision, with rule state."""
    tensors: Ranges
    """Ids of the catalogue at that decision."""
    since: int | None = None
    """The decision since which rows of tables have changed that are to be in it; None: all of them are."""


class SavedFact(Message, frozen=True, kw_only=True, tag="saved"):
    """A shard's word that its part of an attempt is written."""

    shard: int
    attempt: str
    record: bytes
    """What the manifest says of its file, as JSON."""


class FollowFact(Message, frozen=True, kw_only=True, tag="follow"):
    """A process of the store says that this client of its is a standby of that shard."""

    client: str
    shard: int
    place: str = ""
    """Where it listens: whoever followed from there before is dead. '': it has no place of its own."""


# ---- handshake ------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    client: str
    """Random 128-bit hex id of the client; the same on every shard and after reconnects."""
    role: Role = "client"
    nonce: bytes = b""
    """Random; the shard's proof covers it."""
    features: int = 0
    channel: int = 0
    """Which of the connections that the client has side by side: each has its newest, and numbers its own writes."""


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes


class Auth(Message, frozen=True, kw_only=True):
    proof: bytes


class Welcome(Message, frozen=True, kw_only=True):
    store: str
    """Id of this run of the store; another one after a restart."""
    shard: int
    addresses: tuple[tuple[str, ...], ...]
    """Per shard: the addresses it can be reached at, best first."""
    num_workers: int
    quorum: int
    staleness: int
    """-1: unbounded."""
    version: int
    last_sequence: int
    """Last ASSIGN/ADD of this client that was applied here."""
    features: int = 0
    proof: bytes = b""
    """The shard's own proof of the token."""
    heartbeat_s: float = 1.0
    """How often the store wants to hear from a worker."""
    lineage: str = ""
    """Id of the first of the runs of which each was restored from the one before."""
    restored: int = -1
    """The decision that this run was restored at; -1: it began with nothing."""
    fewest: int | None = None
    """Workers come and go: `num_workers` are the most, and no round is decided without so many. None: their number is
    fixed."""

    returns: bool = False
    """A store whose shard dies starts again by itself, from a checkpoint: who finds nobody here waits for that."""
    grace_s: float = 0.0
    """How long a round that has its quorum stays open for the other workers that are there; -1: as long as it pays."""
    refuse_norm: float | None = None
    """Commits bring what every shard has measured of their contribution: one whose norm is more than so many times the
    median of the last ones is refused. None: nothing is measured."""

    @property
    def consistency(self) -> Consistency:
        """What the store was started for."""
        return Consistency(
            num_workers=self.num_workers,
            quorum=self.quorum,
            staleness=self.staleness,
            fewest=self.fewest,
            grace_s=self.grace_s,
            refuse_norm=self.refuse_norm,
        )


# ---- data -----------------------------------------------------------------------------------------


class Carry(Message, frozen=True, kw_only=True):
    """Body of PUSH, PULL and NORM. Its bytes are laid out in csrc/wire/carry.h, so that a shard reads the fixed fields
    without decoding the decisions; a body that says nothing is empty."""

    decisions: tuple[Signed, ...] = ()
    """Consecutive; those that the shard has already are skipped."""
    newest: int = 0
    """Number of the last of `decisions`; 0: there are none."""
    at_least: int = 0
    """PULL: wait until the shard's version is this."""
    wait_s: float = 0.0
    """PULL and NORM: how long to wait, at most `MAX_WAIT_S`, for `at_least`, for values of tensors that are not
    initialised yet, and for decisions that lack contributions or their scale."""
    scale: Scale | None = None
    """The scale of the last of `decisions`, or of the one that the shard is at."""

    @property
    def scaled(self) -> int:
        """The decision whose scale it carries; 0: none."""
        return 0 if self.scale is None else self.scale.decision

    def encode(self) -> bytes:
        scaled, factor = 0, math.nan
        if self.scale is not None:
            scaled, factor = self.scale.decision, math.nan if self.scale.factor is None else self.scale.factor
        elif not (self.newest or self.at_least or self.wait_s):
            return b""
        fixed = _CARRY.pack(self.newest, self.at_least, scaled, self.wait_s, factor)
        return fixed + encode_decisions(self.decisions)

    @classmethod
    def decode(cls, body: bytes) -> Carry:
        """What a shard has held against the limits already. Raises BadBody if the decisions are none."""
        if not body:
            return cls()
        newest, at_least, scaled, wait_s, factor = _CARRY.unpack_from(body)
        try:
            decisions = _decisions_decoder.decode(body[_CARRY.size :]) if newest else ()
        except msgspec.DecodeError as error:
            raise BadBody(f"body of Carry: {error}") from None
        scale = Scale(decision=scaled, factor=None if math.isnan(factor) else factor) if scaled else None
        return cls(decisions=decisions, newest=newest, at_least=at_least, wait_s=wait_s, scale=scale)


def encode_decisions(decisions: tuple[Signed, ...]) -> bytes:
    """The end of a `Carry`; empty if there are none."""
    return _encoder.encode(decisions) if decisions else b""


_CARRY = struct.Struct("<QQQdd")
_decisions_decoder = msgspec.msgpack.Decoder(tuple[Signed, ...])


# ---- schema ---------------------------------------------------------------------------------------


class Define(Message, frozen=True, kw_only=True):
    facts: Annotated[tuple[Signed, ...], Few]
    """Tensor or DropFact."""


class Attach(Message, frozen=True, kw_only=True):
    ticket: Signed


class Attached(Message, frozen=True, kw_only=True):
    version: int


class Attest(Message, frozen=True, kw_only=True):
    round: int = 0
    """What the connection's worker has pushed in this round is to be measured; 0: nothing is."""
    present: Ranges = ()
    """Tensors that are: all of them were pushed."""


class Attested(Message, frozen=True, kw_only=True):
    applied: Signed
    """An AppliedFact."""
    measured: Signed | None = None
    """A MeasuredFact, if it was asked for."""


class Save(Message, frozen=True, kw_only=True):
    """Asked again and again, until it is done."""

    fact: Signed
    """A SaveFact."""
    decisions: tuple[Signed, ...] = ()
    """What the shard may lack, up to the fact's version."""


class Saved(Message, frozen=True, kw_only=True):
    saved: Signed | None = None
    """A SavedFact; None: it is being written."""


class Share(Message, frozen=True, kw_only=True):
    """Asks for memory that both sides share."""

    push_bytes: int = 0
    """On a device: how much to push through, at least; 0: which device is it?"""


class Block(Message, frozen=True, kw_only=True, array_like=True):
    """Memory of a device that a client may import."""

    address: int
    """Where it begins, as tables with SHARED have it."""
    num_bytes: int
    handle: bytes


class Parcel(Message, frozen=True, kw_only=True):
    """What is said beside the control file of a push arena on a device."""

    address: int
    num_bytes: int
    block: Block
    """In which the arena lies."""


class Shared(Message, frozen=True, kw_only=True):
    """Without an address, a device or blocks: this shard shares no memory."""

    address: str = ""
    """Name of a unix socket in Linux's abstract namespace, where the files are handed out: only who shares the
    shard's network namespace can connect to it."""
    ticket: bytes = b""
    """What to say there. It is good for one visit."""
    device: bytes = b""
    """The shard's values are on this one: a client that has it, too, asks with push_bytes."""
    blocks: tuple[Block, ...] = ()
    """Comes unasked before the first answer that lies in them."""


# ---- coordinator ----------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    rank: int | None = None
    """None: the lowest free one."""
    num_workers: int | None = None
    """What this worker believes; another number than the store's is refused, where that is fixed."""
    wait_s: Seconds = 300.0
    """Where workers come and go: how long the coordinator may wait for the end of the open round before it answers with
    DEADLINE_EXCEEDED."""
    goes_on: bool = False
    """The place of a life that failed is taken: a group whose workers have all left is not begun anew."""
    members: int = 0
    """How many `Members` the worker knows."""


class Members(Message, frozen=True, kw_only=True, array_like=True):
    """Where workers come and go: who does. One for each decision at which it changes who takes part."""

    version: int
    """The decision."""
    came: tuple[int, ...] = ()
    """Ranks that take part in the rounds after it, and did not before."""
    went: tuple[int, ...] = ()
    """Ranks that take part no longer."""
    absent: tuple[int, ...] = ()
    """Ranks that were to take part in its own round, and are not in it."""


def change_of_members(version: int, *, before: Set[int], after: Set[int], absent: tuple[int, ...] = ()) -> Members:
    """What `members_after` takes from the one to the other."""
    came, went = tuple(sorted(after - before)), tuple(sorted(before - after))
    return Members(version=version, came=came, went=went, absent=absent)


def members_after(members: Iterable[int], changes: Iterable[Members]) -> tuple[int, ...]:
    """The ranks that take part once these have changed who does; nobody does before the first of all."""
    there = set(members)
    for one in changes:
        there.difference_update(one.went)
        there.update(one.came)
    return tuple(sorted(there))


class Joined(Message, frozen=True, kw_only=True):
    rank: int
    incarnation: int
    round: int
    """First round of this worker."""
    decision: int
    """Number of the last decision."""
    decisions: tuple[Signed, ...]
    """All that some shard may still lack."""
    ticket: Signed
    members: tuple[Members, ...] = ()
    """Where workers come and go, all that it did not know, or the first of them."""
    more: bool = False
    """There are others: it asks again."""
    stop: bool = False
    """No commit of it will count: training has come to its end for all."""


class Create(Message, frozen=True, kw_only=True):
    specs: Annotated[tuple[TensorSpec, ...], Few]
    exist: Exist = "match"
    offer: bool = True
    """This client has values for those that are not `zeros`, should they need one."""


class Created(Message, frozen=True, kw_only=True):
    tensors: tuple[Signed, ...]
    """The Tensor of each spec, in order."""
    dropped: tuple[Signed, ...] = ()
    """DropFact of what was overwritten."""
    made: tuple[str, ...] = ()
    """Names of those that were not there before."""
    initialise: tuple[int, ...] = ()
    """Ids whose value this client is to send (INIT to the shards, then READY)."""


class Ready(Message, frozen=True, kw_only=True):
    ids: Annotated[tuple[int, ...], Few]


class Commit(Message, frozen=True, kw_only=True):
    round: int
    hypers: dict[int, dict[str, float]] = {}
    """Parameter group -> hyper-parameters; what is not named keeps its last value, or the default."""
    weight: float = 1.0
    non_finite: bool = False
    """True: this worker's gradients hold NaN or infinity; the round becomes a skip for all."""
    present: Ranges = ()
    """Tensors that this worker has pushed; it has no gradient for the others."""
    average: bool = True
    """Divide the sum by the sum of the weights; False: by 1."""
    loss_scale: float = 1.0
    """The pushed gradients are so many times the real ones (mixed precision): the weight of this worker in the sum,
    not in the divisor, is divided by it."""
    early: bool = False
    """`present` is a promise: these tensors will be pushed, and FINISH says when they are. Needs quorum = all."""
    max_norm: float | None = None
    """Clip the global norm of the reduced gradient to this. Needs quorum = all; not together with `early`."""
    since: int = 0
    """Last decision that the worker knows."""
    applied: tuple[Signed, ...] = ()
    """What shards have attested: the coordinator forgets the decisions that all have applied."""
    measured: tuple[Signed, ...] = ()
    """What every shard has measured of `present`, where the store refuses by norm."""
    members: int = 0
    """How many `Members` the worker knows."""
    wait_s: Seconds = 300.0
    """How long the coordinator may wait for other workers before it answers with DEADLINE_EXCEEDED."""


class Refusal(Message, frozen=True, kw_only=True):
    """Why a contribution was refused."""

    rank: int
    norm: float
    """The contribution's; not finite if that is not."""
    median: float | None = None
    """Norm of the last contributions to the same tensors that counted; None: there were too few, and this one is not
    finite."""
    limit: float | None = None
    """What the norm may be at most, by that median."""

    def describe(self) -> str:
        """Whose contribution it was, and what is wrong with it."""
        bound = "has to be finite" if self.limit is None else f"may be {self.limit:.4g} at most"
        usual = "" if self.median is None else f"; the median of the last ones that counted is {self.median:.4g}"
        return f"the contribution of rank {self.rank} was refused: its norm is {self.norm:.4g} and {bound}{usual}"


class Committed(Message, frozen=True, kw_only=True):
    round: int
    decision: int
    """Number of the decision that closed this round."""
    late: bool = False
    """The round was decided without this worker; its contribution does not count."""
    next_round: int
    decisions: tuple[Signed, ...]
    """All after `since` that some shard may lack, in order, ending with `last`."""
    last: int
    """Number of the last decision."""
    slowest: int = 0
    """Smallest clock of the live workers, when this was sent."""
    skip: bool = False
    """`decision` is a skip: a member's gradients were not finite, or nobody's contribution counts."""
    empty: bool = False
    """`skip` for want of a member that had more than nothing to contribute."""
    refused: Refusal | None = None
    """The round was decided without this worker's contribution, which is not like the others'."""
    attest: bool = False
    """The next commit is to say what every shard has applied."""
    hand_in: bool = False
    """A checkpoint of this decision is being written: whatever the worker hands in as of now will be in it."""
    stop: bool = False
    """No further commit of this worker will count."""
    members: tuple[Members, ...] = ()
    """All that it did not know."""


class Finish(Message, frozen=True, kw_only=True):
    round: int
    """All that the early commit of this round promised is acknowledged."""
    wait_s: Seconds = 300.0
    """How long the coordinator may wait for the other members."""


class Finished(Message, frozen=True, kw_only=True):
    next_round: int


class Decisions(Message, frozen=True, kw_only=True):
    since: int = 0
    """Last decision that the client knows."""


class Decided(Message, frozen=True, kw_only=True):
    decisions: tuple[Signed, ...]
    """All after `since` that some shard may lack, in order, ending with `last`."""
    last: int
    """Number of the last decision."""


HANDED_PIECE_BYTES = 8 << 20
"""How much of what is handed in one message has: others get their turn in between."""


class HandIn(Message, frozen=True, kw_only=True):
    version: int
    """The decision that the worker has come to."""
    state: bytes
    """What it wants to have again, as checkpoint/handed.py has it; or the part of that which begins at `offset`."""
    offset: int = 0
    more: bool = False
    """This is not its end: nothing counts as handed in before that has come."""


class HandBack(Message, frozen=True, kw_only=True):
    """Asks what was handed in for this rank last, from a byte on."""

    offset: int = 0


class HandedBack(Message, frozen=True, kw_only=True):
    version: int = 0
    state: bytes | None = None
    """As much as one reply holds; None: nothing was handed in for this rank, before a restart or since."""
    more: bool = False


class Stop(Message, frozen=True, kw_only=True):
    version: int | None = None
    """This worker's commits don't count after that decision. None: nobody's do from now on, of those who are workers
    now and those who take the place of one."""
    finish: bool = False
    """Without a version: the open round still counts, where each round has all workers."""
    everyone: bool = False
    """With a version: nobody's commits count after it."""


class Stopped(Message, frozen=True, kw_only=True):
    stop: bool = False
    """No commit of this worker counts any more, by its own word or by somebody's for all."""


class Begin(Message, frozen=True, kw_only=True):
    url: str | None = None
    """Where; None: where the store was told to write its checkpoints."""
    reader: int = 0
    """Who holds decisions on every shard, with rule state, from before this is asked. 0: is the place ready?"""
    gather_s: Seconds = 0.0
    """How long workers that hand in may take to do so as of the checkpoint's decision; it is one to come, then."""
    whole: bool = False
    """Not without what any of them hands in who has not left: refused then, with DEADLINE_EXCEEDED."""
    give_up: bool = False
    """What this reader has begun is not led any more."""
    why: Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARS)] = ""
    """Why not."""


class Begun(Message, frozen=True, kw_only=True):
    ready: bool
    """False: the place is being looked at, or another checkpoint is being written; ask again."""
    gathering: bool = False
    """Not ready for this reader yet, because workers are handing in; ask again, as the same."""
    version: int | None = None
    """The decision as of which it is going to be; None: it is not made yet, or nobody can say."""
    save: Signed | None = None
    """The SaveFact, if there is a reader."""
    decisions: tuple[Signed, ...] = ()
    """All that some shard may lack, in order, ending with `version`."""


class Keep(Message, frozen=True, kw_only=True):
    """Asked again and again, until it is done."""

    saved: tuple[Signed, ...]
    """The SavedFact of every shard."""


class Kept(Message, frozen=True, kw_only=True):
    done: bool


class Describe(Message, frozen=True, kw_only=True):
    names: Annotated[tuple[str, ...], Few] | None = None
    """None: every tensor. One that is named again is described once."""
    names_only: bool = False


class Described(Message, frozen=True, kw_only=True):
    tensors: tuple[Signed, ...] = ()
    names: tuple[str, ...] = ()
    """With names_only: all; else: those asked for that exist, in the order of `tensors`."""


class Barrier(Message, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_BARRIER_CHARS)] = ""
    count: int
    """Larger with each of this worker's calls by that name: makes a resend harmless."""
    wait_s: Seconds = 300.0
    once: bool = False
    """Where another worker that is there is past it, a life that comes to it for the first time passes, too: the life
    before it has been there, or the others did without."""


class Drop(Message, frozen=True, kw_only=True):
    names: Annotated[tuple[str, ...], Few]


class Dropped(Message, frozen=True, kw_only=True):
    facts: tuple[Signed, ...]


class Stats(Message, frozen=True, kw_only=True):
    padding: str = ""
    """Comes back as it is: whoever asks wants to know whether so many bytes get through."""


class Statistics(Message, frozen=True, kw_only=True):
    counters: dict[str, int | float | str]
    padding: str = ""


class Failure(Message, frozen=True, kw_only=True):
    code: int
    message: str
    details: dict[str, int | float | str] = {}


class Follow(Message, frozen=True, kw_only=True):
    fact: Signed


class Promote(Message, frozen=True, kw_only=True):
    """Somebody who knows says that the other process of this shard is dead, and will tell nobody anything."""

    force: bool = False
    """Although its connection is not lost."""


class AskWord(Message, frozen=True, kw_only=True):
    """Asks another shard for its word on a standby, which is what it was asked first, and stays so."""

    client: str = ""
    """The standby, as a client; '': only which are gone is asked."""
    leads: bool = False
    """The standby has lost its shard, and wants to lead; False: its shard has lost it, and wants to do without."""


class Word(Message, frozen=True, kw_only=True):
    leads: bool | None = None
    """The word; None: there is none, as nothing was asked, or who answers does not lead its shard."""
    gone: tuple[str, ...] = ()
    """Standbys of other shards that will never lead, by the word of this one."""
    standby: str = ""
    """Who answers, if it is a standby: what it says is what its shard had said when the two lost each other."""
    may_lead: bool = True
    """Who answers leads, or is a standby that has lost its shard and has all that anybody was told."""


class Reshard(Message, frozen=True, kw_only=True):
    shards: int
    """How many the store is to go on with."""


class Freeze(Message, frozen=True, kw_only=True):
    """Asked again and again, until the shard is frozen, by a client with the role `resharder`."""

    gather_s: Seconds = 0.0
    """Asked of shard 0: how long workers that hand in may take to do so as of the last decision."""


class Frozen(Message, frozen=True, kw_only=True):
    done: bool
    """The shard hears nobody else, until its supervisor says so."""


# ---- encoding -------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}

Fact = DecisionFact | Tensor | DropFact | TicketFact | AppliedFact | MeasuredFact | SaveFact | SavedFact | FollowFact


def encode_body(message: Message | Tensor) -> bytes:
    return message.encode() if type(message) is Carry else _encoder.encode(message)


def decode_body(kind: type[M], body: bytes) -> M:
    """Raises BadBody with the field that is wrong."""
    if kind is Carry:
        return Carry.decode(body)  # type: ignore[return-value]
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(body)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"body of {kind.__name__}: {error}") from None


def decode_fact(blob: bytes) -> Fact:
    """What a `Signed.blob` says. Check its MAC first (protocol/signing.py)."""
    try:
        return _fact_decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"signed fact: {error}") from None


def is_clipped(blob: bytes) -> bool:
    """Whether a decision needs a scale. Its members, of which there may be thousands, are not decoded. Raises BadBody
    also for another fact than a decision."""
    try:
        return _clipping_decoder.decode(blob).max_norm is not None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"decision: {error}") from None


class _Clipping(msgspec.Struct, frozen=True, tag="decision"):
    """The one field of a DecisionFact."""

    max_norm: float | None = None


_fact_decoder: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(Fact)
_clipping_decoder: msgspec.msgpack.Decoder[_Clipping] = msgspec.msgpack.Decoder(_Clipping)
