"""Places slices on shards by bytes: each in turn on the least loaded one (list scheduling, Graham 1966).

In the order of the tensors, so that what is next to one another in the model, and is pushed and pulled at one time, is
spread over all shards: with the largest first (Graham 1969), layers of one size came to lie in pairs on one shard of
two, whose link was all that a bucket of their gradients used. Small slices come last, to level the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from psstore.partition.slicing import num_slices
from psstore.types import ITEM_BYTES, Tensor, TensorSpec

SMALL = 4
"""A slice is small that is less than the largest divided by this."""


class Unplaced(NamedTuple):
    """A tensor whose slices have no shards yet."""

    id: int
    spec: TensorSpec
    slice_elems: int


def place_tensors(tensors: Sequence[Unplaced], loads_bytes: Sequence[int]) -> list[Tensor]:
    """The tensors, with a shard for each slice. Partitions of a table, whose bytes nobody knows yet, and which have as
    many rows as one another, go to the shards in turn."""
    num_shards = len(loads_bytes)
    sizes: list[int] = []
    for _, spec, elems in tensors:
        if spec.rows is not None:
            continue
        item = ITEM_BYTES[spec.dtype]
        whole, rest = divmod(spec.num_elems, elems)
        sizes += [elems * item] * whole + ([rest * item] if rest else [])
    owners = iter(place(sizes, loads_bytes))
    return [
        Tensor(
            id=number,
            spec=spec,
            slice_elems=elems,
            shards=tuple(
                next(owners) if spec.rows is None else index % num_shards
                for index in range(num_slices(spec.num_elems, elems))
            ),
        )
        for number, spec, elems in tensors
    ]


def place(sizes_bytes: Sequence[int], loads_bytes: Sequence[int]) -> list[int]:
    """The shard of each slice, given what each shard holds already.

    Ties go to the lower number: the same input gives the same placement. The largest shard ends within one slice of
    the mean, and within a small one where there are enough of them.
    """
    heap = [(load, shard) for shard, load in enumerate(loads_bytes)]
    heapq.heapify(heap)
    owner = [0] * len(sizes_bytes)
    for index in _in_turn(sizes_bytes):
        load, shard = heap[0]
        owner[index] = shard
        heapq.heapreplace(heap, (load + sizes_bytes[index], shard))
    return owner


def _in_turn(sizes: Sequence[int]) -> list[int]:
    """Indices: of the large ones in their order, then of the small ones, the largest first."""
    large = max(sizes, default=0) / SMALL
    return sorted(range(len(sizes)), key=lambda i: (-min(sizes[i], large), i))
