"""What is trained: each step's data follow from its number and the rank, so that a step that is taken again is the
same. Says each step of rank 0, and at the end the hash of what was trained; keeps the ledger of what it pushes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import psstore
from psstore.client.store import Store
from tests.chaos.absences import Absences
from tests.chaos.gates import Gates
from tests.chaos.ledger import SENDS, STEPPED, Notes
from tests.chaos.plan import CHECKPOINT_EVERY

CONNECT_S = 60.0
"""For a store that starts, or is about to again."""

HANDS_IN_S = 0.4
"""Longer than it takes that a checkpoint is asked for which is due: workers hand in then, and not behind a gate."""


class Work:
    """One worker's: what all loops do at each step."""

    def __init__(self, store: Store, num_steps: int, pace_s: float, folder: Path) -> None:
        assert store.rank is not None, "a worker has one"
        self.store, self.rank, self.num_steps = store, store.rank, num_steps
        self.shape = (int(os.environ["WORLD_SIZE"]), num_steps)
        self.absences = Absences(folder)
        self.absences.over(self.rank)
        self._notes = Notes(folder, self.rank)
        self._gates = Gates(folder)
        self._pace_s = pace_s
        self._stepped_at = time.monotonic()
        store.create("writes", np.zeros(self.shape, "f4"), rule="add")

    def own(self, step: int, value: float) -> npt.NDArray[np.float32]:
        """This worker's element of that step has the value; all others are 0."""
        found = np.zeros(self.shape, "f4")
        found[self.rank, step - 1] = value
        return found

    def write(self, step: int) -> None:
        """Raises RolledBack."""
        self._notes.note(SENDS, step)
        self.store.push("writes", self.own(step, 1.0))

    def stepped(self, step: int, *, hands_in: bool = False) -> None:
        self._notes.note(STEPPED, step)
        if hands_in and step in (CHECKPOINT_EVERY, CHECKPOINT_EVERY + 1):
            time.sleep(HANDS_IN_S)
        if self.rank == 0:
            say(f"step {step}")
            self._gates.pass_by(step)
        time.sleep(max(0.0, self._stepped_at + self._pace_s - time.monotonic()))
        self._stepped_at = time.monotonic()

    def end(
        self,
        rounds: npt.NDArray[np.float32],
        trained: Iterable[npt.NDArray[np.float32]],
        *,
        took: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """What the store has in the end. `took`: the ranks that took part in each step; None: all."""
        self._notes.end(rounds.tolist(), self.store.pull("writes").tolist(), took)
        digest = hashlib.sha256(b"".join(one.tobytes() for one in [*([rounds] if took is None else []), *trained]))
        say(f"version {self.store.version} sha256 {digest.hexdigest()}")


def say(line: str) -> None:
    """All of it in one write, where `print` makes two on a stream without a buffer: a log's line may come between."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(loop: str, num_steps: int, pace_s: float, folder: Path) -> None:
    work = Work(psstore.connect(num_workers=None, connect_timeout_s=CONNECT_S), num_steps, pace_s, folder)
    try:
        if loop == "elastic":
            from tests.chaos import elastic_loop

            elastic_loop.train(work)
        elif loop in ("plain", "shared", "sent"):
            from tests.chaos import plain_loop

            plain_loop.train(work, plain_loop.ELEMS if loop == "plain" else plain_loop.LARGE_ELEMS)
        else:
            from tests.chaos import session_loop

            session_loop.train(work, overlap=loop)
    finally:
        work.store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
