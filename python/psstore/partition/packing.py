"""Packs slices into frames: many small slices travel together, a large one does not make a frame too long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from psstore import _core
from psstore.partition.router import Router
from psstore.types import ITEM_BYTES, Tensor

FRAME_BYTES = 4 << 20
"""Payload at which a frame is full. Python handles frames, so few are good; a shard starts to reduce when
the first one is there, so several in flight are good too."""

EARLY_FRAME_BYTES = 384 << 10
"""FRAME_BYTES for a round that was committed early, over sockets: a slice of the largest size, and small ones beside
it. Not before a whole frame is there does a step begin, and not before a whole one can go back does the link back have
anything to carry: what a frame takes on the wire is lost twice in a round. And what was received and stepped goes back
from the processor's own cache: over a unix socket it cost a shard 5 ms of copying per 100 MB, and 14 in frames of 4
MiB, on a processor with 2 MiB of second-level cache."""

NEAR_FRAME_BYTES = 64 << 20
"""FRAME_BYTES for a shard that shares a device with the arrays: only such a frame's table travels, and a gigabyte takes
less time to copy there than a few frames take in Python. As many bytes as may travel, should they have to."""


class SliceRef(NamedTuple):
    """One slice of the tensor at `position` of the packed list."""

    position: int
    key: int
    begin: int
    end: int
    """[begin, end) in elements."""


class FrameLayout(NamedTuple):
    """What one frame carries, in order."""

    way: int
    """The session that it goes over; see `Router`."""
    slices: tuple[SliceRef, ...]


def pack(
    tensors: Sequence[Tensor], ways: Router, *, near: Collection[int] = (), frame_bytes: int = FRAME_BYTES
) -> list[FrameLayout]:
    """Frames for pushing or pulling `tensors`, interleaved over the ways so that all are busy at once. `near`: the ways
    to shards that share a device with the arrays. `frame_bytes`: at which the others are full."""
    per_way: list[list[FrameLayout]] = [[] for _ in range(len(ways))]
    open_slices: list[list[SliceRef]] = [[] for _ in range(len(ways))]
    open_bytes = [0] * len(ways)
    most_bytes = [NEAR_FRAME_BYTES if way in near else frame_bytes for way in range(len(ways))]

    def close(way: int) -> None:
        if open_slices[way]:
            per_way[way].append(FrameLayout(way, tuple(open_slices[way])))
            open_slices[way] = []
            open_bytes[way] = 0

    for position, tensor in enumerate(tensors):
        item_bytes = ITEM_BYTES[tensor.spec.dtype]
        for index, way in enumerate(ways.of(tensor)):
            begin, end = tensor.bounds(index)
            size = (end - begin) * item_bytes
            full = open_bytes[way] + size > most_bytes[way] or len(open_slices[way]) == _core.MAX_SLICES
            if full:
                close(way)
            open_slices[way].append(SliceRef(position, tensor.key(index), begin, end))
            open_bytes[way] += size
    for way in range(len(ways)):
        close(way)
    longest = max((len(frames) for frames in per_way), default=0)
    return [frames[i] for i in range(longest) for frames in per_way if i < len(frames)]
