"""Weights into a store and out of it, as each process has them: whole, or the part of a DTensor or of a `TensorPart`.

Who publishes and who loads may have cut the tensors in different ways, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from psstore.client.store import Store
from psstore.errors import UnknownTensor
from psstore.torch.parameters import (
    STORED_AS,
    as_stored,
    check_storable,
    check_tells_pieces,
    mark_written,
    named_tensors,
)
from psstore.torch.parts import (
    TensorPart,
    assemble,
    box_of,
    by_range,
    is_first_of_copies,
    local_of,
    overlapping,
    stored_parts,
)
from psstore.types import TensorSpec

Named = Iterable[tuple[str, torch.Tensor | TensorPart]]


def publish(store: Store, named: Named, *, name: str = "", as_version: bool = False) -> None:
    """Writes these tensors, or the parts of them that this process has, into the store, as plain tensors.

    Every process that has a part calls it; of copies of one part the first is written. `store` may be a client's.
    `named`: as `model.named_parameters()`, or `model.state_dict().items()`, whose integers and bools are float64 in the
    store. `name`: before each name, as that of a DistributedOptimizer. On return this process's parts are there, and
    parts that were cut otherwise are gone, where these overlap them: readers wait until all processes have published,
    as after a barrier of theirs.
    `as_version`: all parts at once, as one version of the store (`store.version` then), by `Store.publish`: every
    worker of the store calls it, and readers wait only where parts are cut otherwise than before.

    Raises UsageError for a DTensor that is Partial, for pieces of a FullyShardedDataParallel, which don't say that they
    are, and for complex or sparse tensors, RuleMismatch for tensors that a DistributedOptimizer trains, or that were
    published the other way.
    """
    ours = {one: tensor for one, tensor in _by_name(named, name).items() if is_first_of_copies(tensor)}
    boxes = {whole: box_of(tensor) for whole, tensor in ours.items()}
    there = stored_parts(store.keys(), ours)
    names = {whole: box.name(whole) for whole, box in boxes.items()}
    values = {names[whole]: _storable(whole, local_of(tensor)) for whole, tensor in ours.items()}
    if as_version:
        store.publish(values)
    else:
        _write(store, values)
    for whole, box in boxes.items():
        for stale in overlapping(there[whole], box).keys() - {names[whole]}:
            with suppress(UnknownTensor):  # another process has dropped it
                store.drop(stale)


def _by_name(named: Named, name: str) -> dict[str, torch.Tensor | TensorPart]:
    """By the tensors' names in the store. Raises UsageError."""
    prefix = f"{name}/" if name else ""
    found = {prefix + one: tensor for one, tensor in named_tensors("parameters", named)}
    for one in found:
        check_tells_pieces(one)
    return found


def _storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_storable(tensor, f"tensor {name!r}")
    return as_stored(tensor)


def _write(store: Store, values: Mapping[str, torch.Tensor]) -> None:
    store.create_many(
        [
            TensorSpec(name=name, shape=tuple(value.shape), dtype=STORED_AS[value.dtype], rule="assign")
            for name, value in values.items()
        ]
    )
    store.push_many(values, op="assign")


@torch.no_grad()
def load(store: Store, named: Named, *, name: str = "") -> None:
    """Reads these tensors, or the parts of them that this process has, from a store that has them in any parts: what
    `publish` has written, or a DistributedOptimizer trains. Tensors that are trained are read at one version.

    `named`, `name`: as of `publish`; the tensors' memory is written. Raises UnknownTensor if parts are missing,
    ShapeMismatch; tensors that come later are as they were.
    """
    ours = _by_name(named, name)
    boxes = {whole: box_of(tensor) for whole, tensor in ours.items()}
    with store.snapshot() as view:
        found = by_range(boxes, store.keys(), view.pull_many)
    for whole, tensor in ours.items():
        parts = [(box, torch.as_tensor(values, device="cpu")) for box, values in found[whole]]
        assemble(whole, boxes[whole], parts, local_of(tensor))
        mark_written([tensor.local if isinstance(tensor, TensorPart) else tensor])
