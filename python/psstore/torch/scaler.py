"""GradScaler: torch's, with one outcome for all workers of a store."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.training import Overflow


class GradScaler(torch.amp.GradScaler):
    """Scales losses for training in half precision, as torch.amp.GradScaler does, with optimizers of a store.

    >>> scaler = psstore.torch.GradScaler()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(opt)
    >>> scaler.update()

    Made and called as torch's, with the same state_dict; what it does with other optimizers is torch's. Gradients are
    sent as they are, times the scale, while backward runs, and the store divides: exactly, if the scale is a power of
    two. One worker's overflow skips the round for all, and every worker's `update()` sees it: scales that are equal
    stay equal. `opt.skipped` tells the script.

    `unscale_` is only needed to look at or change the gradients, or to clip them; they are sent in step() then:

    >>> scaler.unscale_(opt)
    >>> opt.clip_grad_norm_(1.0)
    >>> scaler.step(opt)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scaled: list[DistributedOptimizer] = []
        """Optimizers that compress, and have stepped with scaled gradients since the last update."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides this worker's gradients by the scale, and looks for an overflow."""
        super().unscale_(optimizer)
        if self._enabled and isinstance(optimizer, DistributedOptimizer):
            optimizer.overflow = Overflow(found=self._found(optimizer), rewritten=True)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step()`, in any case: every round has all its workers. Should it fail, it may be called again."""
        if not (self._enabled and isinstance(optimizer, DistributedOptimizer)):
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise RuntimeError("a GradScaler takes no closure: call backward before its step()")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            optimizer.overflow = Overflow(loss_scale=scale.item(), found=self._found(optimizer))
            if optimizer.compresses:
                self._scaled.append(optimizer)
        optimizer.step()
        state["stage"] = OptState.STEPPED
        state["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(optimizer.skipped))}
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale as torch does, and tells optimizers that compress: what codecs kept back goes on in the new
        scale."""
        super().update(new_scale)
        for optimizer in self._scaled:
            optimizer.expect_loss_scale(self.get_scale())
        self._scaled.clear()

    def _found(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(found.item() > 0 for found in self._found_inf_per_device(optimizer).values())
