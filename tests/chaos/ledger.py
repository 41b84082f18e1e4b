"""Who pushed what when, in integers: what each worker notes before and after everything it does, and what the store has
of it in the end.

    rounds  (workers, steps): each worker's gradient adds one to its own element of that step
    writes  (workers, steps): so does a plain write, which counts on arrival

A step that is taken again, by another life of the worker or by a store that went back, is in `rounds` once all the
same. In `writes` it may be more than once, but not more often than it was sent, and once at least: it was acknowledged.
Where workers come and go, all of this is of the steps that a worker took part in, by the store's log of members; others
are not in `rounds`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SENDS, STEPPED = "sends", "stepped"


class Notes:
    """One worker's: a line at a time is with the kernel before the next thing happens, whoever is killed then."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, step: int) -> None:
        os.write(self._file, f"{what} {step} {time.monotonic():.6f}\n".encode())

    def end(
        self, rounds: list[list[float]], writes: list[list[float]], took: Sequence[Sequence[int]] | None = None
    ) -> None:
        """What this worker reads in the store when all steps are taken. `took`: the ranks that took part in each; None:
        all."""
        (self._folder / f"end-{self._rank}").write_text(json.dumps([rounds, writes, took]))


@dataclass(frozen=True)
class Account:
    """What the notes and the ends say together."""

    lost: list[str]
    doubled: list[str]
    waits: list[float]
    """Seconds from each step to the worker's next, in whichever of its lives."""


def account(folder: Path, num_workers: int, num_steps: int) -> Account:
    """Of the notes and ends in that folder."""
    lost, doubled, waits = [], [], []
    sent: Counter[tuple[int, int]] = Counter()
    for rank in range(num_workers):
        times = []
        for what, step, at in _notes(folder / f"notes-{rank}"):
            if what == SENDS:
                sent[rank, step] += 1
            else:
                times.append(at)
        waits += [later - earlier for earlier, later in itertools.pairwise(times)]
    for reader in range(num_workers):
        end = folder / f"end-{reader}"
        if not end.exists():
            lost.append(f"rank {reader} has read nothing at the end")
            continue
        rounds, writes, took = json.loads(end.read_text())
        for rank, step in itertools.product(range(num_workers), range(1, num_steps + 1)):
            fewest = int(took is None or rank in took[step - 1])
            of_round, of_write = (rounds[rank][step - 1], fewest), (writes[rank][step - 1], sent[rank, step])
            for name, (found, most) in (("rounds", of_round), ("writes", of_write)):
                told = f"rank {rank}'s step {step}, as rank {reader} reads it: {found} in {name}, sent {most} times"
                if found < fewest:
                    lost.append(told)
                elif found > most or found != int(found):
                    doubled.append(told)
    return Account(lost, doubled, waits)


def _notes(path: Path) -> Iterator[tuple[str, int, float]]:
    for line in path.read_text().splitlines() if path.exists() else []:
        what, step, at = line.split()
        yield what, int(step), float(at)
