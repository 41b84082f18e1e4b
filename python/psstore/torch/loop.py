"""Training as a loop over steps, with everything that stands around it: going on from a checkpoint, checkpoints, an end
at one version on all workers, logging, summaries, and the duties that one worker has for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from psstore.checkpoint.handed import Handed
from psstore.checkpoint.interval import parse_interval
from psstore.client.arguments import number, version
from psstore.client.store import Store
from psstore.errors import BadArgument, DeadlineExceeded, OutOfMemory, PsstoreError, RolledBack, UsageError, WorkerLost
from psstore.protocol.stops import NEVER
from psstore.torch import sigterm, worker_state
from psstore.torch.hooks import WRITE_S, CheckpointHook, Hook, LogHook, NanHook, SummaryHook
from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.warnings import warn

END_S = 60.0
"""How long a worker waits at the end for the others to come to theirs."""

_log = logging.getLogger("psstore.session")


def session(
    optimizer: torch.optim.Optimizer,
    *,
    stop_at: int | None = None,
    state: Mapping[str, worker_state.Stateful] | None = None,
    checkpoint: str | None = None,
    checkpoint_to: str | None = None,
    hooks: Sequence[Hook] = (),
    log_every_s: float | None = 10.0,
    summaries: str | None = None,
    stop_on_nan: bool = True,
    drain: bool = True,
) -> TrainingSession:
    """A loop over training steps. Every worker runs one.

    >>> for step in psstore.torch.session(optimizer, stop_at=10_000, state={"scheduler": scheduler}, checkpoint="60s"):
    ...     optimizer.zero_grad()
    ...     loss = loss_of(model, batches[step.number])
    ...     loss.backward()
    ...     optimizer.step()
    ...     scheduler.step()
    ...     step.report(loss=loss)

    Where a framework owns the loop, what this one does is called: see `TrainingSession`, and `psstore.integrations`.

    It begins where the store is. If that began from a checkpoint, then so does what this rank had handed in: `state`,
    random states, the groups' hyper-parameters and `optimizer.checkpoint_state`, all as of that version. It ends on
    all workers at version `stop_at` exactly, or wherever a worker's loop ends by `break`, an error or `session.stop()`.
    Where the store goes back to a checkpoint under it (`psstore-server --restarts`), so does all of that, and the next
    turn's `step.number` is the version after; take data by it, or have `state` place what they are taken from.

    Args:
        optimizer: which takes one step in each turn of the loop; also as Accelerate has wrapped it.
        stop_at: the version to end at; steps that would go beyond don't count, in every mode.
        state: by name, what has `state_dict()` and `load_state_dict()` and is to be in checkpoints: schedulers,
            samplers, scalers, data loaders. The model and the optimizer's state in the store are there anyway.
        checkpoint: how often rank 0 has one written, '500' decisions or '60s', and one at the end. Leave it out where
            `psstore-server` or `psstore run` has its own --checkpoint, which asks this worker, too.
        checkpoint_to: where to (default: where the store was started to write).
        hooks: see `psstore.torch.Hook`.
        log_every_s: how often rank 0 logs where it is, on the logger 'psstore.session'; None: never.
        summaries: a folder for TensorBoard; rank 0 writes what steps report.
        stop_on_nan: end on all workers when a step reports what is not finite.
        drain: let SIGTERM end this worker's loop after the step that it is in, and the others go on without it, as
            where a machine is taken away; the program then comes to its own end. Only in the main thread, and where the
            program has no handler of its own.

    Raises BadArgument for what can't be handed in, ModuleNotFoundError for summaries without TensorBoard.
    """
    distributed = unwrapped(optimizer)
    if stop_at is not None:
        stop_at = version("stop_at", stop_at)
    if log_every_s is not None and number("log_every_s", log_every_s) < 0.0:
        raise BadArgument(f"log_every_s is {log_every_s}; expected seconds from 0 on, or None")
    if checkpoint_to is not None and checkpoint is None:
        raise BadArgument("checkpoint_to says where; checkpoint= has to say how often")
    parts = worker_state.checked_parts(state or {})
    if not isinstance(hooks, Sequence) or not all(isinstance(hook, Hook) for hook in hooks):
        raise BadArgument(f"hooks is {hooks!r}; expected a list of instances of psstore.torch.Hook")
    chosen: list[Hook] = list(hooks)
    if stop_on_nan:
        chosen.append(NanHook())
    if log_every_s is not None:
        chosen.append(LogHook(log_every_s))
    if summaries is not None:
        chosen.append(SummaryHook(summaries))
    interval = None if checkpoint is None else parse_interval("checkpoint", checkpoint)
    chosen.append(CheckpointHook(interval, checkpoint_to))
    return TrainingSession(distributed, stop_at=stop_at, parts=parts, hooks=chosen, drain=drain)


def unwrapped(optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
    """The one that talks to the store, out of what frameworks put around it. Raises UsageError if there is none."""
    inner: object = optimizer
    while not isinstance(inner, DistributedOptimizer):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise UsageError(f"a {type(optimizer).__qualname__} is no psstore.torch.DistributedOptimizer")
    return inner


class Step:
    """One turn of the loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The version that it brings about, if no other worker's step comes first: from 1 on."""
        self._reported: dict[str, Any] = {}

    def report(self, **values: torch.Tensor | float) -> None:
        """Numbers to log and summarise; a tensor of one element is read when somebody wants it."""
        self._reported.update(
            {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in values.items()}
        )

    def values(self) -> dict[str, float]:
        """What was reported, in order."""
        return {name: float(one) for name, one in self._reported.items()}


class TrainingSession:
    """See `session`. Iterated once; or driven from outside, by a framework that has a loop of its own:

    >>> chosen.begin()
    >>> try:
    ...     while not chosen.is_over:
    ...         step = chosen.before_step()
    ...         ...  # one step of the optimizer
    ...         chosen.after_step(step)
    ... finally:
    ...     chosen.end()
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        *,
        stop_at: int | None,
        parts: Mapping[str, worker_state.Stateful],
        hooks: Sequence[Hook],
        drain: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.store: Store = optimizer.store
        self.stop_at = stop_at
        self.began_at = 0
        """The version that it began at."""
        self.is_clean = False
        """Whether the loop came to its end: no `break`, no error."""
        self.why: str | None = None
        """What `stop` was told."""
        self._parts = parts
        self._hooks = hooks
        self._drains = drain
        self.is_drained = False
        """Whether this worker ends, or has ended, before the others."""
        self._has_begun = False
        self._ends_at: int | None = None
        """Where everybody's end is, once it is known that this worker has come to it."""
        self._asks_for_end = False
        """Whether `stop` was called: a store that goes back has forgotten it."""
        self._has_met = False
        """All workers are known to have come to the end, or not to come."""
        self._has_ended = False
        self._has_handed_in = False
        self._hands_residuals_in = True
        self._version_before = 0
        """What the step that is under way began with."""
        self._is_exact = True
        """Whether this worker has done nothing that its store's version has not: the last step counted."""

    @property
    def version(self) -> int:
        return self.store.version

    @property
    def rank(self) -> int | None:
        return self.store.rank

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0's duties: where workers come and go, the one of the lowest rank."""
        return self.store.is_first

    @property
    def is_over(self) -> bool:
        """Whether there is to be no other step."""
        return self.is_drained or self.store.stopped or (self.stop_at is not None and self.version >= self.stop_at)

    def stop(self, why: str | None = None, *, at_once: bool = False) -> None:
        """Ends training at the same version on all workers: where each round has all of them, after the step that they
        are in. `at_once`: before it; whoever has begun it can't take up exactly there from a checkpoint."""
        self.why = why
        if why is not None:
            _log.warning("training is stopped: %s", why)
        self._asks_for_end = True
        with suppress(RolledBack):  # the step finds it, too, and the store is told again
            self.store.stop(finish=not at_once)

    def drain(self, why: str) -> None:
        """Ends training on this worker alone, after the step that it is in: it leaves, and the others go on."""
        _log.warning("rank %s leaves after version %d: %s", self.rank, self.version, why)
        self.is_drained = True

    def __iter__(self) -> Iterator[Step]:
        with sigterm.handled(partial(self.drain, "it was sent SIGTERM")) if self._drains else nullcontext():
            yield from self._loop()

    def _loop(self) -> Iterator[Step]:
        self.optimizer.bears_rollbacks = True
        is_clean = False
        try:
            self.begin()
            while not is_clean:
                told = None
                try:
                    while not self.is_over:
                        step = self.before_step()
                        yield step
                        self.after_step(step)
                    self._meet()
                    is_clean = True
                except RolledBack as error:
                    told = _told(error)
                if told is not None:  # nothing is left of the error, whose traceback has the store's old client in it
                    self._take_up(told)
        finally:
            self.optimizer.bears_rollbacks = False
            self.end(is_clean=is_clean)

    # ---- what the loop is made of ----

    def found(self, name: str) -> Any:
        """What this rank's part of that name had handed in, where `begin` will put it back; None: nothing."""
        handed = self.store.handed_in()
        return worker_state.part(handed.state, name) if handed is not None and self._goes_on_from(handed) else None

    def warn_of_anew(self) -> None:
        """Says that the loop begins at its beginning, with weights that it has trained before: a checkpoint lacks the
        place of a worker that was killed before the store wrote its last one."""
        if self.version and not self.is_over:
            warn(
                f"the store is at version {self.version}, and has nothing that rank {self.rank} handed in as of it:"
                " training begins with its first epoch, at the store's weights. To go on where it was, restore a"
                " checkpoint that was written while the worker lived"
            )

    def begin(self) -> None:
        """Puts back what this rank had handed in. Raises UsageError for a session that has begun before; and RolledBack
        if the store was restored since the optimizer was made, but in a loop of its own."""
        if self._has_begun:
            raise UsageError("a session is one training, from its beginning to its end: make another one")
        told = None
        try:
            self._put_back()
            self._tell_end()
        except RolledBack as error:
            if not self.optimizer.bears_rollbacks:
                raise
            told = _told(error)
        if told is not None:
            self._go_on(told)
        self.began_at = self.version
        if self.optimizer.keeps_state_here:
            warn(
                "this worker keeps optimizer state, and the store's checkpoints don't have that: save"
                " optimizer.state_dict() of each worker to go on exactly"
            )
        for hook in self._hooks:
            hook.begin(self)
        self._has_begun = True

    def before_step(self) -> Step:
        """A step begins, one of the optimizer's. What a checkpoint waits for is handed in here, so that it has
        whatever came since the last step: evaluations, the epoch's end. The first one tells the store that this
        worker hands in."""
        if self.store.hand_in_wanted or not self._has_handed_in:
            self._hand_in()
        self._version_before = self.version
        step = Step(self._version_before + 1)
        for hook in self._hooks:
            hook.before_step(self, step)
        return step

    def after_step(self, step: Step) -> None:
        """The optimizer has taken its step, and whatever goes with it is done. Raises RolledBack if the store was
        restored meanwhile."""
        if self.optimizer.rolled_back is not None:
            raise self.optimizer.rolled_back
        for hook in self._hooks:
            hook.after_step(self, step)
        self._is_exact = self.version > self._version_before or self.store.consistency.mode != "sync"

    def end(self, *, is_clean: bool = True) -> None:
        """There will be no other step: where the loop of this worker ends, all workers' end. A last hand-in, so that a
        checkpoint of the end has it; a store that is gone is no news here. Does nothing the second time."""
        if self._has_ended or not self._has_begun:
            return
        self._has_ended = True
        self.is_clean = is_clean
        try:
            if self.is_drained:
                self.store.leave()
            elif not self._has_met and self.store.is_promised:  # the others wait for this step, and don't come
                _log.warning("rank %s ends in the middle of its step, which is torn for all workers", self.rank)
            elif not self._has_met:
                if not is_clean or not self.is_over:
                    self.store.stop()
                self._meet()
        except PsstoreError as error:
            _log.warning("the training's end was not told to the store: %s", error.message)
        for hook in self._hooks:
            hook.end(self)

    # ---- how ----

    def _goes_on_from(self, handed: Handed) -> bool:
        return handed.version == self.version or self.store.consistency.mode != "sync"

    def _put_back(self) -> None:
        """Makes this worker what it was at the store's version, or says that it is not."""
        handed = self.store.handed_in()
        if handed is not None and self._goes_on_from(handed):
            worker_state.put_back(handed.state, self.optimizer, self._parts)
            _log.info("rank %s goes on from version %d", self.rank, handed.version)
        elif handed is not None or self._has_handed_in:
            which = "not there" if handed is None else f"of version {handed.version}"
            become = "begin anew"
            if self._has_handed_in:
                become = "stay as they are now, ahead of the weights: steps are not taken again to the same bytes"
            warn(
                f"the store is at version {self.version}, and what rank {self.rank} has handed in is {which}: its"
                f" random states and schedulers {become}"
            )

    def _take_up(self, told: str) -> None:
        """The store was restored under it, and the steps since are taken again."""
        if self.store.stopped and self._ends_at is None and (self.stop_at is None or self.version < self.stop_at):
            self._ends_at = self.version
        self._go_on(told)
        self.began_at, self._is_exact, self._has_handed_in = self.version, True, False
        for hook in self._hooks:
            hook.rolled_back(self)

    def _go_on(self, told: str) -> None:
        """With the store as it was restored, however often it is, and as this worker was then."""
        self.optimizer.rolled_back = None
        while True:
            _log.warning("rank %s: %s", self.rank, told)
            try:
                self.store.reconnect()
                self.optimizer.reattach()
                self._put_back()
                self._tell_end()
                break
            except RolledBack as again:
                told = _told(again)

    def _tell_end(self) -> None:
        """To a store that does not know it yet, or has forgotten it."""
        if self.stop_at is not None:
            self.store.stop(self.stop_at)
        if self._ends_at is not None:
            self.store.stop(self._ends_at, everyone=True)
        elif self._asks_for_end:
            self.store.stop(finish=True)

    def _meet(self) -> None:
        """The end, on all workers."""
        if self.is_drained:
            return
        if self._is_exact:
            self._hand_in()
        try:
            self.store.barrier("psstore.torch.session", wait_s=END_S, once=True)
            for hook in self._hooks:
                hook.finish(self)
            self.store.barrier("psstore.torch.session finished", wait_s=WRITE_S, once=True)
            self.store.stop(NEVER)
        except (DeadlineExceeded, WorkerLost) as error:
            _log.warning("not every worker has come to its end: %s", error.message)
        self._has_met = True

    def _hand_in(self) -> None:
        state = worker_state.collect(self.optimizer, self._parts, residuals=self._hands_residuals_in)
        try:
            self.store.hand_in(state)
        except OutOfMemory as error:
            if not state["residuals"]:
                raise
            self._hands_residuals_in = False
            _log.warning("what this rank's codecs keep back will be in no checkpoint: %s", error.message)
            self._hand_in()
        self._has_handed_in = True


def _told(error: RolledBack) -> str:
    """What becomes of the training."""
    version, undone = error.details["version"], error.details["undone"]
    if undone:
        return f"the store went back to version {version}; {undone} steps are taken again"
    return f"the store goes on from version {version} in another life; the step under way is taken again"
