"""A model's buffers (batch-norm statistics and the like): rank 0's, on every worker.

Buffers are no parameters: no gradient moves them, and each worker's forward passes write them from its own data. DDP
broadcasts rank 0's before each forward pass; here rank 0 pushes its buffers before its commit, and the others pull them
after theirs. A buffer that rank 0 has not changed is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch

from psstore.torch.parameters import STORED_AS, as_stored, check_storable, uncompiled
from psstore.torch.training import Training, create_tensors
from psstore.types import TensorSpec


class Buffers:
    """Buffers of one model. The store keeps integers and bools as float64, which holds them exactly up to 2**53."""

    def __init__(self, training: Training, named: Iterable[tuple[str, torch.Tensor]], *, prefix: str) -> None:
        """Creates the buffers in the store, with rank 0's values. On return they hold what the store holds."""
        self._training = training
        self._buffers: dict[str, torch.Tensor] = {}
        for name, buffer in named:
            check_storable(buffer, f"buffer {name!r}")
            self._buffers[prefix + uncompiled(name)] = buffer
        self._held: dict[str, torch.Tensor] = {}
        """Copies of the buffers as they were when they last were the store's."""
        if self._buffers:
            specs = [_spec(name, buffer) for name, buffer in self._buffers.items()]
            create_tensors(training, specs, [as_stored(buffer) for buffer in self._buffers.values()])
            self._pull(list(self._buffers))

    @property
    def by_name(self) -> Mapping[str, torch.Tensor]:
        """The buffers themselves, by their names in the store."""
        return self._buffers

    def push(self) -> None:
        """Pushes rank 0's buffers that have changed; called on every worker before its commit."""
        if self._training.is_first and (changed := self._changed()):
            self._training.store.push_many({name: as_stored(self._buffers[name]) for name in changed})
            self._remember(changed)

    def pull(self) -> None:
        """Pulls rank 0's buffers on the other workers, of this round, or of the next if rank 0 is that far; called on
        every worker after its commit."""
        if self._training.is_first:
            return
        changed = self._changed()
        if changed:
            self._pull(changed)
        store = self._training.store
        others = sorted(self._buffers.keys() - set(changed), key=store.version_of)
        for version, names in groupby(others, key=store.version_of):
            self._pull(list(names), newer_than=version)

    def _changed(self) -> list[str]:
        """Names of buffers that this worker's forward passes wrote, found by comparing: batch norm does not count its
        changes in their versions."""
        return [name for name, held in self._held.items() if not torch.equal(held, self._buffers[name])]

    def _pull(self, names: list[str], *, newer_than: int | None = None) -> None:
        targets = [as_stored(self._buffers[name]) for name in names]
        values = self._training.store.pull_many(names, out=targets, if_newer_than=newer_than)
        pulled = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for name, value in pulled.items():
            if self._buffers[name].dtype not in STORED_AS:
                self._buffers[name].copy_(value)
        self._remember(pulled)

    def _remember(self, names: Iterable[str]) -> None:
        self._held.update({name: self._buffers[name].detach().clone() for name in names})


def _stored_as(buffer: torch.Tensor) -> str:
    return STORED_AS.get(buffer.dtype, "float64")


def _spec(name: str, buffer: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(buffer.shape), dtype=_stored_as(buffer), rule="assign", zeros=False)
