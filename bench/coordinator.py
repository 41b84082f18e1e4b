"""What a worker costs the coordinator: commits, heartbeats and joins, by how many workers there are.

    python -m bench.coordinator [--quick] [--workers N] [--json FILE]

The coordinator is called in this process, as its shard does: each request, then when it wants to be woken. No sockets,
no tensors. Axes: workers, mode. Every worker commits once a round; under ssp the others are as far ahead of the last
one as they may be, and wait for it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

from bench.command import Subject, run
from bench.harness import Series, alternate, timed
from bench.machine import machine
from bench.report import Cell, Report, Table
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.replies import Reply
from psstore.protocol.signing import Signer
from psstore.types import Consistency
from psstore.wire.messages import AppliedFact, Commit, Committed, Join, Joined

WORKERS = (8, 200, 2000)

MODES: Mapping[str, Callable[[int], Consistency]] = {
    "sync": lambda count: Consistency(num_workers=count, quorum=count, staleness=0),
    "ssp": lambda count: Consistency(num_workers=count, quorum=1, staleness=1),
}

NUM_SHARDS = 2

REQUESTS = 2000
"""Of a turn: with few workers it has several rounds."""

SECONDS_PER_ROUND = 0.01
"""Of the coordinator's clock, so that heartbeats move what a round waits for."""


class Group:
    """A coordinator and all its workers. `requests`: of a turn, at least."""

    def __init__(self, consistency: Consistency, *, requests: int = REQUESTS) -> None:
        self._coordinator = Coordinator(
            consistency=consistency, liveness=Liveness(), num_shards=NUM_SHARDS, signer=Signer(b"the bench's own key")
        )
        self._ranks = range(consistency.num_workers)
        self._rounds_per_turn = math.ceil(requests / consistency.num_workers)
        self._ahead = consistency.staleness
        self._now = 0.0
        self._clocks = [0 for _ in self._ranks]
        self._known = [0 for _ in self._ranks]
        """The last decision that each worker has heard of."""
        self._asked: set[int] = set()
        """Ranks that are to bring what shards have applied with their next commit."""

    def join(self) -> float:
        """All of them; the seconds of one."""
        return timed(self._join_all).cpu_seconds / len(self._ranks)

    def _join_all(self) -> None:
        for rank in self._ranks:
            self._coordinator.attached(rank, _client(rank), self._now)
            (joined,) = self._ask(rank, Join(rank=rank, num_workers=len(self._ranks)))
            assert isinstance(joined.result, Joined)

    def run_ahead(self) -> None:
        """All but the last, as far as they may be."""
        for _ in range(self._ahead):
            for rank in self._ranks[:-1]:
                self._commit(rank)

    def commit(self) -> float:
        """Everybody, several times over; the seconds of one commit."""
        return self._each(self._commit_all)

    def beat(self) -> float:
        """As `commit`, of heartbeats."""
        return self._each(self._beat_all)

    def _each(self, round: Callable[[], None]) -> float:
        def rounds() -> None:
            for _ in range(self._rounds_per_turn):
                round()

        took = timed(rounds)
        return took.cpu_seconds / (self._rounds_per_turn * len(self._ranks))

    def _commit_all(self) -> None:
        self._now += SECONDS_PER_ROUND
        assert sum(self._commit(rank) for rank in self._ranks) == len(self._ranks)

    def _beat_all(self) -> None:
        self._now += SECONDS_PER_ROUND
        for rank in self._ranks:
            self._coordinator.heartbeat(rank, client=_client(rank), rank=rank, incarnation=1, now=self._now)
            self._coordinator.next_wake()

    def _commit(self, rank: int) -> int:
        """How many were answered by it."""
        self._clocks[rank] += 1
        if rank in self._asked:
            self._asked.remove(rank)
            for shard in range(NUM_SHARDS):
                self._coordinator.applied(AppliedFact(shard=shard, decision=self._known[rank]), self._now)
        replies = self._ask(rank, Commit(round=self._clocks[rank], present=((1, 161),), since=self._known[rank]))
        for reply in replies:
            assert isinstance(reply.result, Committed)
            self._known[reply.conn] = reply.result.last
            if reply.result.attest:
                self._asked.add(reply.conn)
        return len(replies)

    def _ask(self, rank: int, message: Join | Commit) -> list[Reply]:
        request = self._clocks[rank]
        replies = self._coordinator.handle(rank, request, message, client=_client(rank), now=self._now)
        self._coordinator.next_wake()
        return replies


def _client(rank: int) -> str:
    return f"{rank:032x}"


# ---- measuring ----


def measure(chosen: argparse.Namespace) -> Report:
    rows: list[list[Cell]] = []
    summary: list[list[Cell]] = []
    for mode, consistency_of in MODES.items():
        for count in chosen.workers or WORKERS:
            found = _series(consistency_of(count), rounds=3 if chosen.quick else 9)
            rows.append([f"{mode}, {count} workers", *(1e6 * series.median for series in found.values())])
            summary.append(_summary_row(f"a commit, {rows[-1][0]}", found["commit"]))
    headers = ("who", "µs a join", "µs a commit", "µs a heartbeat")
    return Report(
        subject="coordinator",
        about=(
            "Processor time of the coordinator alone for one request, with asking when to wake it: the median of turns"
            f" of at least {REQUESTS:,} requests. A commit's reply brings all decisions since the worker's last one."
        ),
        tables=[Table("one worker's request", headers, rows)],
        summary=summary,
        machine=machine(),
    )


def _series(consistency: Consistency, *, rounds: int) -> dict[str, Series]:
    group = Group(consistency)
    title = f"{consistency.num_workers} workers"
    joins = alternate({"join": group.join}, warm_up=0, rounds=1, progress=title)
    group.run_ahead()
    return {
        **joins,
        **alternate({"commit": group.commit, "beat": group.beat}, warm_up=1, rounds=rounds, progress=title),
    }


def _summary_row(what: str, commits: Series) -> list[Cell]:
    return ["coordinator", what, f"{1e6 * commits.median:.1f} µs", None, None]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", action="append", type=int, metavar="N", help="only so many workers")


SUBJECT = Subject("coordinator", __doc__.splitlines()[0], measure, add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
