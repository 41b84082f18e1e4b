"""WorkerStep: every worker takes the step, of an optimizer that the store has no rule for. Gradients go to the store,
their reduction comes back, and the wrapped optimizer does the rest.

All workers hold the same weights and state because all begin with rank 0's weights, and take every step with the same
gradients. So none may miss a step: the store must be synchronous, and every worker there from the first step on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psstore.client.arrays import has_overlaps
from psstore.codec.compression import Compression
from psstore.errors import UsageError
from psstore.torch.gradient_step import CommittedRound, GradientStep, Hypers
from psstore.torch.optimizer_state import local_initial_state
from psstore.torch.param_groups import RULES, with_gradient_options
from psstore.torch.parameters import Trained, gradient_name
from psstore.torch.training import Training, create_tensors
from psstore.torch.warnings import quoted, warn


class WorkerStep(GradientStep):
    """Pushes this round's gradients, commits, pulls the reduced ones into .grad, and lets the wrapped optimizer
    step."""

    def __init__(self, training: Training) -> None:
        check_lockstep(training, f"{type(training.optimizer).__qualname__}, which the store has no rule for,")
        super().__init__(training)

    def tell_whose_state(self) -> None:
        """Warns rank 0, whose class may be a subclass of one that the store has a rule for, without its script's
        meaning it."""
        if self._training.is_first:
            kind = type(self._training.optimizer).__qualname__
            warn(
                f"the store has no rule for {kind}: it reduces the gradients, and every worker keeps all of the"
                " optimizer's state and takes the step itself, as under DDP. Rules are for"
                f" {', '.join(one.__name__ for one in RULES)}, and for no subclass of them. This is said once"
            )

    def add(self, trained: Sequence[Trained]) -> None:
        training = self._training
        chosen = [self._compression_of(one) for one in trained]
        groups = training.optimizer.param_groups
        gradients = [with_gradient_options(one.gradient_spec(), groups[one.group]) for one in trained]
        create_tensors(
            training,
            [*(one.spec("assign") for one in trained), *gradients],
            [*(one.parameter.detach() for one in trained), *(None for _ in trained)],
        )
        self._refuse_latecomer(trained)
        training.pull(trained)
        self._gradients.watch(
            {gradient_name(one.name): one.parameter for one in trained},
            codecs={
                gradient_name(one.name): compression.push for one, compression in zip(trained, chosen, strict=True)
            },
        )

    def publish(self) -> None:
        training = self._training
        if training.is_first:
            training.store.push_many([(one.name, one.parameter.detach()) for one in training.trained])
        training.store.barrier("published")
        training.pull(training.trained)

    def synchronize(self) -> None:
        """Does nothing: every worker takes the same steps."""

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        optimizer = self._training.optimizer
        return local_initial_state(optimizer) if whole else optimizer.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads into this worker's optimizer; every worker does so."""
        self._training.optimizer.load_state_dict(dict(state_dict))

    # ---- how ----

    def _prepare(self) -> None:
        """Does nothing: the store needs to know no more than the gradients."""

    def _hypers(self) -> Hypers:
        return {}

    def _apply(self, committed: CommittedRound) -> None:
        if committed.skipped:
            return
        trained = self._training.trained
        sent = self._gradients.unchanged()
        own = [one.parameter.grad for one in trained]
        for one, reduced in zip(trained, self._reduced(committed, own if sent else [None] * len(own)), strict=True):
            one.parameter.grad = reduced
        self._training.optimizer.step()
        if not sent:  # a round that a failed step has left behind: these gradients are the next one's
            for one, gradient in zip(trained, own, strict=True):
                one.parameter.grad = gradient

    def _reduced(self, committed: CommittedRound, memory: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The round's reduced gradients, in `memory` where they fit; None for a parameter for which no worker had
        one."""
        trained = self._training.trained
        targets = [
            given if given is not None and _is_writable(given) else torch.empty_like(one.parameter)
            for one, given in zip(trained, memory, strict=True)
        ]
        before = None if committed.changed_all else committed.commit.decision - 1
        return self._training.store.pull_many(
            [gradient_name(one.name) for one in trained], out=targets, if_newer_than=before
        )

    def _compression_of(self, one: Trained) -> Compression:
        """The parameter's compression. Raises UsageError for compressed pulls: a gradient comes back, not a value that
        deltas would add up to."""
        chosen = self._training.compression_of(one)
        if chosen.pull != "none":
            kind = type(self._training.optimizer).__qualname__
            raise UsageError(
                f"compression of pulls ({chosen.pull!r}) needs the store to take the step, and it has no rule for"
                f" {kind}: compress the pushes alone, with compression='push={chosen.push}'"
            )
        return chosen

    def _refuse_latecomer(self, trained: Sequence[Trained]) -> None:
        names = [gradient_name(one.name) for one in trained]
        reduced = self._training.store.pull_many(names, if_newer_than=0)
        before = [one.name for one, value in zip(trained, reduced, strict=True) if value is not None]
        if before:
            kind = type(self._training.optimizer).__qualname__
            raise UsageError(
                f"{quoted(before)} took steps before this worker came, and the state of {kind} is in the workers, which"
                " this one does not have: start all workers together on a new store, from a checkpoint if there is one,"
                " or on this one with exist='overwrite'"
            )


def _is_writable(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and not has_overlaps(gradient.shape, gradient.stride())


def check_lockstep(training: Training, what: str) -> None:
    """Raises UsageError for a store in which a round may do without a worker."""
    mode = training.store.consistency.mode
    if mode != "sync":
        raise UsageError(
            f"{what} needs a round to have all its workers, and this store's mode is {mode!r}: start it with --mode"
            " sync"
        )
