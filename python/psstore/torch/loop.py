"""Training as a loop over steps, with everything that stands around it: going on from a checkpoint, checkpoints, an end
at one version on all workers, logging, summaries, and the duties that one worker has for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from psstore.checkpoint.interval import parse_interval
from psstore.client.store import Store
from psstore.errors import BadArgument, DeadlineExceeded, PsstoreError, RolledBack, UsageError, WorkerLost
from psstore.torch import worker_state
from psstore.torch.hooks import CheckpointHook, Hook, LogHook, NanHook, SummaryHook
from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.warnings import warn

END_S = 60.0
"""How long a worker waits at the end for the others to come to theirs."""

NEVER = 1 << 62
"""A version that no store comes to."""

_log = logging.getLogger("psstore.session")


def session(
    optimizer: DistributedOptimizer,
    *,
    stop_at: int | None = None,
    state: Mapping[str, worker_state.Stateful] | None = None,
    checkpoint: str | None = None,
    checkpoint_to: str | None = None,
    hooks: Sequence[Hook] = (),
    log_every_s: float | None = 10.0,
    summaries: str | None = None,
    stop_on_nan: bool = True,
) -> TrainingSession:
    """A loop over training steps. Every worker runs one.

    >>> for step in psstore.torch.session(optimizer, stop_at=10_000, state={"scheduler": scheduler}, checkpoint="60s"):
    ...     optimizer.zero_grad()
    ...     loss = loss_of(model, batches[step.number])
    ...     loss.backward()
    ...     optimizer.step()
    ...     scheduler.step()
    ...     step.report(loss=loss)

    It begins where the store is. If that began from a checkpoint, then so does what this rank had handed in: `state`,
    random states, the groups' hyper-parameters and `optimizer.checkpoint_state`, all as of that version. It ends on
    all workers at version `stop_at` exactly, or wherever a worker's loop ends by `break`, an error or `session.stop()`.
    Where the store goes back to a checkpoint under it (`psstore-server --restarts`), so does all of that, and the next
    turn's `step.number` is the version after; take data by it, or have `state` place what they are taken from.

    Args:
        optimizer: which takes one step in each turn of the loop.
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

    Raises BadArgument for what can't be handed in, ModuleNotFoundError for summaries without TensorBoard.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        raise UsageError(f"a {type(optimizer).__qualname__} is no psstore.torch.DistributedOptimizer")
    if stop_at is not None and (not isinstance(stop_at, int) or stop_at < 0):
        raise BadArgument(f"stop_at is {stop_at!r}; expected a version, 0 or more")
    if checkpoint_to is not None and checkpoint is None:
        raise BadArgument("checkpoint_to says where; checkpoint= has to say how often")
    parts = dict(state or {})
    worker_state.check_parts(parts)
    chosen: list[Hook] = list(hooks)
    if stop_on_nan:
        chosen.append(NanHook())
    if log_every_s is not None:
        chosen.append(LogHook(log_every_s))
    if summaries is not None:
        chosen.append(SummaryHook(summaries))
    if checkpoint is not None:
        chosen.append(CheckpointHook(parse_interval("checkpoint", checkpoint), checkpoint_to))
    return TrainingSession(optimizer, stop_at=stop_at, parts=parts, hooks=chosen)


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
    """See `session`. Iterated once."""

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        *,
        stop_at: int | None,
        parts: Mapping[str, worker_state.Stateful],
        hooks: Sequence[Hook],
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
        self._has_begun = False
        self._is_exact = True
        """Whether this worker has done nothing that its store's version has not: the last step counted."""

    @property
    def version(self) -> int:
        return self.store.version

    @property
    def rank(self) -> int | None:
        return self.store.rank

    def stop(self, why: str | None = None, *, at_once: bool = False) -> None:
        """Ends training at the same version on all workers: where each round has all of them, after the step that they
        are in. `at_once`: before it; whoever has begun it can't take up exactly there from a checkpoint."""
        self.why = why
        if why is not None:
            _log.warning("training is stopped: %s", why)
        self.store.stop(finish=not at_once and self.store.consistency.lockstep)

    def __iter__(self) -> Iterator[Step]:
        self.begin()
        self.optimizer.bears_rollbacks = True
        try:
            while not self.is_clean:
                try:
                    while not self.is_over():
                        step = self.before_step()
                        yield step
                        self.after_step(step)
                    self._finish()
                except RolledBack as error:
                    self._take_up(error)
        finally:
            self.optimizer.bears_rollbacks = False
            self.end()

    # ---- a loop's parts, for whoever writes another one ----

    def begin(self) -> None:
        """Goes on from what this worker had handed in, if the store has that. Called once, before the first step."""
        if self._has_begun:
            raise UsageError("a session is one training, from its beginning to its end: make another one")
        self._has_begun = True
        if self.optimizer.keeps_state_here:
            warn(
                "this worker keeps optimizer state, or what codecs kept back of gradients, and the store's checkpoints"
                " don't have that: save optimizer.state_dict() of each worker to go on exactly"
            )
        self._put_back()
        for hook in self._hooks:
            hook.begin(self)

    def is_over(self) -> bool:
        """Whether there is no other step: `stop_at` has come, or training was stopped, by any worker."""
        return self.store.stopped or (self.stop_at is not None and self.version >= self.stop_at)

    def before_step(self) -> Step:
        """The next step, which is about to be taken."""
        step = Step(self.version + 1)
        for hook in self._hooks:
            hook.before_step(self, step)
        return step

    def after_step(self, step: Step) -> None:
        """The optimizer has taken it. Raises RolledBack if the store was restored meanwhile."""
        if self.optimizer.rolled_back is not None:
            raise self.optimizer.rolled_back
        for hook in self._hooks:
            hook.after_step(self, step)
        self._is_exact = self.version >= step.number or self.store.consistency.mode != "sync"
        if self.store.hand_in_wanted:
            self._hand_in()

    def end(self, *, is_clean: bool = False) -> None:
        """Ends training on all workers. `is_clean`: `is_over` said that it has ended; not needed after a loop over the
        session, which knows."""
        try:
            if is_clean:
                self._finish()
            elif not self.is_clean:
                self.store.stop()
                self._finish()
                self.is_clean = False
        except PsstoreError as error:  # a store that is gone is no news here
            _log.warning("the training's end was not told to the store: %s", error.message)
        for hook in self._hooks:
            hook.end(self)

    # ---- how ----

    def _put_back(self) -> None:
        """Also tells the store that this worker hands in."""
        handed = self.store.handed_in()
        self.began_at = self.version
        if handed is not None and (handed.version == self.version or self.store.consistency.mode != "sync"):
            worker_state.put_back(handed.state, self.optimizer, self._parts)
            _log.info("rank %s goes on from version %d", self.rank, handed.version)
        elif handed is not None:
            warn(
                f"the store is at version {self.version}, and what rank {self.rank} has handed in is of version"
                f" {handed.version}: its random states and schedulers begin anew"
            )
        self._is_exact = True
        self._hand_in()
        if self.stop_at is not None:
            self.store.stop(self.stop_at)

    def _take_up(self, error: RolledBack) -> None:
        """Goes on with the store as it was restored, and as this worker was then."""
        while True:
            undone, version = error.details["undone"], error.details["version"]
            _log.warning(
                "rank %s: the store went back to version %d; %d steps are taken again", self.rank, version, undone
            )
            try:
                self.store.reconnect()
                self.optimizer.reattach()
                self._put_back()
                break
            except RolledBack as again:
                error = again
        for hook in self._hooks:
            hook.rolled_back(self)

    def _hand_in(self) -> None:
        self.store.hand_in(worker_state.collect(self.optimizer, self._parts))

    def _finish(self) -> None:
        """A last hand-in, so that a checkpoint of the end has it, and a meeting of all workers."""
        if self._is_exact:
            self._hand_in()
        try:
            self.store.barrier("psstore.torch.session", wait_s=END_S)
            self.store.stop(NEVER)
        except (DeadlineExceeded, WorkerLost) as error:
            _log.warning("not every worker has come to its end: %s", error.message)
        self.is_clean = True
