"""What a shard sends its standbys beside the writes and slots that the compiled core sends: bodies of RECORD.

Only the two ends of one store read them. They have one version of psstore, which the standby's handshake makes sure of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from psstore.errors import BadBody
from psstore.types import Tensor
from psstore.wire.messages import AppliedFact, Shared, Signed

PART_BYTES = 4 << 20
"""Bytes of a record that go in one frame, as of the slots that fill a standby. A whole one may hold all that workers
have handed in, or as much as a frame has brought and what is said of that: it may not fit in another one."""


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Something that has changed on the shard."""


class RecordPart(Record, frozen=True):
    """Some bytes of a record that is larger than `PART_BYTES`. Its parts come one right after the other."""

    data: bytes
    more: bool
    """There is another part."""


# ---- the shard ----


class TensorsDefined(Record, frozen=True):
    """The shard was told of these tensors, or of dropped ones."""

    facts: tuple[Signed, ...]


class DecisionTaken(Record, frozen=True):
    """The shard has applied this decision, the next one."""

    blob: bytes
    """The `DecisionFact`."""


class LifeAttached(Record, frozen=True):
    """A life of a rank may push there; older ones may not."""

    rank: int
    incarnation: int


class PushesSealed(Record, frozen=True):
    """What a life of a rank has pushed in that round was measured, and stays as it is."""

    rank: int
    incarnation: int
    round: int


class WordGiven(Record, frozen=True):
    """What this shard says of another one's standby, for good (protocol/words.py)."""

    client: str
    leads: bool


class StillLeads(Record, frozen=True):
    """A beat: the shard leads when this is sent."""


class StoreEnds(Record, frozen=True):
    """All that the store consists of ends: the workers are done, or lost."""

    reason: str = ""
    """Why that is a failure."""


# ---- the coordinator: what it was told, in order, from which all else follows (protocol/coordinator_feed.py) ----


class ClientCame(Record, frozen=True):
    """A connection of this client is open."""

    conn: int
    client: str
    now: float


class ClientWent(Record, frozen=True):
    """A connection is gone."""

    conn: int
    now: float


class WorkerBeat(Record, frozen=True):
    """A worker's thread says that it lives."""

    conn: int
    client: str
    rank: int
    incarnation: int
    now: float


class ClientAsked(Record, frozen=True):
    """A request, as it came."""

    conn: int
    request: int
    op: int
    body: bytes
    client: str
    now: float


class ShardSaid(Record, frozen=True):
    """What a shard has applied, and found missing."""

    fact: AppliedFact
    now: float


class TimePassed(Record, frozen=True):
    """What time alone brings was looked at."""

    now: float


# ---- memory that standbys see ----


class MemoryShown(Record, frozen=True):
    """Memory that the shard reads from, and the standby may see: from then on records may say where payloads lie."""

    address: int
    """Where it begins, as tables with SHARED have it."""
    offer: Shared


class MemoryGone(Record, frozen=True):
    """No later record says that its payload lies there."""

    address: int


# ---- a new standby ----


class FillBegins(Record, frozen=True):
    """What the shard is, but for tensors and slots, which follow."""

    version: int
    epoch: int
    """How many leaders the shard has had before."""
    last: bytes
    """The last `DecisionFact`; b'': there is none, or it is one that a checkpoint begins with."""
    history: bytes
    """`Shard.history()`."""
    coordinator: bytes
    """Its state (protocol/state_copy.py); b'': it is another shard's."""
    words: dict[str, bool]
    """What it has said of other shards' standbys."""


Unsigned = Annotated[int, Meta(ge=0)]
Position = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Code = Annotated[int, Meta(ge=0, le=255)]


class WritesRefused(Record, frozen=True):
    """What the shard has refused of plain writes of one writer: `Shard.refusals()`."""

    writer: str
    forgotten: Unsigned
    runs: tuple[tuple[Unsigned, Position, Position, Code], ...]


class TensorsThere(Record, frozen=True):
    """Some of the tensors that the shard knows."""

    tensors: tuple[Tensor, ...]


class FillEnds(Record, frozen=True):
    """All has come, slots too."""


class InSync(Record, frozen=True):
    """From here on nobody is told what the standby does not have: it may lead."""

    lease_s: float | None
    """How long after a beat that it has answered it may not lead by vote; None: it may at no time."""


AnyRecord = (
    RecordPart
    | TensorsDefined
    | DecisionTaken
    | LifeAttached
    | PushesSealed
    | WordGiven
    | StillLeads
    | StoreEnds
    | ClientCame
    | ClientWent
    | WorkerBeat
    | ClientAsked
    | ShardSaid
    | TimePassed
    | MemoryShown
    | MemoryGone
    | FillBegins
    | WritesRefused
    | TensorsThere
    | FillEnds
    | InSync
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: AnyRecord) -> bytes:
    return _encoder.encode(record)


def bodies_of(record: AnyRecord) -> Iterator[bytes]:
    """A body for each frame that it goes in."""
    whole = encode_record(record)
    if len(whole) <= PART_BYTES:
        yield whole
        return
    for first in range(0, len(whole), PART_BYTES):
        end = first + PART_BYTES
        yield encode_record(RecordPart(whole[first:end], end < len(whole)))


def decode_record(body: bytes) -> AnyRecord:
    """Raises BadBody."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"body of RECORD: {error}") from None
