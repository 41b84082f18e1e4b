"""Batches: what passes at once between a device and the store, cut to size, grouped by frame, laid out in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes
from psstore.client.device.arrays import OnDevice
from psstore.client.layout import Frame, Layout, Range, asking
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer
from psstore.types import ITEM_BYTES, slice_index

BATCH_BYTES = 8 << 20
"""Bytes that are copied at once: two full frames. PCIe takes 0.15 to 0.3 ms for it, next to which it is little that the
host is told when it is done; and the first bytes are on the wire as much earlier as it is smaller."""

NEAR_BYTES = 64 << 10
"""Smallest frame that goes past pinned memory to a shard that shares the device. A smaller one goes over the stream, as
the shard's answers do: it is no slower, and has no block to itself."""


class Batch(NamedTuple):
    """Ranges of arrays that lie one after the other in pinned memory, and the frames that they make, if any."""

    ranges: Sequence[Range]
    offsets: Sequence[int]
    """Where each range begins there, and where the last one ends."""
    frames: Sequence[Frame] = ()
    is_near: bool = False
    """True if the batch is one frame, for a shard that shares the device."""

    @staticmethod
    def of(ranges: Sequence[Range], frames: Sequence[Frame] = (), *, is_near: bool = False) -> Batch:
        offsets = [0]
        for one in ranges:
            offsets.append(offsets[-1] + one.end - one.begin)
        return Batch(ranges, offsets, frames, is_near)

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def pieces(self, arrays: Sequence[OnDevice]) -> list[tuple[int, int, int]]:
        """Returns (offset, pointer, bytes) of each range, as a queue copies them."""
        return [
            (offset, arrays[one.position].pointer + one.begin, one.end - one.begin)
            for offset, one in zip(self.offsets, self.ranges, strict=False)
        ]

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yields (position, index) of the slice that each range is."""
        for frame in self.frames:
            for one, key in zip(frame.ranges, frame.table.keys(), strict=True):
                yield one.position, slice_index(key)

    def places(self, arrays: Sequence[OnDevice]) -> list[tuple[int, int]]:
        """Returns (pointer, bytes) of each range."""
        return [(arrays[one.position].pointer + one.begin, one.end - one.begin) for one in self.ranges]

    def parts(self, buffer: _core.Buffer) -> Iterator[tuple[Range, Bytes]]:
        """Yields each range, and its memory in the buffer."""
        memory = np.asarray(memoryview(buffer))
        for one, (begin, end) in zip(self.ranges, pairwise(self.offsets), strict=True):
            yield one, memory[begin:end]

    def to_send(self, buffer: _core.Buffer) -> list[Transfer]:
        """Returns the frames to send, each one piece of memory, as its slices lie one after the other."""
        memory, begin, transfers = memoryview(buffer), 0, []
        for frame in self.frames:
            end = begin + sum(one.end - one.begin for one in frame.ranges)
            transfers.append(Transfer(frame.way, frame.table, _core.Segments([memory[begin:end]])))
            begin = end
        return transfers

    def to_receive(self, buffer: _core.Buffer, newer_than: int | None) -> list[Transfer]:
        """Returns the frames to receive, with a piece of memory for each slice, as some may not come."""
        parts = iter([memory for _, memory in self.parts(buffer)])
        return [
            Transfer(
                frame.way,
                asking(frame.table, newer_than),
                _core.Segments([next(parts) for _ in frame.ranges], writable=True),
            )
            for frame in self.frames
        ]

    def came(self, arrays: Sequence[OnDevice], answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
        """Returns the `pieces` of the slices that came."""
        sizes = [size for answer in answers for size in answer.table.num_bytes()]
        return [piece for piece, size in zip(self.pieces(arrays), sizes, strict=True) if size]

    def decoding(
        self, layout: Layout, arrays: Sequence[OnDevice], answers: Sequence[Answer]
    ) -> list[tuple[int, int, int, int, int]]:
        """Returns the slices that came, as a queue decodes them from the layout's dtypes to those of the arrays."""
        steps = []
        sizes = [size for answer in answers for size in answer.table.num_bytes()]
        for one, offset, size in zip(self.ranges, self.offsets, sizes, strict=False):
            if size:
                dtype = layout.dtypes[one.position]
                begin, count = one.begin // ITEM_BYTES[dtype], size // ITEM_BYTES[dtype]
                array = arrays[one.position]
                place = array.pointer + ITEM_BYTES[array.dtype] * begin
                steps.append((_core.DTYPES[dtype], count, offset, place, _core.DTYPES[array.dtype]))
        return steps


class PinnedBuffer:
    """Memory for a batch in what a pinned transfer holds, until `give_back`."""

    def __init__(self, num_bytes: int, memory: _core.Buffer, freed: Callable[[int], None]) -> None:
        self.memory = memory
        self._num_bytes = num_bytes
        self._freed = freed

    def fill(self, queue: _core.Queue, batch: Batch, arrays: Sequence[OnDevice]) -> None:
        """Queues copies of what is to be sent."""
        queue.copy_out(self.memory, batch.pieces(arrays))

    def hand_over(self, queue: _core.Queue) -> bool:
        """False: a shard gets the memory when the host sends it."""
        return False

    def to_send(self, batch: Batch) -> list[Transfer]:
        return batch.to_send(self.memory)

    def to_receive(self, batch: Batch, newer_than: int | None) -> list[Transfer]:
        return batch.to_receive(self.memory, newer_than)

    def give_back(self) -> None:
        """Does nothing the second time."""
        self._freed(self._num_bytes)
        self._num_bytes = 0


class TransferBuffer(Protocol):
    """Memory for a batch: pinned, or shared with its shard."""

    def give_back(self) -> None: ...


def grouped(frames: Iterable[Frame], near: Set[int]) -> Iterator[Batch]:
    """Yields frames in their order: about BATCH_BYTES to each batch, or one frame to a way that is `near`."""
    together: list[Frame] = []
    num_bytes = 0
    for frame in frames:
        frame_bytes = sum(one.end - one.begin for one in frame.ranges)
        is_near = frame.way in near and frame_bytes >= NEAR_BYTES
        if together and (is_near or num_bytes + frame_bytes > BATCH_BYTES):
            yield Batch.of([one for frame in together for one in frame.ranges], together)
            together, num_bytes = [], 0
        if is_near:
            yield Batch.of(frame.ranges, (frame,), is_near=True)
            continue
        together.append(frame)
        num_bytes += frame_bytes
    if together:
        yield Batch.of([one for frame in together for one in frame.ranges], together)


def cut(arrays: Sequence[OnDevice]) -> Iterator[Batch]:
    """Yields all bytes of the arrays in their order, BATCH_BYTES to each batch."""
    ranges: list[Range] = []
    room = BATCH_BYTES
    for position, array in enumerate(arrays):
        begin = 0
        while begin < array.num_bytes:
            end = min(array.num_bytes, begin + room)
            ranges.append(Range(position, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield Batch.of(ranges)
                ranges, room = [], BATCH_BYTES
    if ranges:
        yield Batch.of(ranges)
