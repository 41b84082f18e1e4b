"""Places slices on shards by bytes: longest processing time first (Graham 1969, SIAM J. Appl. Math. 17(2))."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def place(sizes_bytes: Sequence[int], loads_bytes: Sequence[int]) -> list[int]:
    """The shard of each slice, given what each shard holds already.

    Largest first onto the least loaded shard, ties to the lower number: the same input gives the same
    placement. With slices of at most 1 MiB, the largest shard ends within one small slice of the mean.
    """
    heap = [(load, shard) for shard, load in enumerate(loads_bytes)]
    heapq.heapify(heap)
    owner = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        load, shard = heap[0]
        owner[index] = shard
        heapq.heapreplace(heap, (load + sizes_bytes[index], shard))
    return owner
