"""Averaging: each worker trains alone, and every few steps the store averages the parameters.

Local SGD (Stich, arXiv:1805.09767): far fewer bytes than a gradient in each step, for workers that drift apart between
the averages. The wrapped optimizer steps here, and keeps its own state; any optimizer will do. With an outer SGD of lr
1, DiLoCo (learner_step.py) averages by differences, with what learners have beside that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psstore.errors import UsageError
from psstore.torch.local_step import LocalStep
from psstore.torch.param_groups import with_gradient_options
from psstore.torch.parameters import Trained
from psstore.torch.training import Overflow, Training, create_tensors, split_trained
from psstore.torch.warnings import tell_of_refusal
from psstore.torch.worker_step import check_lockstep
from psstore.types import REDUCED_GROUP

WITHOUT_LATE_WORKERS = "psstore.torch.DiLoCo with an outer SGD of lr 1 (docs/pytorch.md, 'Model averaging')"
"""What averages, too, and has a quorum and compression."""


class Averaging(LocalStep):
    """Steps the wrapped optimizer; every `every`-th step is followed by a round, whose contributions are parameters."""

    def __init__(self, training: Training, *, every: int) -> None:
        if every < 1:
            raise UsageError(f"every is {every}; the parameters are averaged after so many steps: at least 1")
        if not training.average:
            raise UsageError("mode='average' averages, so average=False can't be had with it")
        check_lockstep(training, "mode='average'", instead=f", or average by {WITHOUT_LATE_WORKERS}")
        super().__init__(training)
        self._every = every
        self._steps = 0
        """Steps since the last average."""

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        groups = training.optimizer.param_groups
        specs = [with_gradient_options(one.spec("reduce", group=REDUCED_GROUP), groups[one.group]) for one in trained]
        create_tensors(training, specs, [one.parameter.detach() for one in trained])
        training.pull(trained)
        split_trained(training, trained)

    @property
    def shares_next(self) -> bool:
        return self._steps + 1 >= self._every

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone, and waits for others only if an average is due."""
        stepped = super().step(overflow)
        if self.shares_next:
            self.synchronize()
        else:
            self._steps += 1
        return stepped

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
        tell_of_refusal(training.store.commit(weight=training.weight, present=[name for name, _ in values]))
        training.pull(training.trained)
        self._steps = 0
