"""What is trained: each step's data follow from its number and from who takes part, so that one that is taken again is
the same. Says each step of whoever is first, and at the end the hash of what was trained; keeps the ledger of what it
pushes. Where workers come and go, all but rank 0 leave now and then, and come back a little later; none by itself in
the second half of the training, so that all are there at its end."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import psstore
from psstore.client.store import Store
from psstore.errors import NotAWorker, RolledBack
from tests.chaos.absences import Absences
from tests.chaos.gates import Gates
from tests.chaos.notes import BEGINS, SENDS, STEPPED, Notes
from tests.chaos.plan import CHECKPOINT_EVERY

CONNECT_S = 60.0
"""For a store that starts, or is about to again."""

HANDS_IN_S = 0.4
"""Longer than it takes that a checkpoint is asked for which is due: workers hand in then, and not behind a gate."""

LEAVES_ONE_IN = 8
LONGEST_AWAY_S = 0.3

AWAIT_S = 1.0
"""How long whoever is first waits, before each step of the second half, for those who are away."""


class Work:
    """One worker's: what all loops do at each step."""

    def __init__(self, num_steps: int, pace_s: float, folder: Path) -> None:
        self.store = _connected()
        assert self.store.rank is not None, "a worker has one"
        self.rank, self.num_steps = self.store.rank, num_steps
        self.shape = (int(os.environ["WORLD_SIZE"]), num_steps)
        self.is_elastic = self.store.consistency.elastic
        self.notes = Notes(folder, self.rank)
        self._absences = Absences(folder)
        self._absences.over(self.rank)
        self._gates = Gates(folder)
        self._pace_s = pace_s
        self._stepped_at = time.monotonic()
        self.begins()
        self.store.create("writes", np.zeros(self.shape, "f4"), rule="add")

    def until_done(self, stay: Callable[[], bool]) -> None:
        """Has it train until a stay comes to the end, which is True then. False: it is to leave, and comes back for the
        next one, as it does where the others went on without it. A store that goes back has another one begin."""
        while True:
            try:
                if stay():
                    return
                self._go_away()
            except NotAWorker as error:
                if not self.is_elastic:
                    raise
                say(f"comes back: {error.message}")
                self._go_away()
            except RolledBack:
                go_on(self.store)
                self.begins()

    def begins(self) -> None:
        """It goes on from the version that the store is at."""
        self.notes.note(BEGINS, self.store.version)

    def own(self, step: int, value: float) -> npt.NDArray[np.float32]:
        """This worker's element of that step has the value; all others are 0."""
        found = np.zeros(self.shape, "f4")
        found[self.rank, step - 1] = value
        return found

    def write(self, step: int) -> None:
        """Raises RolledBack."""
        if self.is_elastic and step > self.num_steps // 2 and self.store.is_first:
            self._absences.await_none(AWAIT_S)
        self.notes.note(SENDS, step)
        self.store.push("writes", self.own(step, 1.0))

    def stepped(self, step: int, *, hands_in: bool = False) -> None:
        self.notes.note(STEPPED, step)
        if hands_in and step in (CHECKPOINT_EVERY, CHECKPOINT_EVERY + 1):
            time.sleep(HANDS_IN_S)
        if self.store.is_first:
            say(f"step {step}")
            self._gates.pass_by(step)
        time.sleep(max(0.0, self._stepped_at + self._pace_s - time.monotonic()))
        self._stepped_at = time.monotonic()

    def leaves_after(self, step: int) -> bool:
        may = self.is_elastic and self.rank != 0 and step <= self.num_steps // 2
        return may and random.Random(f"{self.rank} {step}").randrange(LEAVES_ONE_IN) == 0

    def _go_away(self) -> None:
        say("is away for a while")
        with self._absences.of(self.rank):
            self.store.close()
            time.sleep(random.uniform(0.0, LONGEST_AWAY_S))
            self.store = _connected()
        self.begins()

    def end(self, rounds: npt.NDArray[np.float32], trained: Iterable[npt.NDArray[np.float32]], **found: Any) -> None:
        """What the store has in the end, and what else the ledger looks at."""
        log = [msgspec.structs.asdict(one) for one in self.store.member_log]
        self.notes.end(rounds=rounds.tolist(), writes=self.store.pull("writes").tolist(), log=log, **found)
        say(said_of(self.store.version, trained))


def _connected() -> Store:
    return psstore.connect(num_workers=None, connect_timeout_s=CONNECT_S)


def go_on(store: Store) -> None:
    """Of a store that went back, as often as it does."""
    while True:
        try:
            store.reconnect()
            return
        except RolledBack:
            continue


def said_of(version: int, trained: Iterable[npt.NDArray[np.float32]]) -> str:
    """How a worker says what was trained."""
    return f"version {version} sha256 {hashlib.sha256(b''.join(one.tobytes() for one in trained)).hexdigest()}"


def say(line: str) -> None:
    """All of it in one write, where `print` makes two on a stream without a buffer: a log's line may come between."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(loop: str, num_steps: int, pace_s: float, folder: Path) -> None:
    work = Work(num_steps, pace_s, folder)
    try:
        if loop in ("none", "backward"):
            from tests.chaos import session_loop

            session_loop.train(work, overlap=loop)
        elif work.is_elastic:
            from tests.chaos import elastic_loop

            elastic_loop.train(work)
        else:
            from tests.chaos import plain_loop

            plain_loop.train(work, plain_loop.ELEMS if loop == "plain" else plain_loop.LARGE_ELEMS)
    finally:
        work.store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
