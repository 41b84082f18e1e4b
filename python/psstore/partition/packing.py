"""Packs slices into frames: many small slices travel together, a large one does not make a frame too long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from psstore import _core
from psstore.types import ITEM_BYTES, Tensor

FRAME_BYTES = 4 << 20
"""Payload at which a frame is full. Python handles frames, so few are good; a shard starts to reduce when
the first one is there, so several in flight are good too."""


NEAR_FRAME_BYTES = 64 << 20
"""The same for a shard that shares a device with the arrays: of such a frame only the table travels, and a gigabyte
takes less time to copy there than a few frames take in Python. As many bytes as may travel, should they have to."""


class SliceRef(NamedTuple):
    """One slice of the tensor at `position` of the packed list."""

    position: int
    key: int
    begin: int
    end: int
    """[begin, end) in elements."""


class FrameLayout(NamedTuple):
    """What one frame to one shard carries, in order."""

    shard: int
    slices: tuple[SliceRef, ...]


def pack(tensors: Sequence[Tensor], *, num_shards: int, near: Collection[int] = ()) -> list[FrameLayout]:
    """Frames for pushing or pulling `tensors`, interleaved over the shards so that all are busy at once. `near`: the
    shards that share a device with the arrays."""
    per_shard: list[list[FrameLayout]] = [[] for _ in range(num_shards)]
    open_slices: list[list[SliceRef]] = [[] for _ in range(num_shards)]
    open_bytes = [0] * num_shards
    most_bytes = [NEAR_FRAME_BYTES if shard in near else FRAME_BYTES for shard in range(num_shards)]

    def close(shard: int) -> None:
        if open_slices[shard]:
            per_shard[shard].append(FrameLayout(shard, tuple(open_slices[shard])))
            open_slices[shard] = []
            open_bytes[shard] = 0

    for position, tensor in enumerate(tensors):
        item_bytes = ITEM_BYTES[tensor.spec.dtype]
        for index, shard in enumerate(tensor.shards):
            begin, end = tensor.bounds(index)
            size = (end - begin) * item_bytes
            full = open_bytes[shard] + size > most_bytes[shard] or len(open_slices[shard]) == _core.MAX_SLICES
            if full:
                close(shard)
            open_slices[shard].append(SliceRef(position, tensor.key(index), begin, end))
            open_bytes[shard] += size
    for shard in range(num_shards):
        close(shard)
    longest = max((len(frames) for frames in per_shard), default=0)
    return [frames[i] for i in range(longest) for frames in per_shard if i < len(frames)]
