"""Steps in which the store reduces the workers' gradients, a round each. Who applies them is the subclasses' matter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from psstore.client.rounds import Commit
from psstore.errors import UsageError
from psstore.torch.gradients import Gradients
from psstore.torch.training import Overflow, Training

Hypers = dict[int, dict[str, float]]
"""By parameter group, by its number in the store."""


@dataclass
class Ended:
    """A round that was committed, while its values are not here."""

    commit: Commit
    hypers: Hypers
    max_norm: float | None
    counts_all: bool = False
    """Every parameter has a gradient here."""
    norm: float | None = None
    """Of the reduced gradient, if it is to be clipped and was asked for."""

    @property
    def skipped(self) -> bool:
        return self.commit.skipped or (self.norm is not None and not math.isfinite(self.norm))

    @property
    def changed_all(self) -> bool:
        """Nobody has to ask what is newer than before. False: perhaps not all."""
        return self.counts_all and not self.skipped and not self.commit.late


class Reducing(ABC):
    """Push this round's gradients, commit, and take what came of them.

    A step that fails can be taken again: what it had done stands.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._gradients = Gradients(training.store, overlap=training.overlap)
        self._ended: Ended | None = None

    @abstractmethod
    def _prepare(self) -> None:
        """Before a round is committed."""

    @abstractmethod
    def _hypers(self) -> Hypers:
        """What the commit says of them, as they are now."""

    @abstractmethod
    def _take(self, ended: Ended) -> None:
        """Makes the parameters what the round makes of them."""

    def retire(self) -> None:
        self._gradients.retire()

    @property
    def shares_next(self) -> bool:
        return True

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

    def expect_loss_scale(self, loss_scale: float) -> None:
        self._gradients.expect_loss_scale(loss_scale)

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        return self._gradients.residuals()

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._gradients.set_residuals(residuals)

    # ---- how ----

    def _commit(self, overflow: Overflow, *, max_norm: float | None = None) -> Ended:
        """What remains is to `_receive` its values. Should this fail, the gradients stay as they are in the store."""
        training = self._training
        self._prepare()
        hypers = self._hypers()
        gradients = self._gradients
        if overflow.found:
            present = gradients.withhold()
        else:
            present = gradients.complete(rewritten=overflow.rewritten, loss_scale=overflow.loss_scale)
        committed = training.store.commit(
            hypers,
            loss_scale=overflow.loss_scale,
            non_finite=overflow.found,
            present=present,
            average=training.average,
            max_norm=max_norm,
        )
        counts_all = len(present) == len(training.trained)
        self._ended = Ended(committed, hypers, max_norm, counts_all)
        return self._ended

    def _receive(self, ended: Ended) -> None:
        """The values of a committed round; then it is over."""
        self._take(ended)
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
