"""What learners have contributed, by their own notes, held against what the store's values have become of it.

A decision adds to the element of each learner that it counts what this one has contributed, divided by how many it
counts. It does so in one fragment, and what is read here is the sum over all of them. So each decision tells who is in
it, and with how many steps: a contribution that was acknowledged as counted is in the decision that was named, one that
was acknowledged as late is in none, and one whose learner was killed before it was answered is in that decision or in
none.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

UNIT = 840.0
"""What a step adds: 1 to 8 divide it."""

CLOSE = 1.0
"""How far float32 may be off a quotient, of which two that differ do so by more."""


class Notes:
    """One learner's: a line at a time is with the kernel before the next thing happens, whoever is killed then."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(path_of(folder, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def commits(self, round: int, amount: float) -> None:
        self._note(f"commits {round} {amount}")

    def decided(self, round: int, decision: int, counts: bool) -> None:
        self._note(f"decided {round} {decision} {int(counts)}")

    def _note(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


@dataclass
class Contribution:
    """Of one learner, to a round."""

    round: int
    amount: float
    decision: int | None = None
    """That closed its round; None: the learner was killed before it was told."""
    counts: bool = False


@dataclass(frozen=True)
class Decision:
    """What one decision has changed, as a reader saw it."""

    number: int
    added: npt.NDArray[np.float64]
    """To each learner's element."""


@dataclass
class Account:
    """What notes and decisions say together."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    """Also what nobody has sent."""
    acknowledged: int = 0
    unanswered: int = 0
    """Contributions of learners that were killed before they were told."""
    unanswered_and_counted: int = 0
    late: int = 0


def account(notes: Mapping[int, Sequence[Contribution]], decisions: Sequence[Decision]) -> Account:
    """Of all decisions that were seen one by one, and of the notes of each rank."""
    found = Account()
    of_round: dict[tuple[int, int], list[Contribution]] = defaultdict(list)
    for rank, contributions in notes.items():
        for one in contributions:
            of_round[rank, one.round].append(one)
            found.acknowledged += one.counts
            found.unanswered += one.decision is None
            found.late += one.decision is not None and not one.counts
    for decision in decisions:
        _look_at(decision, of_round, found)
    return found


def _look_at(decision: Decision, of_round: Mapping[tuple[int, int], Sequence[Contribution]], found: Account) -> None:
    sent = {rank: of_round.get((rank, decision.number), ()) for rank in range(len(decision.added))}
    divisor = _divisor(decision, sent)
    for rank, added in enumerate(decision.added):
        told = (
            f"decision {decision.number} added {added} to rank {rank}, divided by {divisor}; it had sent {sent[rank]}"
        )
        acknowledged = [one for one in sent[rank] if one.counts and one.amount]
        if abs(added) < CLOSE:
            if acknowledged:
                found.lost.append(told)
            continue
        may_count = acknowledged or [one for one in sent[rank] if one.decision is None]
        if not divisor or not any(abs(one.amount / divisor - added) < CLOSE for one in may_count):
            (found.lost if added < 0 else found.doubled).append(told)
        elif not acknowledged:
            found.unanswered_and_counted += 1


def _divisor(decision: Decision, sent: Mapping[int, Sequence[Contribution]]) -> int:
    """By how many the decision has divided, which is the same number for everyone in it; 0: no number fits."""
    fitting = set(range(1, len(decision.added) + 1))
    for rank, added in enumerate(decision.added):
        if abs(added) >= CLOSE:
            fitting &= {n for n in fitting for one in sent[rank] if abs(one.amount / n - added) < CLOSE}
    in_it = sum(abs(added) >= CLOSE for added in decision.added)
    return max((n for n in fitting if n >= in_it), default=0)


def read(folder: Path, num_learners: int) -> dict[int, list[Contribution]]:
    """What each rank has noted, over all its lives."""
    return {rank: list(_contributions(path_of(folder, rank))) for rank in range(num_learners)}


def awaits_answer(folder: Path, rank: int) -> bool:
    """Whether a rank has noted a commit, and not yet its answer."""
    path = path_of(folder, rank)
    contributions = list(_contributions(path)) if path.exists() else []
    return bool(contributions) and contributions[-1].decision is None


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"notes-{rank}"


def _contributions(path: Path) -> Iterator[Contribution]:
    open_one: Contribution | None = None
    for line in path.read_text().splitlines():
        what, *rest = line.split()
        if what == "commits":
            if open_one is not None:
                yield open_one  # of a life that ended before it was told
            open_one = Contribution(int(rest[0]), float(rest[1]))
        else:
            assert open_one is not None, line
            assert open_one.round == int(rest[0]), line
            open_one.decision, open_one.counts = int(rest[1]), rest[2] == "1"
            yield open_one
            open_one = None
    if open_one is not None:
        yield open_one
