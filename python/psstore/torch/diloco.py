"""DiLoCo: an optimizer for learners far apart, which share what has become of their parameters now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psstore.client.store import Store
from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.learner_step import LearnerStep, Learning, Weight
from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.training import StepStrategy, Training
from psstore.wire.messages import Exist

PROGRESS_KEY = "progress"
"""Entry of a state dict beside torch's 'state' and 'param_groups', which torch's optimizers do not look at."""


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

    Construction gives every learner the store's newest values, which the first one's initialise. The store needs mode
    'sync', or a quorum, whose `--grace-s` says how long a round waits for learners that are late; they go on with the
    values of the others. It is one DiLoCo's alone: each round is a fragment's. Buffers, such as batch-norm
    statistics, are each learner's own. An error of the store leaves the step taken; the round goes on with the next.

    Args:
        model: whose parameters are trained, those that require a gradient.
        inner_optimizer: any optimizer of torch's that one worker can step, over the model's parameters.
        store: a connected worker's `psstore.Store`.
        every: steps after which each fragment has had a round.
        fragments: how many; 1 shares the whole model at once.
        outer: what the store steps with, over any parameters: its class says the rule, its first group the
            hyper-parameters, which may be scheduled. None: SGD with lr 0.7 and Nesterov momentum 0.9, DiLoCo's.
        delay: steps that are taken while a round is under way, before its values are merged; 0 waits for them.
        merge: share of the new values in a parameter; the rest is what it is here. 1 takes them whole.
        weight: this learner's share in the mean, a number, or 'tokens': what `count` was given since the fragment's
            last round here.
        compression: as `DistributedOptimizer` has it, of pseudo-gradients and new values.
        name: see `DistributedOptimizer`, as for `exist`.
        max_norm: clip the norm of this learner's gradient to this in each step.

    Learners of a store have to have the same `every`, `fragments`, outer optimizer and kind of weight: UsageError names
    what differs. Raises what `DistributedOptimizer` raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        store: Store,
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
        super().__init__(
            inner_optimizer,
            store,
            model.named_parameters(),
            name=name,
            max_norm=max_norm,
            compression=compression,
            exist=exist,
        )

    def _select_step(self, training: Training) -> StepStrategy:
        if not isinstance(self._learning.weight, str):
            training.weight = self._learning.weight
        self._learner = LearnerStep(training, self._learning)
        return self._learner

    def count(self, tokens: float) -> None:
        """Says how many tokens, or samples, the next step is made of, with weight='tokens'."""
        self._learner.count(tokens)

    def synchronize(self) -> None:
        """Takes the store's newest values whole, as at the end of training: the model that all learners have made.
        Steps that no round has shared yet are dropped. Waits for the round that is under way, and for nobody else."""
        super().synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and where this learner is between rounds. The outer optimizer's state is in the store,
        and in its checkpoints. A round that is under way is not in it."""
        return {**super().state_dict(), PROGRESS_KEY: self._learner.progress()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a `state_dict()` of this class or of the inner optimizer's. Load the model's own afterwards or
        before to go on with what was not shared yet; else this learner goes on from the store's values."""
        loaded = dict(state_dict)
        progress = loaded.pop(PROGRESS_KEY, None)
        super().load_state_dict(loaded)
        if progress is not None:
            self._learner.set_progress(progress)


def _usual_outer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
