"""Averaging: each worker trains alone, and every few steps the store averages the parameters.

Local SGD (Stich, arXiv:1805.09767): far fewer bytes than a gradient in each step, for workers that drift apart between
the averages. The wrapped optimizer steps here, and keeps its own state; any optimizer will do.

What travels are the parameters, where each round has all workers and no codec takes anything: their mean is exact, and
no worker keeps a copy. Whoever is late for a round would lose its steps by taking that mean, and a parameter in few
bytes is a parameter less what they lost; a difference to what the store had bears both. So with a quorum or with
compression it is a learner's step that is taken (learner_step.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from psstore.client.arguments import whole
from psstore.errors import RuleMismatch, UsageError
from psstore.torch.change_detection import GradientSnapshots
from psstore.torch.exchange import Exchange
from psstore.torch.learner_processes import LearnerProcesses
from psstore.torch.learner_step import LearnerStep, Learning
from psstore.torch.local_step import LocalStep
from psstore.torch.param_groups import GradientOptions, may_compress, with_gradient_options
from psstore.torch.parameters import Trained
from psstore.torch.training import Overflow, StepStrategy, Training, create_tensors, split_trained
from psstore.torch.warnings import tell_of_refusal, with_hint
from psstore.types import REDUCED_GROUP, TensorSpec


def select_averaging(training: Training, *, every: int) -> StepStrategy:
    """The step strategy that averages, after `every` steps. Raises UsageError for what can't be averaged."""
    if whole("every", every) < 1:
        raise UsageError(f"every is {every}; the parameters are averaged after so many steps: at least 1")
    if not training.average:
        raise UsageError("mode='average' averages, so average=False can't be had with it")
    if training.has_parts:
        raise UsageError("mode='average' is for workers with whole models, and these have parts: leave it out")
    consistency = training.store.consistency
    if not consistency.lockstep:
        raise UsageError(
            f"mode='average' needs rounds of several workers, and in mode {consistency.mode!r}, as this store has it,"
            " each worker's are its own: start it with --mode sync, or with --quorum and --grace-s, which waits for"
            " nobody longer; or train with psstore.torch.DiLoCo (docs/learners.md, 'Where nobody waits')"
        )
    compresses = may_compress(training.optimizer.param_groups, training.compression)
    if compresses or consistency.mode == "backup":
        return DifferenceAveraging(training, every=every)
    return Averaging(training, every=every)


class Averaging(LocalStep):
    """Steps the wrapped optimizer; every `every`-th step is followed by a round, whose contributions are parameters."""

    def __init__(self, training: Training, *, every: int) -> None:
        super().__init__(training)
        self._every = every
        self._exchange: Exchange | None = None
        """A round that has begun: one that fails goes on when it is taken again."""

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        groups = training.optimizer.param_groups
        if may_compress(groups, training.compression):
            raise UsageError(
                "a parameter group has come with compression, and mode='average' has sent parameters as they are since"
                " this optimizer was made: make it anew with that group, on all workers"
            )
        specs = [with_gradient_options(one.spec("reduce", group=REDUCED_GROUP), groups[one.group]) for one in trained]
        with _telling_of_compression():
            create_tensors(training, specs, [one.parameter.detach() for one in trained])
        training.pull(trained)
        split_trained(training, trained)

    @property
    def shares_next(self) -> bool:
        return (self._steps + 1) % self._every == 0

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone, and waits for others only if an average is due. A round that has failed is taken
        first: this step would be averaged away. If it is the step before that, asked for again, that is all."""
        if self._exchange is not None:
            was_taken = self._was_taken()
            self.synchronize()
            if was_taken:
                return not overflow.found
        stepped = super().step(overflow)
        if self.shares_next:
            self._unshared = GradientSnapshots(self._gradients())
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
        if self._exchange is None:
            training = self._training
            self._exchange = Exchange(self._push, self._commit, lambda: training.pull(training.trained))
        self._exchange.finish()
        self._exchange, self._unshared, self._steps = None, None, 0

    def _push(self) -> None:
        self._training.store.push_many((one.name, one.parameter.detach()) for one in self._training.trained)

    def _commit(self) -> None:
        training = self._training
        present = [one.name for one in training.trained]
        tell_of_refusal(training.store.commit(weight=training.weight, present=present))


class DifferenceAveraging(LearnerStep):
    """Averages what has become of the parameters since the last average: a learner whose outer optimizer takes the mean
    difference whole, and who shares the whole model at once."""

    def __init__(self, training: Training, *, every: int) -> None:
        outer = _outer_of(training.optimizer)
        learning = Learning(outer=outer, every=every, fragments=1, delay=0, merge=1.0, weight=1.0)
        super().__init__(training, learning, LearnerProcesses())

    @property
    def shares_next(self) -> bool:
        return self._unshared is not None or super().shares_next

    def step(self, overflow: Overflow) -> bool:
        """Steps this worker alone, and waits for others only if an average is due. A round that has failed is taken
        first: this step would be merged over. If it is the step before that, asked for again, that is all."""
        if self._round is not None or self._unshared is not None:
            was_taken = self._was_taken()
            self._share()
            if was_taken:
                return not overflow.found
        stepped = LocalStep.step(self, overflow)
        self._steps += 1
        if self._is_due(self._steps):
            self._unshared = GradientSnapshots(self._gradients())
            self._share()
        return stepped

    def progress(self) -> Mapping[str, Any]:
        """As of one that averages parameters: a training may go on in either way."""
        return LocalStep.progress(self)

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        LocalStep.set_progress(self, progress)

    def synchronize(self) -> None:
        """Averages at once, by a round of all steps that none has shared; one that has failed goes on. Who comes too
        late for it takes part in the next one, unless training was stopped, where no other one counts."""
        is_late = True
        while is_late and not self._training.store.stopped:
            is_late = self._share()
        self._steps = 0

    def _share(self) -> bool:
        """A round, or the rest of one that has failed. Returns whether this worker came too late for it."""
        if self._round is None:
            self._begin()
        is_late = self._merge_if_due(math.inf)
        self._unshared = None
        return is_late

    def _create(self, specs: Sequence[TensorSpec], values: Sequence[torch.Tensor]) -> None:
        with _telling_of_compression():
            super()._create(specs, values)


def _outer_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What makes the store's values the mean, or what else the groups of the optimizer reduce by. Raises UsageError."""
    groups = optimizer.param_groups
    first, *others = [GradientOptions.of(group) for group in groups]
    if any(other != first for other in others):
        raise UsageError(
            "mode='average' averages all parameters alike with compression or a quorum, and the parameter groups have"
            f" other reductions than the first, {first.reduction!r}: give all the same 'reduction' and 'trim'"
        )
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    return torch.optim.SGD([{"params": parameters, **first._asdict()}], lr=1.0)


@contextmanager
def _telling_of_compression() -> Iterator[None]:
    """Within it, an error says also by what workers of one training may have made tensors of two kinds."""
    try:
        yield
    except RuleMismatch as error:
        hint = "with mode='average', compression is for all workers or for none, by which they exchange differences"
        raise with_hint(error, hint) from None
