"""Reads one shard's file of a checkpoint: what slots it has, and the slices of those that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from psstore.checkpoint.file_reader import TensorFile, Wanted
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import DELTA_FORMAT, FORMAT, damaged
from psstore.checkpoint.shard_file import FIRST_PIECE, SLOTS, ShardPiece, changed_in, plan_shard_file, state_in
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.state import ShardState, TensorRecord

Target = Callable[[SlotRecord, int, int], memoryview]
"""From a slot, the part of it (0 its value, i state buffer i) and its bytes to writable, contiguous memory."""


class ReadSlice(NamedTuple):
    """A part of a slot that is in its target, verified."""

    slot: SlotRecord
    part: int
    target: memoryview


class ShardFile:
    """The file of one shard."""

    def __init__(self, file: TensorFile, tensors: Sequence[TensorRecord], *, is_delta: bool) -> None:
        self._file = file
        self._tensors = tensors
        self._is_delta = is_delta

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return self._file.name

    @cached_property
    def state(self) -> ShardState:
        try:
            state = state_in(self._file.header.metadata, format_number=DELTA_FORMAT if self._is_delta else FORMAT)
        except ValueError as error:
            raise damaged(self._file.name, str(error)) from None
        if state.index != self._file.record.index:
            what = f"it is that of shard {state.index}"
            raise damaged(self._file.name, what, expected=f"shard {self._file.record.index}")
        return state

    @cached_property
    def changed(self) -> Mapping[int, int] | None:
        """How many rows of which partitions have changed since its base; None: it is no delta's."""
        if not self._is_delta:
            return None
        try:
            return changed_in(self._file.header.metadata)
        except ValueError as error:
            raise damaged(self._file.name, str(error)) from None

    @cached_property
    def table(self) -> SlotTable:
        content = self._file.read_piece(self._file.piece_of(SLOTS))
        try:
            return SlotTable(bytes(content))
        except ValueError as error:
            raise damaged(self._file.name, str(error)) from None

    def read(self, keys: frozenset[int] | None, into: Target, *, pool: HashPool) -> Iterator[ReadSlice]:
        """See `Checkpoint.read`. Of a delta, rows are as they lie in the file."""
        wanted = (
            Wanted(index, into(piece.slot, piece.part, piece.num_bytes), piece)
            for index, piece in enumerate(self.pieces, FIRST_PIECE)
            if keys is None or piece.slot.key in keys
        )
        for one in self._file.read(wanted, pool=pool):
            yield ReadSlice(one.tag.slot, one.tag.part, one.target)

    @cached_property
    def pieces(self) -> Sequence[ShardPiece]:
        """What is behind its slots, by those and the catalogue. Raises CheckpointDamaged if that does not fit."""
        try:
            plan = plan_shard_file(self._tensors, self.table, self.changed)
        except ValueError as error:
            raise damaged(self._file.name, str(error)) from None
        bounds = map(self._file.bounds, range(FIRST_PIECE, len(self._file)))
        if [piece.num_bytes for piece in plan.pieces] != [end - begin for begin, end in bounds]:
            raise damaged(self._file.name, "its arrays are not those that its slots and the catalogue say")
        return plan.pieces
