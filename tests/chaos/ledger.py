"""Who pushed what when, in integers: what each worker has noted, and what the store has of it in the end.

    rounds  (workers, steps): each worker's gradient adds one to its own element of that step
    writes  (workers, steps): so does a plain write, which counts on arrival
    used    steps: of a session, the samples that each step was made of

A step that is taken again, by another life of the worker or by a store that went back, is in `rounds` once all the
same. In `writes` it may be more than once, but not more often than it was sent, and once at least: it was acknowledged.
Where workers come and go, all of this is of the steps that a worker took part in, by the store's log of members; others
are not in `rounds`. A step that a worker was told of has it, unless the store went back behind it. Each epoch has each
sample once. What a session has handed in is there as long as the store lives, and in the checkpoint that has asked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psstore.wire.messages import Members, members_after
from tests.chaos.notes import BEGINS, FOUND, HANDED, NOTHING, SENDS, STEPPED, Note, end_of, notes_of


@dataclass
class Account:
    """What the notes and the ends say together."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds from each step to the worker's next, in whichever of its lives."""
    log: list[Members] = field(default_factory=list)
    """Of members, as the store has it in the end."""


def account(folder: Path, num_workers: int, num_steps: int, num_samples: int = 0) -> Account:
    """Of the notes and ends in that folder. `num_samples`: in an epoch of a session."""
    found = Account()
    notes = [notes_of(folder, rank) for rank in range(num_workers)]
    begins = [one for ones in notes for one in ones if one.what == BEGINS]
    for rank, ones in enumerate(notes):
        times = [one.at for one in ones if one.what == STEPPED]
        found.waits += [later - earlier for earlier, later in itertools.pairwise(times)]
        found.lost += _lost_hand_ins(rank, ones, begins)
    ends = {rank: end_of(folder, rank) for rank in range(num_workers)}
    found.lost += [f"rank {rank} has read nothing at the end" for rank, end in ends.items() if end is None]
    read = {rank: end for rank, end in ends.items() if end is not None}
    for reader, end in read.items():
        log = [Members(**one) for one in end["log"]]
        if found.log and log != found.log:
            found.lost.append(f"rank {reader} reads another log of members: {log}, not {found.log}")
        found.log = log
        took = who_took_part(log, num_workers, num_steps)
        _count(found, reader, end, notes, took)
        found.lost += _lost_steps(notes, begins, took)
        if num_samples:
            found.doubled += _repeated(end["used"], num_samples)
    return found


def who_took_part(log: Sequence[Members], num_workers: int, num_steps: int) -> list[list[int]]:
    """The ranks in each step. `log`: empty where their number is fixed."""
    took = []
    for step in range(1, num_steps + 1):
        absent = {rank for one in log if one.version == step for rank in one.absent}
        there = set(members_after((), (one for one in log if one.version < step)))
        took.append(sorted(there - absent) if log else list(range(num_workers)))
    return took


def _count(
    found: Account, reader: int, end: Any, notes: Sequence[Sequence[Note]], took: Sequence[Sequence[int]]
) -> None:
    """Each worker's each step, as one of them reads it in the store."""
    sent = Counter((rank, one.number) for rank, ones in enumerate(notes) for one in ones if one.what == SENDS)
    for rank, step in itertools.product(range(len(notes)), range(1, len(took) + 1)):
        fewest = int(rank in took[step - 1])
        for name, most in (("rounds", fewest), ("writes", sent[rank, step])):
            number = end[name][rank][step - 1]
            told = f"rank {rank}'s step {step}, as rank {reader} reads it: {number} in {name}, sent {most} times"
            if number < fewest:
                found.lost.append(told)
            elif number > most or number != int(number):
                found.doubled.append(told)


def _lost_steps(
    notes: Sequence[Sequence[Note]], begins: Sequence[Note], took: Sequence[Sequence[int]]
) -> Iterable[str]:
    """Steps that a worker has taken, and is not in."""
    for rank, ones in enumerate(notes):
        for one in ones:
            is_in = one.what != STEPPED or rank in took[one.number - 1]
            if not is_in and not _is_undone(one, begins):
                yield f"rank {rank} has taken step {one.number}, which the log of members has without it"


def _is_undone(note: Note, begins: Iterable[Note], until: float = math.inf) -> bool:
    """Whether somebody has gone on from behind its version since then."""
    return any(one.number < note.number and note.at < one.at < until for one in begins)


def _lost_hand_ins(rank: int, notes: Sequence[Note], begins: Sequence[Note]) -> Iterable[str]:
    """What was acknowledged, and not found later by the same rank."""
    last: dict[str, int] = {}
    asked: dict[int, Note] = {}
    for one in notes:
        if one.what == HANDED:
            life, is_asked = one.of
            last[life] = one.number
            if is_asked == "True":
                asked[one.number] = one
        elif one.what == FOUND:
            life, restored = one.of[0], int(one.of[1])
            fewest = last.get(life, NOTHING)
            if fewest == NOTHING and restored in asked and not _is_undone(asked[restored], begins, one.at):
                fewest = restored
            if one.number < fewest:
                yield f"rank {rank} has handed in as of version {fewest}, and finds {one.number}"


def _repeated(used: Sequence[Sequence[int]], num_samples: int) -> Iterable[str]:
    """Samples that an epoch has twice, or before another one has come. An epoch ends with a step."""
    seen = set[int]()
    for step, samples in enumerate(used, 1):
        for one in samples:
            if one in seen:
                missing = sorted(set(range(num_samples)) - seen)
                yield f"sample {one} again in step {step}, and not yet {missing}"
            seen.add(one)
        if len(seen) == num_samples:
            seen = set()
