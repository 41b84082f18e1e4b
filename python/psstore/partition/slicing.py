"""Cuts a tensor into slices by its own shape, never by the number of shards.

That a slice is the same whatever the shard count is what makes results independent of it.
"""

from __future__ import annotations

from psstore import _core
from psstore.errors import BadArgument
from psstore.types import ITEM_BYTES, TensorSpec

SLICE_BYTES = 1 << 18
"""Target size of a slice. Small enough that a slice and its gradients stay in a 2-MiB L2 while it is reduced, that
placing whole slices balances shards to 1 %, and that layers of a small model are spread over several: after an early
commit nothing comes back before a whole slice is there from everybody, which takes its time on slow links. Large
enough that one descriptor of 32 bytes and one lock per slice cost nothing."""


def slice_elems(spec: TensorSpec) -> int:
    """Elements per slice of this tensor; of a table, per row. Raises BadArgument if it would need more slices than a
    key can number."""
    if spec.rows is not None:
        return spec.rows.dim  # a slice is a partition
    elems = SLICE_BYTES // ITEM_BYTES[spec.dtype]
    if num_slices(spec.num_elems, elems) >= 1 << _core.SLICE_INDEX_BITS:
        raise BadArgument(f"tensor {spec.name!r}: {spec.num_elems} elements are more than a tensor can have")
    return elems


def num_slices(num_elems: int, elems_per_slice: int) -> int:
    """0 for an empty tensor: it has a shape and no bytes."""
    return -(-num_elems // elems_per_slice)
