"""A shard's standby: connects to it as a client, and becomes what the shard is, change by change.

    HELLO … WELCOME ─► FOLLOW ─► FOLLOWED ─► FILLING ─► FOLLOWING ─► IN_SYNC: it may lead
                                              what the shard was      nobody is told what it lacks
                                                                      is told to end ─► RETIRE ─► RETIRED

From FOLLOWED on the shard asks and the standby answers: each record is answered once the same change is made here.
Writes, slots and scales are the compiled core's (csrc/server/standby_service.cc); the rest is here. What goes wrong is
the standby's end: one that differs from its shard is worth nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import msgspec

from psstore import _core
from psstore.errors import BadArgument, PsstoreError, UnexpectedMessage, from_code
from psstore.protocol import state_copy
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.coordinator_feed import feed
from psstore.protocol.handshake import ClientIdentity, Handshake
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.sharing import See
from psstore.protocol.signing import Signer
from psstore.protocol.states import STANDBY, StandbyEvent, StandbyState
from psstore.wire import messages as m
from psstore.wire import records as r

OPS = _core.OPS

LEASES_WAITED = 1.5
"""For so many leases after its shard's last word a standby does nothing to lead by vote: by then the shard has told
nobody anything for a while, though the clocks of two hosts run differently."""


class Standby:
    """Sans-IO: frames of the shard in, frames for it out. REQUIRES: nothing has happened to the shard here yet."""

    state: StandbyState = StandbyState.HANDSHAKE

    def __init__(
        self,
        *,
        identity: ClientIdentity,
        address: str,
        store: str,
        shard: int,
        facts: ShardFacts,
        coordinator: Coordinator | None,
        signer: Signer,
        nonce: bytes,
        protocol: _core.ServerProtocol,
        place: str = "",
        see: See | None = None,
    ) -> None:
        """`store`, `shard`: what is at the address. `protocol`: of the connection to it. `nonce`: fresh random
        bytes. `place`: where this one listens, if it has a place of its own. `see`: None: it sees no memory of its
        shard's."""
        self.is_cut = False
        """The connection to its shard is lost."""
        self.on_in_sync: Callable[[], None] = lambda: None
        """Called when it may lead from now on."""
        self.on_over: Callable[[str], None] = lambda reason: None
        """Called when its shard says that the store ends: the workers are done, or lost for that reason."""
        self.on_silent: Callable[[], None] = lambda: None
        """Called when its shard has said nothing for so long that others may be asked who leads. From then on the shard
        must not be answered: it would go on."""
        self.epoch = 0
        """How many leaders the shard has had, the present one not counted."""
        self.clock_ahead_s = 0.0
        """By how much the coordinator's clock is ahead of the one here, as far as its last word tells."""
        self._lease_s = math.inf
        self._heard_at = 0.0
        self._begun = bytearray()
        """What has come of a record that comes in parts."""
        self._identity = identity
        self._address = address
        self._store = store
        self._shard = shard
        self._facts = facts
        self._coordinator = coordinator
        self._signer = signer
        self._protocol = protocol
        self._place = place
        self._see = see
        self._handshake = Handshake(identity, nonce=nonce, address=address)

    @property
    def may_lead(self) -> bool:
        """Whether it has all that anybody was told, and its shard counts on it."""
        return self.state is StandbyState.IN_SYNC

    @property
    def client(self) -> str:
        """As which it follows."""
        return self._identity.client

    @property
    def may_ask_at(self) -> float:
        """When it may ask other shards whether it may lead, if its shard says nothing before."""
        return self._heard_at + LEASES_WAITED * self._lease_s

    @property
    def next_wake(self) -> float | None:
        """When `look` is to be called."""
        is_watching = self.may_lead and not self.is_cut and self._lease_s < math.inf
        return self.may_ask_at if is_watching else None

    def look(self, now: float) -> None:
        """Notices that its shard is silent."""
        wake = self.next_wake
        if wake is not None and now >= wake:
            self.on_silent()

    def describe(self) -> str:
        """What to tell a client that comes here."""
        return (
            f"this is a standby of shard {self._shard}, which {'was' if self.is_cut else 'is'} at {self._address};"
            " it answers only once it leads"
        )

    def check_may_lead(self, *, force: bool) -> None:
        """Raises BadArgument unless it may lead once its shard is dead. `force`: although its connection is up."""
        if not self.may_lead:
            raise BadArgument(
                f"this standby of shard {self._shard} has not all that the shard at {self._address} has told others"
                f" ({self.state.value}): it can't lead"
            )
        if not self.is_cut and not force:
            raise BadArgument(
                f"the shard at {self._address} is connected to this standby of it: two would lead. If its host is gone"
                " without a word, say so: --force"
            )

    def retire(self) -> bytes | None:
        """Its word to the shard that it will never lead; None where nobody waits for that, or can be told."""
        if self.is_cut or StandbyEvent.ENDS not in STANDBY.rows[self.state]:
            return None
        self.state = STANDBY.after(self.state, StandbyEvent.ENDS)
        return _core.encode_frame(OPS["RETIRE"])

    def hello(self) -> bytes:
        """The first frame."""
        return self._handshake.hello(channel=0)

    def heard(self, frame: _core.Frame, now: float) -> list[bytes]:
        """What to answer. Raises PsstoreError: it can't follow, or not any longer."""
        if self.state is StandbyState.RETIRED:
            return []
        if self.state is StandbyState.HANDSHAKE:
            return self._greeted(frame)
        if frame.op == OPS["ERROR"]:
            failure = m.decode_body(m.Failure, frame.body)
            raise from_code(failure.code, failure.message, **failure.details)
        if self.state is StandbyState.ASKING and frame.op == OPS["FOLLOWED"]:
            self.state = STANDBY.after(self.state, StandbyEvent.FOLLOWED)
            self._protocol.lead()
            return []
        if self.state is StandbyState.ASKING or frame.op != OPS["RECORD"]:
            raise UnexpectedMessage(f"the shard at {self._address} sent operation {frame.op} to its standby")
        self._heard_at = now
        answer = _core.encode_frame(OPS["RECORDED"], request=frame.request)
        return [answer, *self._take(r.decode_record(frame.body), now)]

    # ---- how ----

    def _greeted(self, frame: _core.Frame) -> list[bytes]:
        answer = self._handshake.heard(frame)
        if not isinstance(answer, m.Welcome):
            return [answer]
        if (answer.store, answer.shard) != (self._store, self._shard):
            raise BadArgument(
                f"at {self._address} is shard {answer.shard} of store {answer.store}, and not shard {self._shard} of"
                f" store {self._store}, whose standby this is"
            )
        self.state = STANDBY.after(self.state, StandbyEvent.WELCOMED)
        self._protocol.set_limits(max_body_bytes=_core.MAX_BODY_BYTES, max_payload_bytes=_core.MAX_PAYLOAD_BYTES)
        fact = self._signer.sign(m.FollowFact(client=self._identity.client, shard=self._shard, place=self._place))
        return [_core.encode_frame(OPS["FOLLOW"], request=1, body=m.encode_body(m.Follow(fact=fact)))]

    def _take(self, record: r.AnyRecord, now: float) -> list[bytes]:
        match record:
            case r.RecordPart():
                self._begun += record.data
                if not record.more:
                    whole, self._begun = bytes(self._begun), bytearray()
                    return self._take(r.decode_record(whole), now)
            case r.DecisionTaken():
                fact = m.decode_fact(record.blob)
                assert isinstance(fact, m.DecisionFact)
                self._facts.take(fact, record.blob)
            case r.TensorsDefined():
                self._facts.define(record.facts)
            case r.LifeAttached():
                self._facts.data.attached(record.rank, record.incarnation)
            case r.PushesSealed():
                self._facts.shard.seal(record.rank, record.incarnation, record.round)
            case r.FillBegins():
                self._begin(record)
            case r.WritesRefused():
                self._facts.shard.resume_refusals(record.writer, record.forgotten, record.runs)
            case r.TensorsThere():
                for tensor in record.tensors:
                    self._facts.define_tensor(tensor)
            case r.FillEnds():
                self.state = STANDBY.after(self.state, StandbyEvent.FILLED)
                return [_core.encode_frame(OPS["COMPLETE"])]
            case r.WordGiven():
                self._facts.words.know({record.client: record.leads})
            case r.StillLeads():
                pass
            case r.MemoryShown():
                memory = None if self._see is None else self._see(record.offer, record.address)
                if memory is not None:
                    self._protocol.see(memory)
            case r.MemoryGone():
                self._protocol.see_no_more(record.address)
            case r.StoreEnds():
                self.on_over(record.reason)
            case r.InSync():
                self._lease_s = math.inf if record.lease_s is None else record.lease_s
                self.state = STANDBY.after(self.state, StandbyEvent.TOLD)
                self.on_in_sync()
                return [_core.encode_frame(OPS["COMPLETE"])]
            case _:
                assert self._coordinator is not None, "its shard has one"
                self.clock_ahead_s = record.now - now
                with contextlib.suppress(PsstoreError):  # whoever asked was told
                    feed(self._coordinator, record)
        return []

    def _begin(self, record: r.FillBegins) -> None:
        shard = self._facts.shard
        shard.set_version(record.version)
        history = msgspec.msgpack.decode(record.history)
        self._facts.resume(history, record.last)
        self._facts.words.know(record.words)
        self.epoch = record.epoch
        if self._coordinator is not None:
            state_copy.load(self._coordinator, record.coordinator)
