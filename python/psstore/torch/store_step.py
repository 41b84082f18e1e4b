"""The store takes the step: gradients go there, new parameters come back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from psstore.client.operations import Commit
from psstore.errors import UsageError
from psstore.torch import state
from psstore.torch.creating import create, split_trained
from psstore.torch.edits import Edits, publish
from psstore.torch.gradients import Gradients
from psstore.torch.parameters import STORED_AS, Trained
from psstore.torch.rules import hyper_of, rule_of
from psstore.torch.stepping import Overflow, Training
from psstore.types import TensorSpec

Hypers = dict[int, dict[str, float]]
"""By parameter group, by its number in the store."""


@dataclass
class Ended:
    """A round that was committed, while its values are not here."""

    commit: Commit
    hypers: Hypers
    max_norm: float | None
    norm: float | None = None
    """Of the reduced gradient, if it is to be clipped and was asked for."""

    @property
    def skipped(self) -> bool:
        return self.commit.skipped or (self.norm is not None and not math.isfinite(self.norm))


class StoreStep:
    """Push this round's gradients, commit with the hyper-parameters of now, pull into the parameters' own memory.

    A step that fails can be taken again: what it had done stands.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._edits = Edits(training)
        self._gradients = Gradients(training.store, overlap=training.overlap != "none")
        self._ended: Ended | None = None
        self._decision: int | None = None
        """The last one that all parameters here have in them; None before the first step."""

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        create(training, [self._spec(one) for one in trained], [one.parameter.detach() for one in trained])
        self._pull(trained)
        begun, continued = split_trained(training, trained)
        state.adopt(training, begun)
        state.forget(training, continued)
        self._edits.note(trained)
        self._gradients.watch({one.name: one.parameter for one in trained})

    def admit_closure(self) -> None:
        """Backward passes may run until the round's commit."""
        if self._ended is not None and self._ended.max_norm is not None:
            raise UsageError(
                "clip_grad_norm_ has sent the gradients already, and the closure would make new ones: call it within"
                " the closure, after backward"
            )

    def step(self, overflow: Overflow) -> bool:
        ended = self._ended
        if ended is not None and ended.max_norm is not None:
            self._check_clipped(ended, overflow)
        elif ended is not None and not self._gradients.unchanged():
            self._receive(ended)  # what a step has left behind that failed; these gradients are the next one's
            ended = None
        if ended is None:
            ended = self._commit(overflow)
        self._receive(ended)
        return not ended.skipped

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        consistency = self._training.store.consistency
        if not consistency.lockstep:  # each commit is one worker's: what is reduced is its own gradient
            return torch.nn.utils.clip_grad_norm_([one.parameter for one in self._training.trained], max_norm)
        if consistency.mode == "backup":
            raise UsageError(
                "clip_grad_norm_ needs the gradients of all workers, and in mode 'backup' a round does without the late"
                " ones: start the store with --mode sync, or clip each worker's own with torch's clip_grad_norm_"
            )
        ended = self._ended
        if ended is not None and ended.norm is not None:
            raise UsageError("clip_grad_norm_ was called twice in this round: call it once, right before step()")
        if ended is None or ended.max_norm is None:
            ended = self._commit(overflow, max_norm=max_norm)
        ended.norm = math.inf if ended.commit.skipped else self._training.store.global_norm()
        first = self._training.trained[0].parameter
        return torch.tensor(ended.norm, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradients.no_sync()

    def publish(self) -> None:
        publish(self._training, self._training.trained)
        self._training.store.barrier("published")
        self._pull(self._training.trained)
        self._edits.note(self._training.trained)

    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        return state.read(self._training)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state.load(self._training, state_dict)

    # ---- how ----

    def _spec(self, one: Trained) -> TensorSpec:
        training = self._training
        return TensorSpec(
            name=one.name,
            shape=tuple(one.parameter.shape),
            dtype=STORED_AS[one.parameter.dtype],
            rule=rule_of(training.optimizer, training.optimizer.param_groups[one.group]),
            group=training.first_group + one.group,
            zeros=False,
        )

    def _commit(self, overflow: Overflow, *, max_norm: float | None = None) -> Ended:
        """What remains is to `_receive` its values. Should this fail, the gradients stay as they are in the store."""
        training = self._training
        if training.optimizer.state:
            state.adopt(training, training.trained)
        self._edits.settle()
        gradients = self._gradients
        present = gradients.withhold() if overflow.found else gradients.complete(rewritten=overflow.rewritten)
        hypers = self._hypers()
        committed = training.store.commit(
            hypers,
            loss_scale=overflow.loss_scale,
            non_finite=overflow.found,
            present=present,
            average=training.average,
            max_norm=max_norm,
        )
        self._ended = Ended(committed, hypers, max_norm)
        return self._ended

    def _receive(self, ended: Ended) -> None:
        """The values of a committed round; then it is over."""
        trained = self._training.trained
        self._pull(trained, newer_than=self._decision)
        self._edits.note(trained)
        self._decision = ended.commit.decision
        self._ended = None
        self._gradients.forget()

    def _check_clipped(self, ended: Ended, overflow: Overflow) -> None:
        """Between clip_grad_norm_ and step() nothing may change that was sent."""
        if not self._gradients.unchanged():
            raise UsageError(
                "gradients were changed after clip_grad_norm_, which had sent them: call it after the last backward and"
                " whatever else changes them, right before step()"
            )
        if ended.hypers != self._hypers():
            raise UsageError(
                "hyper-parameters were changed between clip_grad_norm_ and step(), and had been sent: change them"
                " after step(), as schedulers do, or before clip_grad_norm_"
            )
        if overflow.loss_scale != 1.0:
            raise UsageError(
                "clip_grad_norm_ has clipped gradients that were still multiplied by the loss scale: call"
                " scaler.unscale_(optimizer) before it"
            )

    def _hypers(self) -> Hypers:
        """Of every group that has something to train, by its number in the store."""
        training = self._training
        groups = training.optimizer.param_groups
        return {
            training.first_group + index: hyper_of(rule_of(training.optimizer, groups[index]), groups[index])
            for index in sorted({one.group for one in training.trained})
        }

    def _pull(self, trained: Sequence[Trained], *, newer_than: int | None = None) -> None:
        """Into the parameters; only what the store has changed after that decision."""
        names = [one.name for one in trained]
        values = self._training.store.pull_many(
            names, out=[one.parameter.detach() for one in trained], if_newer_than=newer_than
        )
        increment_version([one.parameter for one, value in zip(trained, values, strict=True) if value is not None])
