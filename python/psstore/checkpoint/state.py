"""What a checkpoint holds beside values and rule state: plain records of a store's part and of a shard's.

All of it is the state at one decision, with no round half done: what is staged for later rounds is not part of it, nor
who is connected. Numbers and texts only, so that a checkpoint can be read without psstore.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from psstore import _core
from psstore.types import ITEM_BYTES, Consistency, TensorSpec, record_bytes


class TensorRecord(Struct, frozen=True, kw_only=True):
    """A tensor of the catalogue: what it is and how it is cut, but not where its slices live."""

    id: int
    spec: TensorSpec
    slice_elems: int
    """Elements per slice; the last slice holds the rest. Depends on the tensor alone, never on shards."""

    @property
    def num_slices(self) -> int:
        return -(-self.spec.num_elems // self.slice_elems)

    @property
    def part_names(self) -> tuple[str, ...]:
        """What a slot can hold, by part: 'value', then the rule's state buffers. Of a table: 'rows', then what their
        admission has counted."""
        if self.spec.rows is not None:
            return ROWS, COUNTED
        return VALUE, *(name for name in _core.STATES[self.spec.rule] if name is not None)

    @property
    def record_bytes(self) -> int:
        """Bytes of a row of a table: id, value, state and what eviction goes by."""
        return record_bytes(self.spec)

    @property
    def counted_bytes(self) -> int:
        """Bytes of what the admission of a partition of a table counts in."""
        assert self.spec.rows is not None, "it is a table"
        return _core.counted_bytes(self.spec.rows.admit_after, self.spec.rows.partition_rows)

    def key(self, index: int) -> int:
        return self.id << _core.SLICE_INDEX_BITS | index

    def bounds(self, index: int) -> tuple[int, int]:
        """[begin, end) of a slice in elements of the flattened tensor."""
        begin = index * self.slice_elems
        return begin, min(begin + self.slice_elems, self.spec.num_elems)

    def slice_bytes(self, index: int) -> int:
        """Bytes of the value, and of each state buffer."""
        begin, end = self.bounds(index)
        return (end - begin) * ITEM_BYTES[self.spec.dtype]


VALUE = "value"
"""Name of part 0 of a slot."""

ROWS = "rows"
"""Name of part 0 of a partition of a table: the records of its rows."""

COUNTED = "counted"
"""Name of part 1: contributions to ids without a row, as csrc/rows/admission.cc counts them."""


class HyperRecord(Struct, frozen=True, kw_only=True):
    """The hyper-parameters of a parameter group as the last decision had them."""

    rule: str
    values: Mapping[str, float]


class RefusalRecord(Struct, frozen=True, kw_only=True):
    """Why a contribution was refused."""

    rank: int
    norm: float | None = None
    """None: it was not finite, which JSON has no number for."""
    median: float | None = None
    limit: float | None = None


class NormsRecord(Struct, frozen=True, kw_only=True):
    """Norms of the last contributions to a set of tensors that counted, the last one at the end."""

    present: tuple[tuple[int, int], ...]
    """Ids of the tensors, as ascending ranges (first, last)."""
    norms: tuple[float, ...]


class ClosedRecord(Struct, frozen=True, kw_only=True):
    """The last decided round of a worker, so that a commit that comes again gets the answer that it got."""

    incarnation: int
    round: int
    decision: int
    late: bool = False
    skip: bool = False
    refused: RefusalRecord | None = None


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """The last life of a rank."""

    rank: int
    incarnation: int
    client: str
    clock: int
    """Last round that it committed, and that was decided."""
    state: str
    """Name of its WorkerState."""
    closed: ClosedRecord | None = None


class MembersRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where workers come and go: who did at that decision."""

    version: int
    came: tuple[int, ...] = ()
    """Ranks that took part in the rounds after it, and did not before."""
    went: tuple[int, ...] = ()
    """Ranks that took part no longer."""
    absent: tuple[int, ...] = ()
    """Ranks that were to be in it, and were not."""
    members: tuple[int, ...] | None = None
    """All ranks that took part after it, of a checkpoint that says this in place of who came and who went."""


class ClientRecord(Struct, frozen=True, kw_only=True):
    """What a client was answered by the coordinator, so that what it asks again is not carried out again."""

    client: str
    answers: tuple[tuple[int, bytes], ...] = ()
    """Request number and the answer, encoded as it was sent; in the order in which they were given."""


class BarrierRecord(Struct, frozen=True, kw_only=True):
    """How often a rank's present life has passed a barrier."""

    rank: int
    name: str
    count: int


class StoreState(Struct, frozen=True, kw_only=True):
    """The coordinator's part."""

    decision: int
    """The last one; the version of the checkpoint."""
    consistency: Consistency
    tensors: tuple[TensorRecord, ...]
    """The catalogue, by ascending id."""
    next_tensor_id: int
    """Ids are never used again, not even those of tensors that were dropped."""
    hypers: Mapping[int, HyperRecord] = {}
    """By parameter group."""
    workers: tuple[WorkerRecord, ...] = ()
    incarnations: Mapping[int, int] = {}
    """The last one issued, by rank."""
    left: tuple[int, ...] = ()
    """Ranks whose last life has left."""
    clients: tuple[ClientRecord, ...] = ()
    barriers: tuple[BarrierRecord, ...] = ()
    epoch: int = 0
    """Number of the leadership that made the decision."""
    members: tuple[MembersRecord, ...] = ()
    """All changes of who takes part, since the training began."""
    norms: tuple[NormsRecord, ...] = ()
    """Where contributions are refused by their norm; the tensors that had a round last come last."""
    num_refused: Mapping[int, int] = {}
    """Contributions that were refused, by rank."""
    extra: Mapping[str, str] = {}
    """What later parts of psstore keep here, by name."""


class WriteWindowRecord(Struct, frozen=True, kw_only=True):
    """The last plain write of a client's channel that this shard has taken, and what it has refused of them."""

    client: str
    channel: int
    sequence: int
    forgotten: int = 0
    """The last write of which it is not known any more what was refused."""
    refused: tuple[tuple[int, int, int, int], ...] = ()
    """Slices of later ones: (sequence, begin, end, error code)."""


class RankRecord(Struct, frozen=True, kw_only=True):
    """What a shard knows of a rank."""

    rank: int
    incarnation: int
    """Its latest life."""
    decided_round: int | None = None
    """The last round of that life that was decided."""
    missing_round: int | None = None
    """The last round that a decision named, of which a contribution was not there."""


class ShardState(Struct, frozen=True, kw_only=True):
    """A shard's part, without its slots. Of a store of other shards: windows are of the shard that wrote them, and who
    reads into another number of shards is given all of them."""

    index: int
    num_shards: int
    version: int
    """The last decision applied: the checkpoint's."""
    windows: tuple[WriteWindowRecord, ...] = ()
    """The one that wrote longest ago first: it is the first to be forgotten."""
    ranks: tuple[RankRecord, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    """Ids of tensors that were dropped here: ascending, disjoint ranges, (first, last)."""
    extra: Mapping[str, str] = {}
    """What later parts of psstore keep here, by name."""
