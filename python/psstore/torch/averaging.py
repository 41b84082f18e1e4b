"""Averaging: each worker trains alone, and every few steps the store averages the parameters.

Local SGD (Stich, arXiv:1805.09767): far fewer bytes than a gradient in each step, for workers that drift apart between
the averages. The wrapped optimizer steps here, and keeps its own state; any optimizer will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from psstore.errors import UsageError
from psstore.torch.optimizer_state import local_initial_state
from psstore.torch.parameters import REDUCED_GROUP, Trained
from psstore.torch.training import Overflow, Training, create_tensors, split_trained
from psstore.torch.worker_step import check_lockstep


class Averaging:
    """Steps the wrapped optimizer; every `every`-th step is followed by a round, whose contributions are parameters."""

    def __init__(self, training: Training, *, every: int) -> None:
        if every < 1:
            raise UsageError(f"every is {every}; the parameters are averaged after so many steps: at least 1")
        if not training.average:
            raise UsageError("mode='average' averages, so average=False can't be had with it")
        check_lockstep(training, "mode='average'")
        self._training = training
        self._every = every
        self._steps = 0
        """Steps since the last average."""

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        specs = [one.spec("reduce", group=REDUCED_GROUP) for one in trained]
        create_tensors(training, specs, [one.parameter.detach() for one in trained])
        training.pull(trained)
        split_trained(training, trained)

    def retire(self) -> None:
        """Does nothing: parameters are only sent in calls."""

    @property
    def shares_next(self) -> bool:
        return self._steps + 1 >= self._every

    @property
    def combines_workers(self) -> bool:
        return False

    @property
    def has_clipped(self) -> bool:
        return False

    def admit_closure(self) -> None:
        """Backward passes may run at any time."""

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone, and waits for others only if an average is due. An overflow skips this worker's step
        alone."""
        if not overflow.found:
            if overflow.loss_scale != 1.0:
                self._unscale(overflow.loss_scale)
            self._training.optimizer.step()
        if self.shares_next:
            self.synchronize()
        else:
            self._steps += 1
        return not overflow.found

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        """Clips this worker's gradient, since its step is made of nothing else."""
        return torch.nn.utils.clip_grad_norm_([one.parameter for one in self._training.trained], max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_loss_scale(self, loss_scale: float) -> None:
        """Does nothing: no gradient is sent."""

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        return {}

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Does nothing: parameters are sent without compression."""

    def publish(self) -> None:
        self._training.publish()
        self._training.pull(self._training.trained)

    def synchronize(self) -> None:
        training = self._training
        values = [(one.name, one.parameter.detach()) for one in training.trained]
        training.store.push_many(values)
        training.store.commit(present=[name for name, _ in values])
        training.pull(training.trained)
        self._steps = 0

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        optimizer = self._training.optimizer
        return local_initial_state(optimizer) if whole else optimizer.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads into this worker's optimizer."""
        self._training.optimizer.load_state_dict(dict(state_dict))

    # ---- how ----

    def _unscale(self, loss_scale: float) -> None:
        for one in self._training.trained:
            if one.parameter.grad is not None:
                one.parameter.grad.div_(loss_scale)
