"""Reads a delta's file: rows of tables out of what its base has of them, and what changed since.

Here alone it matters that there are deltas: whoever reads a checkpoint gets the records that a whole one would have, in
the order in which it would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from psstore import _core
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import damaged
from psstore.checkpoint.shard_reader import ReadSlice, ShardFile, Target
from psstore.checkpoint.slots import SlotRecord
from psstore.checkpoint.state import TensorRecord
from psstore.errors import BadArgument

ReadBase = Callable[[frozenset[int], Target], Iterator[ReadSlice]]
"""`Checkpoint.read` of the base."""

ROWS_PART = 0


def read_over(
    read_base: ReadBase,
    shard: ShardFile,
    tensors: Sequence[TensorRecord],
    keys: frozenset[int] | None,
    into: Target,
    *,
    pool: HashPool,
) -> Iterator[ReadSlice]:
    """See `Checkpoint.read`, of one shard of a delta."""
    record_bytes = {tensor.id: tensor.record_bytes for tensor in tensors if tensor.spec.rows is not None}

    def is_of_rows(slot: SlotRecord, part: int) -> bool:
        return part == ROWS_PART and slot.key >> _core.SLICE_INDEX_BITS in record_bytes

    def room(slot: SlotRecord, part: int, num_bytes: int) -> memoryview:
        return _room(slot, part, num_bytes) if is_of_rows(slot, part) else into(slot, part, num_bytes)

    changed = shard.changed or {}
    before = _Before(
        read_base,
        frozenset(
            piece.slot.key
            for piece in shard.pieces
            if (keys is None or piece.slot.key in keys)
            and is_of_rows(piece.slot, piece.part)
            and changed.get(piece.slot.key, 0) < piece.slot.num_rows
        ),
    )
    for one in shard.read(keys, room, pool=pool):
        slot = one.slot
        if not is_of_rows(slot, one.part):
            yield one
            continue
        size = record_bytes[slot.key >> _core.SLICE_INDEX_BITS]
        target = into(slot, ROWS_PART, slot.num_rows * size)
        try:
            _core.overlay_rows(before.take(slot.key), one.target, size, target)
        except BadArgument as error:
            raise damaged(shard.name, f"partition {slot.key:#x}: {error.message}") from None
        yield ReadSlice(slot, ROWS_PART, target)


class _Before:
    """Records of partitions as the base has them, asked for in the order, more or less, in which they lie there."""

    def __init__(self, read_base: ReadBase, keys: frozenset[int]) -> None:
        self._keys = keys
        self._reading = read_base(keys, _room)
        self._read: dict[int, memoryview] = {}

    def take(self, key: int) -> memoryview:
        """Empty: it had none, or all have changed."""
        if key not in self._keys:
            return memoryview(b"")
        while key not in self._read:
            one = next(self._reading, None)
            if one is None:
                return memoryview(b"")
            if one.part == ROWS_PART:
                self._read[one.slot.key] = one.target
        return self._read.pop(key)


def _room(slot: SlotRecord, part: int, num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))
