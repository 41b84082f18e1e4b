"""What the coordinator keeps instead of looking through all workers: it says what looking would have said."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from bench.coordinator import MODES, Group
from hypothesis import given
from hypothesis import strategies as st

from psstore.errors import NotAWorker, PsstoreError, StaleIncarnation
from psstore.protocol.earliest import Earliest
from psstore.protocol.membership import Liveness, Membership, Worker
from psstore.protocol.states import WorkerState
from tests.protocol.support import LIVENESS, FakeStore, Peer

RANKS = 5


# ---- the smallest of numbers ----


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), st.none() | st.integers(0, 9), st.booleans())))
def test_earliest_is_the_smallest_of_all_numbers(changes: list[tuple[int, int | None, bool]]) -> None:
    earliest, naive = Earliest(), dict[int, float]()
    for rank, number, takes in changes:
        if number is None:
            earliest.drop(rank)
            naive.pop(rank, None)
        elif takes:
            due = sorted(rank for rank, one in naive.items() if one <= number)
            naive = {rank: one for rank, one in naive.items() if one > number}
            assert earliest.take(number) == due
        else:
            earliest.put(rank, number)
            naive[rank] = number
        assert earliest.smallest() == min(naive.values(), default=None)


def test_earliest_does_not_grow_with_what_it_was_told() -> None:
    earliest = Earliest()
    for number in range(10_000):
        earliest.put(0, -number)  # each comes to the top, so that nothing under it is ever looked at
    assert len(earliest._heap) < 100


# ---- members ----


class Members:
    """A membership, what was done to it, and its answers as they are found by looking at all workers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.now = self.before = 0.0
        self.liveness = Liveness(rejoin_s=(seed % 3) * 3.0)
        self.membership = Membership(num_workers=RANKS, liveness=self.liveness)
        self._clients = [f"{number:032x}" for number in range(2 * RANKS)]
        self._lost_since: dict[tuple[int, int], float] = {}
        """(rank, incarnation) -> since when that worker is lost."""

    def change(self) -> None:
        self.before = self.now
        self.now += self._random.choice((0.0, 0.5, 4.0))
        client = self._random.choice(self._clients)
        conn = self._random.randrange(4 * RANKS)
        worker = self._random.choice(list(self.membership.workers.values()) or [None])
        match self._random.randrange(7):
            case 0 | 1:
                self._join(client, conn)
            case 2:
                self.membership.attach(client=client, conn=conn, now=self.now)
            case 3:
                self.membership.detach(conn, self.now)
            case 4 if worker is not None:
                said = self.now - self._random.random()
                self.membership.heartbeat(
                    client=worker.client, rank=worker.rank, incarnation=worker.incarnation, conn=conn, now=said
                )
            case 5 if worker is not None and self._random.random() < 0.3:
                self.membership.leave(worker)
            case 6 if worker is not None:
                self.membership.reached(worker, worker.clock + 1)

    def _join(self, client: str, conn: int) -> None:
        rank = self._random.choice((None, *range(RANKS)))
        clock = self.membership.slowest_clock()
        with contextlib.suppress(PsstoreError):  # taken, or another rank than the one it has
            self.membership.join(client=client, conn=conn, rank=rank, announced=None, clock=clock, now=self.now)

    # ---- by looking ----

    def of(self, state: WorkerState) -> list[Worker]:
        return [worker for _, worker in sorted(self.membership.workers.items()) if worker.state is state]

    def lost_at(self, worker: Worker) -> float:
        silent = worker.last_seen + LIVENESS.silence_s
        gone = math.inf if worker.detached_since is None else worker.detached_since + LIVENESS.detached_s
        return min(silent, gone)

    def slowest_clock(self) -> int:
        if len(self.membership.workers) < RANKS:
            return 0
        return min((worker.clock for worker in self.of(WorkerState.LIVE)), default=0)

    def note_losses(self) -> None:
        lost = {(worker.rank, worker.incarnation) for worker in self.of(WorkerState.LOST)}
        self._lost_since = {life: self._lost_since.get(life, self.now) for life in lost}

    def waited_until(self) -> dict[int, float]:
        """By rank, of those that are lost."""
        self.note_losses()
        return {rank: since + self.liveness.rejoin_s for (rank, _), since in self._lost_since.items()}

    def check(self) -> None:
        membership = self.membership
        live, left = self.of(WorkerState.LIVE), {worker.rank for worker in self.of(WorkerState.LEFT)}
        assert membership.lost() == self.of(WorkerState.LOST)
        assert membership.expected() == set(range(RANKS)) - left
        assert membership.num_expected == RANKS - len(left)
        assert membership.slowest_clock() == self.slowest_clock()
        until = self.waited_until()
        waking = [*map(self.lost_at, live), *(when for when in until.values() if when > self.now)]
        assert membership.give_up(self.now) == any(self.before < when <= self.now for when in until.values())
        assert membership.given_up() == [worker for worker in membership.lost() if until[worker.rank] <= self.now]
        assert membership.next_wake() == min(waking, default=None)
        for worker in live:
            assert membership.worker_of(worker.client) is worker
        due = [worker for worker in live if self.lost_at(worker) <= self.now]
        assert membership.sweep(self.now) == due
        assert all(worker.state is WorkerState.LOST for worker in due)
        self.note_losses()
        membership.give_up(self.now)


@pytest.mark.parametrize("seed", range(50))
def test_membership_knows_what_looking_at_all_workers_finds(seed: int) -> None:
    members = Members(seed)
    for _ in range(200):
        members.change()
        members.check()


def test_client_that_has_left_and_joined_again_is_the_worker_that_it_is_now() -> None:
    members = Membership(num_workers=2, liveness=LIVENESS)

    def join(client: str, rank: int) -> Worker:
        return members.join(client=client, conn=0, rank=rank, announced=None, clock=0, now=0.0)

    members.leave(join("a", 0))
    join("b", 0)
    with pytest.raises(StaleIncarnation):
        members.worker_of("a")
    again = join("a", 1)
    assert members.worker_of("a") is again
    members.leave(again)
    with pytest.raises(NotAWorker):
        members.worker_of("a")


# ---- rounds ----


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_who_may_go_and_nobody_goes_who_must_wait(seed: int) -> None:
    staleness = 2
    chance = random.Random(seed)
    store = FakeStore(num_workers=RANKS, quorum=1, staleness=staleness)
    peers = [store.worker(rank) for rank in range(RANKS)]
    waiting: dict[Peer, int] = {}
    clocks = dict.fromkeys(peers, 0)
    for _ in range(100):
        peer = chance.choice([peer for peer in peers if peer not in waiting])
        clocks[peer] += 1
        waiting[peer] = peer.commit(clocks[peer])
        store.now += chance.random()
        slowest = min(clocks.values())
        for other, request in list(waiting.items()):
            assert other.is_answered(request) == (clocks[other] - slowest <= staleness)
            if other.is_answered(request):
                del waiting[other]


# ---- steps ----


def _steps(work: Callable[[], Any]) -> int:
    """Instructions of Python that it takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks at the next `settrace` whether any frame wants them
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("mode", MODES)
def test_requests_take_as_many_steps_of_many_workers(mode: str) -> None:
    steps = {}
    for count in (8, 400):
        group = Group(MODES[mode](count), requests=count)
        group.join()
        group.run_ahead()
        group.commit()
        steps[count] = [_steps(work) / count for work in (group.commit, group.beat)]
    few, many = steps.values()
    assert all(of_many < 1.2 * of_few for of_few, of_many in zip(few, many, strict=True)), steps
