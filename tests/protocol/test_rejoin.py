"""How long those who wait hear nothing of a loss, for another worker may take the lost one's place."""

from __future__ import annotations

import pytest

from psstore import errors
from psstore.protocol.barriers import MAX_NAMES
from psstore.protocol.membership import Liveness
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, decisions_in, failure_of

REJOIN = Liveness(rejoin_s=20.0)
LOST_S = REJOIN.detached_s
"""A moment, and a worker that hung up is lost."""


def workers(store: FakeStore, count: int) -> list[Peer]:
    return [store.worker(rank) for rank in range(count)]


def waiting_for_a_new_life(num_workers: int = 2) -> tuple[FakeStore, list[Peer], list[int]]:
    """The last worker is lost; the commits of round 1 of the others wait."""
    store = FakeStore(num_workers=num_workers, liveness=REJOIN)
    *others, dead = workers(store, num_workers)
    dead.hang_up()
    waiting = [peer.commit(1) for peer in others]
    store.pass_time(LOST_S + 1)
    assert store.coordinator.counters(store.now)["ranks_lost"] == str(num_workers - 1)
    return store, others, waiting


def test_next_life_that_comes_in_time_is_all_that_is_noticed() -> None:
    store, others, waiting = waiting_for_a_new_life(3)
    store.pass_time(REJOIN.rejoin_s / 2)
    heir = store.worker(2)
    store.pass_time(REJOIN.rejoin_s)
    assert not any(peer.is_answered(one) for peer, one in zip(others, waiting, strict=True))
    assert heir.committed(heir.commit(1)).decision == 1
    assert [peer.committed(one).decision for peer, one in zip(others, waiting, strict=True)] == [1, 1]


def test_who_waits_hears_of_the_loss_when_nobody_has_come_in_time() -> None:
    store, (first,), (waiting,) = waiting_for_a_new_life()
    store.pass_time(REJOIN.rejoin_s - 2)
    assert not first.is_answered(waiting)
    store.pass_time(2)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert error.details["rank"] == 1
    assert error.details["last_seen_s"] == pytest.approx(LOST_S + REJOIN.rejoin_s)


def test_who_commits_meanwhile_waits_with_the_others() -> None:
    store, (first, second), (waiting, _) = waiting_for_a_new_life(3)
    again = second.commit(1)
    store.pass_time(REJOIN.rejoin_s - 2)
    assert not second.is_answered(again)
    store.pass_time(2)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)
    assert isinstance(failure_of(second, again), errors.WorkerLost)


def test_worker_that_speaks_again_and_is_lost_again_has_its_time_once_more() -> None:
    store, (first,), (waiting,) = waiting_for_a_new_life()
    store.pass_time(REJOIN.rejoin_s - 2)
    heir = store.worker(1)
    heir.hang_up()
    store.pass_time(LOST_S + REJOIN.rejoin_s - 1)
    assert not first.is_answered(waiting)
    store.pass_time(2)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)


def test_two_that_are_lost_have_their_own_times() -> None:
    store = FakeStore(num_workers=3, liveness=REJOIN)
    first, early, late = workers(store, 3)
    early.hang_up()
    waiting = first.commit(1)
    store.pass_time(10)
    late.hang_up()
    store.pass_time(LOST_S + REJOIN.rejoin_s - 10 + 1)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert error.details["rank"] == 1
    again = first.commit(1)
    store.pass_time(11)
    assert isinstance(failure_of(first, again), errors.WorkerLost)


def test_barrier_waits_as_long() -> None:
    store = FakeStore(num_workers=2, liveness=REJOIN)
    first, dead = workers(store, 2)
    dead.hang_up()
    waiting = first.send("BARRIER", m.Barrier(name="", count=1, wait_s=300.0))
    store.pass_time(LOST_S + REJOIN.rejoin_s - 1)
    assert not first.is_answered(waiting)
    store.pass_time(2)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)


def test_losses_that_were_told_at_barriers_are_forgotten_in_the_end() -> None:
    store = FakeStore(num_workers=2)
    first, dead = workers(store, 2)
    dead.hang_up()
    store.pass_time(LOST_S + 1)
    for count in range(1, 101):
        told = first.send("BARRIER", m.Barrier(name=f"step {count}", count=count))
        assert isinstance(failure_of(first, told), errors.WorkerLost)
    assert len(store.coordinator._barriers._losses[0]._told) == MAX_NAMES
    again = first.send("BARRIER", m.Barrier(name="step 100", count=100))
    assert not first.is_answered(again), "it knows, and waits"


def barrier(peer: Peer, name: str, count: int, *, once: bool = True) -> int:
    return peer.send("BARRIER", m.Barrier(name=name, count=count, wait_s=300.0, once=once))


def test_next_life_passes_a_barrier_that_others_are_past_if_it_is_passed_once() -> None:
    store = FakeStore(num_workers=2, liveness=REJOIN)
    first, dead = workers(store, 2)
    passed = [barrier(peer, "set up", 1) for peer in (first, dead)]
    assert first.is_answered(passed[0])
    assert dead.is_answered(passed[1])
    behind = barrier(first, "end", 2)
    dead.hang_up()
    store.pass_time(LOST_S + 1)
    heir = store.worker(1)
    assert not heir.is_answered(barrier(heir, "set up", 1, once=False))
    assert heir.is_answered(barrier(heir, "set up", 2))
    again = barrier(heir, "set up", 3)
    assert not heir.is_answered(again), "it is past it itself"
    barrier(first, "set up", 3)
    assert heir.is_answered(again)
    last = barrier(heir, "end", 4)
    assert first.is_answered(behind)
    assert heir.is_answered(last)


@pytest.mark.parametrize("leaves", [True, False])
def test_nobody_passes_a_barrier_that_only_lives_of_before_are_past(*, leaves: bool) -> None:
    store = FakeStore(num_workers=2, liveness=REJOIN)
    before = workers(store, 2)
    for peer in before:
        barrier(peer, "set up", 1)
    for peer in before:
        if leaves:
            peer.ask("LEAVE")
        peer.hang_up()
    store.pass_time(LOST_S + 1)
    heirs = workers(store, 2)
    waiting = barrier(heirs[0], "set up", 1)
    assert not heirs[0].is_answered(waiting)
    barrier(heirs[1], "set up", 1)
    assert heirs[0].is_answered(waiting)


def test_own_patience_may_be_shorter() -> None:
    store = FakeStore(num_workers=2, liveness=REJOIN)
    first, dead = workers(store, 2)
    dead.hang_up()
    waiting = first.commit(1, wait_s=10.0)
    store.pass_time(11)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert "rank 0 waited 10 s for a replacement" in str(error)


def test_early_commit_of_a_lost_worker_is_void_at_once() -> None:
    """What it promised will not come, whoever takes its place."""
    store = FakeStore(num_workers=2, liveness=REJOIN)
    first, dead = workers(store, 2)
    dead.commit(1, early=True)
    dead.hang_up()
    store.pass_time(LOST_S + 1)
    waiting = first.commit(1, early=True)
    assert not first.is_answered(waiting)
    heir = store.worker(1)
    heir.committed(heir.commit(1, early=True))
    (decision,) = decisions_in(first.committed(waiting))
    assert [member.incarnation for member in decision.members] == [1, 2]
