"""LocalStep: a step strategy in which each worker steps by itself, and what it shares now and then are parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from psstore.torch.change_detection import GradientSnapshots
from psstore.torch.optimizer_state import local_initial_state
from psstore.torch.training import Overflow, Training


class LocalStep:
    """Steps the wrapped optimizer, which keeps its own state; any will do. Rounds are up to the subclasses."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps = 0
        """How many this worker has taken, from which it follows when a round is due."""
        self._unshared: GradientSnapshots | None = None
        """Gradients of a step that was taken, whose round has begun and not ended well."""

    def retire(self) -> None:
        """Does nothing: parameters are only sent in calls."""

    @property
    def combines_workers(self) -> bool:
        return False

    @property
    def has_clipped(self) -> bool:
        """Whether the next step is one that was taken, clipped as it was to be."""
        return self._was_taken()

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone. An overflow skips this worker's step alone."""
        if not overflow.found:
            if overflow.loss_scale != 1.0:
                self._unscale(overflow.loss_scale)
            self._training.optimizer.step()
        return not overflow.found

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        """Clips this worker's gradient, since its step is made of nothing else."""
        return torch.nn.utils.clip_grad_norm_(self._training.trained_owners, max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_loss_scale(self, loss_scale: float) -> None:
        """Does nothing: no gradient is sent."""

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        optimizer = self._training.optimizer
        return local_initial_state(optimizer) if whole else optimizer.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads into this worker's optimizer."""
        self._training.optimizer.load_state_dict(dict(state_dict))

    def progress(self) -> Mapping[str, Any]:
        """Where this worker is between two rounds, beside parameters and the wrapped optimizer's state."""
        return {"steps": self._steps}

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Goes on from where another one was."""
        self._steps = int(progress["steps"])

    # ---- how ----

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {one.name: one.owner.grad for one in self._training.trained if one.owner.grad is not None}

    def _was_taken(self) -> bool:
        """Whether these gradients are of a step that was taken, and is asked for again since its round has failed."""
        return self._unshared is not None and self._unshared.match(self._gradients())

    def _unscale(self, loss_scale: float) -> None:
        for one in self._training.trained_owners:
            if one.grad is not None:
                one.grad.div_(loss_scale)
