"""What pushing while backward runs takes, of parameters (gradients.py) as of tables of rows (table_gradients.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from psstore.client.store import Store
from psstore.torch.graphs import outside_of_graphs


class EarlyPushes:
    """What is known of gradients before `complete()` says it."""

    def __init__(self) -> None:
        self._no_sync_depth = 0
        self._loss_scale = 1.0
        """Factor by which gradients are larger than the real ones, as far as is known before `complete`."""

    def expect_loss_scale(self, loss_scale: float) -> None:
        """Announces the factor by which the next gradients are likely to be larger than the real ones."""
        self._loss_scale = loss_scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the context only accumulate; their gradients are pushed with the next pass's."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1


def pushes_during_backward(overlap: str, store: Store, *, from_memory: bool) -> bool:
    """Whether gradients are pushed while backward runs. `from_memory`: they are in main memory. A push into shared
    memory is a copy, by a processor that backward could use: with two workers on two cores, hooks and hand-overs
    between threads were a seventh of a step (docs/performance.md, Training)."""
    return not (from_memory and store.shares_memory) if overlap == "auto" else overlap == "backward"


def hook(
    taking: weakref.WeakMethod[Callable[[str, torch.Tensor], None]], name: str, parameter: torch.Tensor
) -> RemovableHandle:
    """Called when backward is done with this parameter's gradient."""

    @outside_of_graphs  # where a step is compiled whole
    def arrived(parameter: torch.Tensor) -> None:
        take = taking()
        if take is not None:
            take(name, parameter)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
    return handle


def remove(*kinds: list[RemovableHandle]) -> None:
    for hooks in kinds:
        for hook in hooks:
            hook.remove()
        hooks.clear()
