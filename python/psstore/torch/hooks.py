"""What stands around a training's steps: the interface of hooks, and those that `psstore.torch.session` has."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from psstore.checkpoint.hash_pool import room_for_thread
from psstore.checkpoint.interval import CheckpointInterval
from psstore.client.arguments import whole
from psstore.errors import AvailabilityError, BadArgument, PsstoreError, RolledBack, StorageError, StorageFailed

if TYPE_CHECKING:
    from psstore.torch.loop import Step, TrainingSession

_log = logging.getLogger("psstore.session")


class Hook:
    """Is told what a session does, on the worker that it was given to. What a hook raises ends the training."""

    def begin(self, session: TrainingSession) -> None:
        """Everything is as a checkpoint had it, if there was one; no step has been taken."""

    def before_step(self, session: TrainingSession, step: Step) -> None:
        """The loop's body is about to run."""

    def after_step(self, session: TrainingSession, step: Step) -> None:
        """The body is over. `step.values()` has what it has reported; `session.stop()` ends the training here, on all
        workers."""

    def rolled_back(self, session: TrainingSession) -> None:
        """The store went back to a checkpoint of an earlier version, `session.version` now, and everything is as that
        had it: the steps after it are taken again."""

    def finish(self, session: TrainingSession) -> None:
        """All workers that are there have come to the end, and none has left. Called once, but where the store goes
        back from here: then the steps after its checkpoint are taken again."""

    def end(self, session: TrainingSession) -> None:
        """There will be no other step. Called once, also if the loop's body raised; `session.is_clean` says."""


class LogHook(Hook):
    """Says on rank 0 where training is, how fast, and what the steps have reported."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said_at = 0.0
        self._said_version = 0

    def begin(self, session: TrainingSession) -> None:
        self._said_at, self._said_version = time.monotonic(), session.version

    rolled_back = begin

    def after_step(self, session: TrainingSession, step: Step) -> None:
        if session.is_first and time.monotonic() - self._said_at >= self._every_s:
            self._say(session, step)

    def _say(self, session: TrainingSession, step: Step) -> None:
        now, version = time.monotonic(), session.version
        rate = (version - self._said_version) / (now - self._said_at)
        values = "".join(f", {name} {value:.6g}" for name, value in step.values().items())
        _log.info("version %d%s, %.3g versions/s", version, values, rate)
        self._said_at, self._said_version = now, version


class SummaryHook(Hook):
    """Writes what rank 0's steps report, by version, for TensorBoard."""

    def __init__(self, folder: str, *, every: int = 1) -> None:
        """Raises ModuleNotFoundError if TensorBoard is not installed, BadArgument."""
        if whole("every", every) < 1:
            raise BadArgument(f"every is {every}; versions are written that it divides: expected 1 or more")
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = folder
        self._every = every
        self._writer: Any = None

    def begin(self, session: TrainingSession) -> None:
        if session.is_first:
            self._writer = self._make(self._folder, purge_step=session.version + 1)

    def after_step(self, session: TrainingSession, step: Step) -> None:
        if self._writer is not None and session.version % self._every == 0:
            for name, value in step.values().items():
                self._writer.add_scalar(name, value, session.version)

    def rolled_back(self, session: TrainingSession) -> None:
        """What was written of later versions is purged."""
        self.end(session)
        self.begin(session)

    def end(self, session: TrainingSession) -> None:
        if self._writer is not None:
            self._writer.close()


class NanHook(Hook):
    """Ends training on all workers when a step reports what is not finite."""

    def after_step(self, session: TrainingSession, step: Step) -> None:
        wrong = {name: value for name, value in step.values().items() if not math.isfinite(value)}
        if wrong:
            name, value = next(iter(wrong.items()))
            session.stop(f"{name} is {value} on rank {session.rank} at version {session.version}", at_once=True)


class CheckpointHook(Hook):
    """Has rank 0 lead the store's checkpoints, each on a thread while training goes on, and a last one at the end: a
    store that dies then goes back to the end, and not to before it, whoever has left already."""

    def __init__(self, interval: CheckpointInterval | None, url: str | None) -> None:
        """`interval`: None: the last one only, if the store was started to write checkpoints. `url`: where to; None:
        where the store writes its own."""
        self._interval = interval
        self._url = url
        self._version = 0
        """That the last one is of."""
        self._written_at = 0.0
        self._thread: threading.Thread | None = None
        self._error: PsstoreError | None = None

    def begin(self, session: TrainingSession) -> None:
        self._version, self._written_at = session.version, time.monotonic()

    def after_step(self, session: TrainingSession, step: Step) -> None:
        if self._thread is not None and not self._thread.is_alive():
            self._conclude()
        if session.is_first and self._thread is None and self._is_due(session):
            self._version, self._written_at = session.version, time.monotonic()
            self._thread = threading.Thread(target=self._write, args=(session, GATHER_S), name="psstore-checkpoint")
            try:
                with room_for_thread():
                    self._thread.start()
            except StorageFailed as error:
                self._error = error
                self._conclude()

    def rolled_back(self, session: TrainingSession) -> None:
        """One that was under way has failed."""
        if self._thread is not None:
            self._thread.join()
        self._error = self._thread = None
        self.begin(session)

    def finish(self, session: TrainingSession) -> None:
        if self._thread is not None:
            self._thread.join()
            self._conclude()
        # Not since this one began: its predecessor may have been killed at the end, before it had this written.
        if session.is_first and session.version > (session.store.restored or 0):
            self._write(session, 0.0)
            if self._interval is None and isinstance(self._error, BadArgument):
                self._error = None  # it was not
            self._conclude()

    def end(self, session: TrainingSession) -> None:
        if self._thread is not None:  # the end was not finished
            self._thread.join()

    def _is_due(self, session: TrainingSession) -> bool:
        if self._interval is None:
            return False
        seconds = time.monotonic() - self._written_at
        return self._interval.is_over(decisions=session.version - self._version, seconds=seconds)

    def _write(self, session: TrainingSession, gather_s: float) -> None:
        try:
            self._version = session.store.checkpoint(self._url, gather_s=gather_s, wait_s=WRITE_S)
        except PsstoreError as error:
            self._error = error

    def _conclude(self) -> None:
        """Storage may fail, and the store may have had to let go of the version: training goes on. What was asked for
        wrongly is raised, and that the store has gone back."""
        error, self._error, self._thread = self._error, None, None
        if isinstance(error, StorageError | AvailabilityError) and not isinstance(error, RolledBack):
            _log.warning("no checkpoint was written, and training goes on: %s", error.message)
        elif error is not None:
            raise error


GATHER_S = 300.0
"""How long workers may take to end their round and hand in."""

WRITE_S = 3600.0
"""How long a checkpoint may take."""
