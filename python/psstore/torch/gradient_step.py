"""GradientStep: a step strategy in which the store reduces the workers' gradients, a round for each step.

Who applies the reduced gradients is up to the subclasses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from psstore.client.rounds import CommitResult
from psstore.errors import UsageError
from psstore.torch.gradients import Gradients
from psstore.torch.training import Overflow, Training
from psstore.torch.warnings import tell_of_refusal

Hypers = dict[int, dict[str, float]]
"""Hyper-parameters by the number of their group in the store, and by name."""


@dataclass
class CommittedRound:
    """A round that this worker has committed and whose values are not here yet."""

    commit: CommitResult
    hypers: Hypers
    max_norm: float | None
    loss_scale: float = 1.0
    """Factor by which this worker's gradients were larger than the real ones."""
    has_all_gradients: bool = False
    """Every parameter has a gradient on this worker."""
    norm: float | None = None
    """Norm of the reduced gradient; None if it is not to be clipped, or was not asked for."""

    @property
    def skipped(self) -> bool:
        return self.commit.skipped or (self.norm is not None and not math.isfinite(self.norm))

    @property
    def has_overflowed(self) -> bool:
        """Whether it is skipped for gradients that are not finite, and not as one of nothing."""
        return self.skipped and not self.commit.empty

    @property
    def changed_all(self) -> bool:
        """Whether the round has changed every parameter for certain, so that no version need be compared."""
        return self.has_all_gradients and not self.skipped and self.commit.counts


class GradientStep(ABC):
    """Pushes this round's gradients, commits, and applies what came of them.

    A step that fails can be taken again: what it had done stands.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._gradients = Gradients(training.store, overlap=training.overlap)
        training.tables.watch(overlap=training.overlap)
        self._committed: CommittedRound | None = None
        self._end_round: Callable[[], CommittedRound]
        """Commits the last round, again if that has failed."""

    @abstractmethod
    def _prepare(self) -> None:
        """Called before a round is committed."""

    @abstractmethod
    def _hypers(self) -> Hypers:
        """Hyper-parameters for the commit, as they are now."""

    @abstractmethod
    def _apply(self, committed: CommittedRound) -> None:
        """Makes the round's step in the parameters."""

    def retire(self) -> None:
        self._gradients.retire()
        self._training.tables.retire()

    @property
    def shares_next(self) -> bool:
        return True

    @property
    def combines_workers(self) -> bool:
        return self._training.store.consistency.combines_workers and not self._training.has_parts

    @property
    def has_clipped(self) -> bool:
        return self._committed is not None and self._committed.norm is not None

    def step(self, overflow: Overflow) -> bool:
        self._finish_sealed()
        committed = self._committed
        if committed is not None and committed.max_norm is not None:
            self._check_clipped(committed, overflow)
        elif committed is not None and not self._has_same_gradients():
            self._finish(committed)  # what a step has left behind that failed; these gradients are the next one's
            committed = None
        if committed is None:
            committed = self._commit(overflow)
        self._finish(committed)
        return not committed.has_overflowed

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        consistency = self._training.store.consistency
        if not consistency.lockstep:  # each commit is one worker's: what is reduced is its own gradient
            if self._training.tables.tables:
                raise UsageError(
                    f"clipping in mode {consistency.mode!r} is this worker's alone, and knows no rows of tables yet:"
                    " leave it out, or start the store with --mode sync"
                )
            return torch.nn.utils.clip_grad_norm_([one.parameter for one in self._training.trained], max_norm)
        if consistency.mode == "backup":
            raise UsageError(
                "clip_grad_norm_ needs the gradients of all workers, and in mode 'backup' a round does without the late"
                " ones: start the store with --mode sync"
            )
        self._finish_sealed()
        committed = self._committed
        if committed is not None and committed.norm is not None and committed.skipped:
            self._finish(committed)  # nothing was to be done, and the script has left its step() out
            committed = None
        if committed is not None and committed.norm is not None:
            raise UsageError(
                "clip_grad_norm_ was called twice without a step() between: call it once, right before step(), which"
                " may only be left out if the norm is not finite"
            )
        if committed is None or committed.max_norm is None:
            committed = self._commit(overflow, max_norm=max_norm)
        if committed.commit.late or committed.commit.empty:  # training was stopped, or of nothing: nothing is stepped
            committed.norm = 0.0
        else:
            committed.norm = math.inf if committed.commit.skipped else self._training.store.global_norm()
        first = self._training.trained[0].parameter
        return torch.tensor(committed.norm, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._gradients.no_sync(), self._training.tables.no_sync():
            yield

    def expect_loss_scale(self, loss_scale: float) -> None:
        self._gradients.expect_loss_scale(loss_scale)
        self._training.tables.expect_loss_scale(loss_scale)

    def residuals(self) -> Mapping[torch.Tensor, torch.Tensor]:
        return self._gradients.residuals()

    def set_residuals(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._gradients.set_residuals(residuals)

    # ---- how ----

    def _commit(self, overflow: Overflow, *, max_norm: float | None = None) -> CommittedRound:
        """Ends the round but for `_finish`. If it fails, the gradients stay as they are in the store."""
        training = self._training
        self._prepare()
        hypers = self._hypers()
        gradients, tables = self._gradients, training.tables
        if overflow.rewritten and tables.tables:
            raise UsageError(
                "unscale_ has divided the gradients of parameters, and those of tables are still multiplied by the loss"
                " scale: leave scaler.unscale_(optimizer) out, and clip by max_norm="
            )
        found = overflow.found or (overflow.loss_scale != 1.0 and not tables.are_finite)
        if found:
            present, rows = gradients.withhold(), []
            tables.withhold()
        else:
            present = gradients.complete(rewritten=overflow.rewritten, loss_scale=overflow.loss_scale)
            rows = tables.complete(loss_scale=overflow.loss_scale)
        present_here, has_all_gradients = [*present, *rows], len(present) == len(training.trained)

        def end_round() -> CommittedRound:
            commit = training.store.commit(
                {**hypers, **tables.hypers()},
                weight=training.weight,
                loss_scale=overflow.loss_scale,
                non_finite=found,
                present=present_here,
                average=training.average and not training.has_parts,  # of a part there is one gradient, an average
                max_norm=max_norm,
            )
            self._committed = CommittedRound(commit, hypers, max_norm, overflow.loss_scale, has_all_gradients)
            tell_of_refusal(commit)
            return self._committed

        self._end_round = end_round
        return end_round()

    def _finish_sealed(self) -> None:
        """Finishes a round whose commit has failed, and stands, if these gradients are the next one's."""
        if self._committed is None and self._training.store.is_sealed and not self._has_same_gradients():
            self._finish(self._end_round())

    def _has_same_gradients(self) -> bool:
        """Whether gradients are still those of the last round."""
        return self._gradients.unchanged() and self._training.tables.unchanged()

    def _finish(self, committed: CommittedRound) -> None:
        """Takes the values of a committed round, and forgets it."""
        self._training.tables.begin_prefetch()
        self._apply(committed)
        self._committed = None
        self._gradients.forget()
        self._training.tables.forget()

    def _check_clipped(self, committed: CommittedRound, overflow: Overflow) -> None:
        """Raises UsageError if anything was changed after clip_grad_norm_ had sent it."""
        if not self._has_same_gradients():
            raise UsageError(
                "gradients were changed after clip_grad_norm_, which had sent them: call it after the last backward and"
                " whatever else changes them, right before step(); of a closure's gradients within the closure"
            )
        if committed.hypers != self._hypers():
            raise UsageError(
                "hyper-parameters were changed between clip_grad_norm_ and step(), and had been sent: change them"
                " after step(), as schedulers do, or before clip_grad_norm_"
            )
        if overflow.loss_scale != committed.loss_scale:
            raise UsageError(
                "clip_grad_norm_ has clipped gradients that were still multiplied by the loss scale: call"
                " scaler.unscale_(optimizer) before it"
            )
