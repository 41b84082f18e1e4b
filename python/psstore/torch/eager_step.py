"""EagerStep, for overlap='eager': the commit goes first, so that new parameters travel back while backward still runs.

The first gradient of a backward pass commits the round, with the promise of a gradient for every parameter. Each slice
of the store then takes its step when its last contribution arrives, and the pull of what was pushed together is waiting
there already: values come back in the order in which gradients went, and a link is used both ways at once. They end in
memory of their own, which `step()` copies: backward still needs the parameters as they were.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from psstore.client.device.arrays import OnDevice
from psstore.client.rounds import CommitResult
from psstore.client.store import Store
from psstore.errors import PsstoreError, UsageError
from psstore.torch.gradient_step import CommittedRound, Hypers
from psstore.torch.gradients import Gradients
from psstore.torch.parameters import Trained, by_ddp
from psstore.torch.store_step import StoreStep
from psstore.torch.training import Overflow, Training
from psstore.torch.warnings import quoted, warn

T = TypeVar("T")


class RepeatableCall(Generic[T]):
    """A call to the store that was started, and is made again if its result is asked for after it has failed."""

    def __init__(self, start: Callable[[], Future[T]]) -> None:
        self._start = start
        self.future = start()

    def result(self) -> T:
        if self.future.done() and (self.future.cancelled() or self.future.exception() is not None):
            self.future = self._start()
        return self.future.result()


@dataclass
class EarlyRound:
    """A round that was committed before its gradients were there."""

    hypers: Hypers
    commit: RepeatableCall[CommitResult]
    awaited: deque[tuple[Sequence[str], int | None]] = field(default_factory=deque)
    """Names that are to be pulled together once the decision is known; and the decision that their values here include,
    if the round may leave them as they are."""
    pulls: list[tuple[Sequence[str], Future[RepeatableCall[list[Any]]]]] = field(default_factory=list)
    """Pulls that were started, or are being started, with their names."""
    finish: RepeatableCall[None] | None = None

    @property
    def is_decided(self) -> bool:
        commit = self.commit.future
        return commit.done() and not commit.cancelled() and commit.exception() is None


class EagerStep(StoreStep):
    """Commits at the first gradient, pushes each, and pulls what becomes of it, all while backward runs."""

    def __init__(self, training: Training) -> None:
        if training.store.consistency.mode != "sync":
            raise UsageError(
                f"overlap='eager' needs every worker in every round, and the store is in mode"
                f" {training.store.consistency.mode!r}: start it with --mode sync, or leave overlap= out"
            )
        super().__init__(training)
        self._gradients = self._promised = PromisedGradients(
            training.store, begin=self._begin, pushed=self._pull_when_decided
        )
        self._early: EarlyRound | None = None
        self._new_values: dict[str, torch.Tensor] = {}
        """Memory for the parameters' new values, by name."""
        self._lock = threading.Lock()
        """Guards what rounds await. Not held in calls to the store, whose own thread takes it in the midst of one."""

    def add(self, trained: Sequence[Trained]) -> None:
        super().add(trained)
        for one in trained:
            parameter = one.parameter
            self._new_values[one.name] = torch.empty(
                parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=parameter.is_cuda
            )

    def clip(self, max_norm: float, overflow: Overflow) -> torch.Tensor:
        raise UsageError(
            "overlap='eager' commits a round before its gradients are there, and so can't clip their norm: leave"
            " overlap= out"
        )

    def publish(self) -> None:
        self._refuse_between("publish()")
        super().publish()

    def state(self, *, whole: bool = False) -> Mapping[torch.Tensor, dict[str, Any]]:
        self._refuse_between("state_dict()")
        return super().state(whole=whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._refuse_between("load_state_dict()")
        super().load_state_dict(state_dict)

    # ---- how ----

    def _refuse_between(self, what: str) -> None:
        if self._early is not None:
            raise UsageError(
                f"{what} between backward and step() can't be with overlap='eager', where the round is under way then:"
                " call it after step()"
            )

    def _begin(self) -> EarlyRound:
        """Commits a round; called by the first hook of a backward pass, or by step() without one."""
        training = self._training
        if training.is_first:
            self._prepare()  # the others' weights, if edited, give way in step(): backward needs them until then
        hypers = self._hypers()
        promised = [
            one.name
            for one in training.trained
            if one.parameter.requires_grad or one.parameter.grad is not None  # frozen since: torch steps what has one
        ]
        self._promised.promise(promised)
        commit = RepeatableCall(
            lambda: training.store.start_commit(
                hypers, weight=training.weight, present=promised, early=True, average=training.average
            )
        )
        self._early = EarlyRound(hypers, commit)
        commit.future.add_done_callback(self._on_decided)
        return self._early

    def _pull_when_decided(self, names: Sequence[str], newer_than: int | None = None) -> None:
        """Pulls these parameters as soon as the round's decision is known."""
        assert self._early is not None, "a round has begun in which they were pushed"
        self._early.awaited.append((names, newer_than))
        self._start_pulls()

    def _on_decided(self, commit: Future[CommitResult]) -> None:
        """Called on the store's thread."""
        with suppress(PsstoreError):
            self._start_pulls()

    def _start_pulls(self) -> None:
        early, store = self._early, self._training.store
        while early is not None and early.is_decided:
            with self._lock:
                if not early.awaited:
                    return
                names, newer_than = early.awaited.popleft()
                started = Future[RepeatableCall[list[Any]]]()
                early.pulls.append((names, started))
            memory = [self._new_values[name] for name in names]
            codec = self._codecs or None
            pull = partial(store.start_pull_many, names, out=memory, if_newer_than=newer_than, codec=codec)
            try:
                started.set_result(RepeatableCall(pull))
            except BaseException as error:
                early.pulls.remove((names, started))
                started.set_exception(error)
                raise

    def _commit(self, overflow: Overflow, *, max_norm: float | None = None) -> CommittedRound:
        if overflow != Overflow():
            raise UsageError(
                "overlap='eager' commits a round before its gradients are there, and so can't work with a GradScaler:"
                " leave overlap= out"
            )
        early = self._early or self._begin()
        now = self._hypers()  # and of a group that has come since
        if any(now[group] != hyper for group, hyper in early.hypers.items()):
            raise UsageError(
                "hyper-parameters were changed between backward and step(), and overlap='eager' has sent them: change"
                " them after step(), as schedulers do"
            )
        self._gradients.complete()
        self._committed = CommittedRound(early.commit.result(), early.hypers, None)
        return self._committed

    def _apply(self, committed: CommittedRound) -> None:
        training, early = self._training, self._early
        assert early is not None, "a round that was committed early has ended"
        if not training.is_first:
            self._prepare()
        awaited = {name for names, _ in early.pulls for name in names}
        if rest := [one.name for one in training.trained if one.name not in awaited]:
            self._pull_when_decided(rest, newer_than=self._decision)
        if not committed.commit.late:
            early.finish = early.finish or RepeatableCall(training.store.start_finish)
        came = {
            name
            for names, pull in early.pulls
            for name, value in zip(names, pull.result().result(), strict=True)
            if value is not None
        }
        if early.finish is not None:
            early.finish.result()
        for one in training.trained:
            if one.name in came:
                one.parameter.detach().copy_(self._new_values[one.name], non_blocking=True)
        self._external.remember(training.trained)
        self._decision = committed.commit.decision
        self._early = None


class PromisedGradients(Gradients):
    """Gradients whose sending was promised by an early commit: each is sent once, and zeros for one that is missing."""

    def __init__(self, store: Store, *, begin: Callable[[], object], pushed: Callable[[Sequence[str]], object]) -> None:
        """`begin` makes the promise, and is called before the first gradient of a round is sent. `pushed` is called
        with the names of gradients that are sent together."""
        super().__init__(store, overlap="backward")
        self._begin = begin
        self._pushed = pushed
        self._promises: Sequence[str] = ()
        """Names that were promised, from `promise` to `forget`."""
        self._closed = False
        """Hooks do nothing before the next round: this one is being completed, or could not begin."""
        self._twice: set[str] = set()
        """Names of gradients that a later backward pass has changed after they were taken."""
        self._zeros: dict[str, torch.Tensor] = {}
        self._has_warned = False

    def promise(self, names: Sequence[str]) -> None:
        self._promises = names

    def complete(self, *, rewritten: bool = False, loss_scale: float = 1.0) -> list[str]:
        """Raises UsageError for gradients that are not as they were sent; the round can't be completed any more."""
        self._closed = True
        if self._twice:
            self._on_changed([], sorted(self._twice))
        return super().complete(loss_scale=loss_scale)

    def forget(self) -> None:
        super().forget()
        self._promises, self._closed = (), False
        self._zeros.clear()

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._no_sync_depth or self._closed:
            return
        with self._lock:
            if not self._promises:
                try:
                    self._begin()
                except PsstoreError:  # step() tries again, and raises it
                    self._closed = True
                    return
            if name in self._arrived:
                self._twice.add(name)
        super()._on_gradient(name, parameter)

    def _present(self) -> dict[str, torch.Tensor]:
        present = super()._present()
        missing = [name for name in self._promises if name not in present]
        if missing:
            self._warn_missing(missing)
        for name in missing:
            present[name] = self._zeros.setdefault(name, torch.zeros_like(self._parameters[name]))
        return {name: present[name] for name in self._promises}

    def _send_rest(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self._send(gradients)  # new values are pulled beside it

    def _send(self, gradients: Mapping[str, torch.Tensor], on_device: Mapping[str, OnDevice] | None = None) -> None:
        super()._send(gradients, on_device)
        if gradients:
            self._pushed(list(gradients))

    def _warn_missing(self, names: list[str]) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"no gradient for {quoted(names)}: zeros are sent, since overlap='eager' has promised one, and the"
                " optimizer's momentum and weight decay go on. Freeze what is not used, or leave overlap= out. This is"
                " said once"
            )

    def _on_changed(self, edited: list[str], accumulated: list[str]) -> None:
        names = [*edited, *accumulated]
        raise UsageError(
            f"overlap='eager' has sent the gradient of {quoted(names)} already, and it was changed since, by another"
            f" backward pass or by hand; this round can't be completed.{by_ddp(names)} Put no_sync() around all"
            " backward passes of a step but the last, change no gradient, or leave overlap= out"
        )
