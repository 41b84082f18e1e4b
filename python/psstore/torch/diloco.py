"""DiLoCo: an optimizer for learners far apart, which share what has become of their parameters now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from psstore.client.connect import connect
from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.learner_processes import LearnerProcesses
from psstore.torch.learner_step import LearnerStep, Learning, Weight
from psstore.torch.optimizer import DistributedOptimizer, check_arguments
from psstore.torch.training import StepStrategy, Training
from psstore.wire.messages import Exist


class DiLoCo(DistributedOptimizer):
    """Trains a model on learners that each take their own steps, and share pseudo-gradients every few of them.

    >>> inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
    >>> opt = psstore.torch.DiLoCo(model, inner, store, every=50, fragments=4, compression="int8")

    The object stands in for the inner optimizer, as a `DistributedOptimizer` does: schedulers, closures, gradient
    scalers, clipping and `state_dict()` are the inner one's, which keeps its state here. `fragments` times in `every`
    steps, a fragment of the parameters has its round: the difference between the store's values, as they were merged
    here last, and this learner's is its contribution; the store takes a step of the outer optimizer with the mean of
    all, and the new values are merged here. Fragments are whole tensors, balanced by bytes. Parameters change in
    `step()` alone.

    Construction gives every learner the store's newest values, which the first one's initialise. A quorum's `--grace-s`
    says how long a round waits for learners that are late; they go on with the values of the others. In modes 'async'
    and 'ssp' nobody is waited for: each contribution is an outer step of its own, taken by what the values are then,
    for which `DelayedNesterov` is made. The store is one DiLoCo's alone: each round is a fragment's. Buffers, such as
    batch-norm statistics, are each learner's own. An error of the store leaves the step taken; the round goes on with
    the next.

    Args:
        model: whose parameters are trained, those that require a gradient.
        inner_optimizer: any optimizer of torch's that one worker can step, over the model's parameters.
        store: a connected worker's `psstore.Store`; None on processes that are no learner's first.
        every: steps after which each fragment has had a round.
        fragments: how many; 1 shares the whole model at once.
        outer: what the store steps with, over any parameters: its class says the rule, its first group the
            hyper-parameters, which may be scheduled, and its 'reduction' or 'compensation', as `DistributedOptimizer`
            has them. None: SGD with lr 0.7 and Nesterov momentum 0.9, DiLoCo's.
        delay: steps that are taken while a round is under way, before its values are merged; 0 waits for them.
        merge: share of the new values in a parameter; the rest is what it is here. 1 takes them whole.
        weight: this learner's share in the mean, a number, or 'tokens': what `count` was given since the fragment's
            last round here. Modes 'sync' and 'backup' have it.
        compression: as `DistributedOptimizer` has it, of pseudo-gradients and new values.
        name: see `DistributedOptimizer`, as for `exist`.
        max_norm: clip the norm of this learner's gradient to this in each step.

    A learner may be several processes: `model` is a DistributedDataParallel, or its parameters are DTensors of
    fully_shard. The first of them, rank 0 of the model's group or mesh, has the store, as one worker; the others pass
    None. All make a DiLoCo with the same arguments and take the same steps; 'tokens' are those of all, and an error of
    one is raised by all.

    Learners of a store have to have the same `every`, `fragments`, outer optimizer and kind of weight: UsageError names
    what differs. Raises what `DistributedOptimizer` raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        store: Store | None,
        *,
        every: int = 50,
        fragments: int = 4,
        outer: torch.optim.Optimizer | None = None,
        delay: int = 0,
        merge: float = 1.0,
        weight: Weight = 1.0,
        compression: Compression | str | None = None,
        name: str = "",
        max_norm: float | None = None,
        exist: Exist = "match",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"a {type(model).__qualname__} is no torch.nn.Module: pass the model whose parameters train"
            )
        self.outer = outer if outer is not None else _usual_outer(model)
        """What the store steps with; its hyper-parameters are read in each round."""
        self._learning = Learning(
            outer=self.outer, every=every, fragments=fragments, delay=delay, merge=merge, weight=weight
        )
        self._learning.check()
        self._processes = LearnerProcesses.of(model)
        self._check_alike(model, inner_optimizer, store, compression)
        super().__init__(
            inner_optimizer,
            store if store is not None else connect("local://"),  # which is asked for a mode, and has nothing
            module_of(model).named_parameters(),
            name=name,
            max_norm=max_norm,
            compression=compression,
            exist=exist,
        )

    def _select_step(self, training: Training) -> StepStrategy:
        if not isinstance(self._learning.weight, str):
            training.weight = self._learning.weight
        self._learner = LearnerStep(training, self._learning, self._processes)
        return self._learner

    def _check_frozen(self) -> None:
        """Also where several processes are to raise what the first one finds: with the next round then."""
        try:
            super()._check_frozen()
        except UsageError as error:
            if self._processes.size == 1:
                raise
            self._learner.refusal = error

    def _check_alike(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, store: Store | None, compression: object
    ) -> None:
        """Raises UsageError, on all processes of a learner, for what can't be or is not the same on all of them."""
        processes, learning = self._processes, self._learning
        if store is None and processes.size == 1:
            raise UsageError(
                "store is None, which is for processes of a learner that are not its first, and here is one process"
                " alone: pass the store, or a model in DistributedDataParallel or of fully_shard, on all processes"
            )
        processes.together(lambda: self._check_store(inner, store))
        shapes = {f"shape of {name}": list(one.shape) for name, one in module_of(model).named_parameters()}
        alike = {"delay": learning.delay, "merge": learning.merge, "weight": learning.weight}
        processes.agree({**learning.agreed(), **alike, "compression": repr(compression), **shapes})

    def _check_store(self, inner: torch.optim.Optimizer, store: Any) -> None:
        if self._processes.leads:
            check_arguments(inner, store)
        elif store is not None:
            raise UsageError(
                f"process {self._processes.place} of a learner has a store, too; the learner is one worker of it:"
                " connect where torch.distributed.get_rank() is 0, and pass store=None elsewhere"
            )

    @property
    def store(self) -> Store:
        """The store that it trains on. Raises UsageError on processes of a learner that are not its first."""
        if not self._processes.leads:
            raise UsageError("this process has no store: the first one of its learner does")
        return super().store

    def count(self, tokens: float) -> None:
        """Says how many tokens, or samples, the next step is made of, with weight='tokens'."""
        self._learner.count(tokens)

    def synchronize(self) -> None:
        """Takes the store's newest values whole, as at the end of training: the model that all learners have made.
        Steps that no round has shared yet are dropped. Waits for the round that is under way, and for nobody else."""
        super().synchronize()


def module_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model that a DistributedDataParallel is around, whose names are those of learners of one process."""
    found: torch.nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return found


def _usual_outer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
