"""Sets of tensor ids as inclusive ranges: a model's tensors are created together, so that one range says them all."""

from __future__ import annotations

import functools
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""Ascending, disjoint, not touching; each (first, last)."""


def to_ranges(ids: Iterable[int]) -> Ranges:
    """The ranges of these ids, in any order, repeated or not."""
    return _ranges_of(ids if isinstance(ids, frozenset) else frozenset(ids))


@functools.lru_cache(maxsize=64)
def _ranges_of(distinct: frozenset[int]) -> Ranges:
    """Remembered: a training loop pushes the same tensors in every round."""
    if not distinct:
        return ()
    first, last = min(distinct), max(distinct)
    if last - first == len(distinct) - 1:
        return ((first, last),)  # nearly always
    made: list[tuple[int, int]] = []
    for tensor_id in sorted(distinct):
        if made and made[-1][1] + 1 == tensor_id:
            made[-1] = (made[-1][0], tensor_id)
        else:
            made.append((tensor_id, tensor_id))
    return tuple(made)


def contains(ranges: Ranges, tensor_id: int) -> bool:
    return any(first <= tensor_id <= last for first, last in ranges)


def well_formed(ranges: Ranges) -> bool:
    """True if they are as `to_ranges` makes them: what comes from a client is checked by this."""
    previous = -1
    for first, last in ranges:
        if not previous + 1 < first <= last:
            return False
        previous = last
    return True
