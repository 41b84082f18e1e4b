"""Has a store's checkpoints written: `python -m psstore.launch.checkpointing`, started by the supervisor.

A process of its own, and a client like others: what storage does to it nobody who trains will notice. stdin brings
what to do, and a line that asks for the last checkpoint.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from psstore.client.arguments import Options
from psstore.client.connect import open_store
from psstore.client.store import Store
from psstore.errors import DeadlineExceeded, PsstoreError
from psstore.exit_codes import EXIT_FAILED
from psstore.launch.supervised import take_duty
from psstore.server import logs
from psstore.server.processes import LAST_CHECKPOINT, CheckpointDuty

LOOK_S = 0.2
"""How often it is looked whether the next one is due, once it may be."""

RETRY_S = 10.0
"""After one that could not be written."""

WRITE_S = 3600.0
"""How long one may take."""

_log = logging.getLogger("psstore.checkpoints")


def main() -> None:
    """Ends when it is asked to, after a last checkpoint if anything was decided since the one before."""
    is_over = threading.Event()
    duty = take_duty(CheckpointDuty, last_word=LAST_CHECKPOINT, on_last_word=is_over.set)
    logs.configure(who="checkpoints", level=duty.log_level, form=duty.log_format)
    store = connected(duty, is_over)
    if store is None:
        sys.exit(EXIT_FAILED)
    with store:
        is_written = Schedule(store, duty, is_over).run()
    sys.exit(0 if is_written else EXIT_FAILED)


def connected(duty: CheckpointDuty, is_over: threading.Event) -> Store | None:
    """Tries as long as the supervisor lives, and once more when it has asked for the end. None: it can't be."""
    while True:
        is_last = is_over.is_set()
        try:
            return open_store(duty.url, Options(role="client", credentials=duty.credentials, wait_s=WRITE_S))
        except PsstoreError as error:
            _log.error("no checkpoints are written: %s", error.message)
        if is_last:
            return None
        is_over.wait(RETRY_S)


class Schedule:
    """When the next checkpoint is due."""

    def __init__(self, store: Store, duty: CheckpointDuty, is_over: threading.Event) -> None:
        self._store = store
        self._duty = duty
        self._is_over = is_over
        self._version = duty.began_at
        """Version of the last checkpoint; at first the one that the store began with."""
        self._written_at = time.monotonic()

    def run(self) -> bool:
        """Until it is over. False: the last one is not written, and should be."""
        not_before = 0.0
        while not self._is_over.wait(self._look_in_s()):
            if time.monotonic() >= not_before and self._is_due() and not self._write():
                not_before = time.monotonic() + RETRY_S
        return self._write_last()

    def _look_in_s(self) -> float:
        """Before that none is due, whatever is decided."""
        seconds = self._duty.interval.seconds
        return LOOK_S if seconds is None else max(LOOK_S, self._written_at + seconds - time.monotonic())

    def _num_new(self) -> int:
        """Decisions since the last checkpoint. Raises PsstoreError."""
        return int(self._store.stats()[0]["version"]) - self._version

    def _has_one(self) -> bool:
        """Whether there is a checkpoint to go on from, whoever had it written."""
        try:
            return self._duty.began_at > 0 or int(self._store.stats()[0]["checkpoint"]) > 0
        except PsstoreError:
            return False

    def _is_due(self) -> bool:
        seconds = time.monotonic() - self._written_at
        try:
            return self._duty.interval.is_over(decisions=self._num_new(), seconds=seconds)
        except PsstoreError as error:
            _log.debug("the store was not asked whether a checkpoint is due: %s", error.message)
            return False

    def _write(self) -> bool:
        """False: it is not written; training goes on."""
        try:
            self._version = self._checkpoint()
        except PsstoreError as error:
            _log.warning("no checkpoint was written to %s: %s", self._duty.place, error.message)
            return False
        self._written_at = time.monotonic()
        return True

    def _checkpoint(self) -> int:
        """The version of the next one. It is one that all workers can go on from, or else, unless there is such a one
        already and a worker is lost, one of the weights. Raises PsstoreError."""
        has_one = self._has_one()
        try:
            return self._store.checkpoint(whole=has_one)
        except DeadlineExceeded:
            if not has_one or self._store.stats()[0]["ranks_lost"]:
                raise
        return self._store.checkpoint()  # they are slow, and may be so the next time

    def _write_last(self) -> bool:
        """False: it is not written, and should be."""
        has_one = self._has_one()
        try:
            if self._num_new():
                self._store.checkpoint(whole=has_one)
        except PsstoreError as error:
            _log.warning("no last checkpoint was written to %s: %s", self._duty.place, error.message)
            # Workers that died are where they handed in last: a checkpoint of then is worth more than one of now.
            return has_one and isinstance(error, DeadlineExceeded)
        return True


if __name__ == "__main__":
    main()
