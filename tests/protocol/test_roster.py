"""Workers that come and go: when they take part, who is told, and how few will do."""

from __future__ import annotations

import pytest

from psstore.errors import BadArgument, DeadlineExceeded, NotAWorker, RankTaken, TornRound
from psstore.protocol.membership import Liveness
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, failure_of, sgd

LOST_AFTER_S = Liveness().detached_s + 0.5


def elastic(*, fewest: int = 1, most: int = 4, rejoin_s: float = 0.0) -> FakeStore:
    return FakeStore(num_workers=most, fewest=fewest, liveness=Liveness(lost="drop", rejoin_s=rejoin_s))


def arrive(store: FakeStore, rank: int | None = None, *, wait_s: float = 300.0) -> tuple[Peer, int]:
    """A worker that has asked to join, and the number of its request."""
    peer = store.connect(role="worker")
    return peer, peer.send("JOIN", m.Join(rank=rank, wait_s=wait_s))


def joined(peer: Peer, request: int) -> m.Joined:
    return peer.joined(request)


def arrived(store: FakeStore, rank: int | None = None) -> Peer:
    peer, request = arrive(store, rank)
    joined(peer, request)
    return peer


def members_of(store: FakeStore) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(one.version, one.members, one.absent) for one in store.coordinator.roster.log]


def test_one_that_comes_takes_part_from_the_next_round_on() -> None:
    store = elastic()
    one = arrived(store)
    late, request = arrive(store)
    assert not late.is_answered(request)
    first = one.commit(1, members=1)
    assert one.committed(first).members == (m.Members(version=1, members=(0, 1)),)
    told = joined(late, request)
    assert (told.rank, told.round, told.decision) == (1, 2, 1)
    assert [one.members for one in told.members] == [(0,), (0, 1)]
    second = one.commit(2, members=2)
    assert not one.is_answered(second), "the other is waited for"
    late.commit(2, members=2)
    assert one.committed(second).members == ()


def test_one_that_leaves_is_missing_in_the_round_that_it_was_in() -> None:
    store = elastic()
    one = arrived(store)
    late, request = arrive(store)
    one.committed(one.commit(1))
    joined(late, request)
    late.ask("LEAVE")
    told = one.committed(one.commit(2, members=2)).members
    assert told == (m.Members(version=2, members=(0,), absent=(1,)),)


def test_one_that_is_lost_is_dropped_when_nobody_came_in_its_place() -> None:
    store = elastic(rejoin_s=5.0)
    one = arrived(store)
    other, request = arrive(store)
    one.committed(one.commit(1))
    joined(other, request)
    waiting = one.commit(2)
    other.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert not one.is_answered(waiting)
    store.pass_time(5.0)
    assert one.committed(waiting).members[-1].absent == (1,)
    back = store.connect(client=other.client, role="worker")
    with pytest.raises(NotAWorker, match="the others went on without it"):
        back.ask("COMMIT", m.Commit(round=2))


def test_a_lost_ones_place_is_taken_at_once() -> None:
    """It is waited for."""
    store = elastic(rejoin_s=60.0)
    one = arrived(store)
    other, request = arrive(store)
    one.committed(one.commit(1))
    joined(other, request)
    waiting = one.commit(2, members=2)
    other.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert store.coordinator.membership.lost()
    again = arrived(store)
    again.commit(2)
    assert one.committed(waiting).members == ()
    assert members_of(store) == [(0, (0,), ()), (1, (0, 1), ())]


def test_no_round_is_decided_without_the_fewest() -> None:
    store = elastic(fewest=2)
    (one, request_of_one), (two, request_of_two) = arrive(store), arrive(store)
    joined(one, request_of_one)
    joined(two, request_of_two)
    two.ask("LEAVE")
    waiting = one.commit(1)
    assert not one.is_answered(waiting), "it is alone, and two are the fewest"
    three, request = arrive(store)
    assert one.committed(waiting).members[-1] == m.Members(version=1, members=(0, 2), absent=(1,))
    assert joined(three, request).rank == 2


def test_a_first_round_waits_for_the_fewest() -> None:
    store = elastic(fewest=3)
    peers = [arrive(store) for _ in range(2)]
    assert not any(peer.is_answered(request) for peer, request in peers)
    peers.append(arrive(store))
    assert [joined(peer, request).rank for peer, request in peers] == [0, 1, 2]
    assert members_of(store) == [(0, (0, 1, 2), ())]


def test_whoever_waits_too_long_hears_for_what() -> None:
    store = elastic(fewest=2)
    alone, request = arrive(store, wait_s=7.0)
    store.pass_time(8.0)
    error = failure_of(alone, request)
    assert isinstance(error, DeadlineExceeded)
    assert "rank 0 waited 7 s for 2 workers to be there" in error.message


def test_whoever_waits_too_long_for_the_open_round_hears_who_keeps_it_open() -> None:
    store = elastic(fewest=2)
    (one, request_of_one), (two, request_of_two) = arrive(store), arrive(store)
    joined(one, request_of_one)
    joined(two, request_of_two)
    late, request = arrive(store, wait_s=7.0)
    store.pass_time(5.0)
    two.commit(1, members=1)
    store.pass_time(3.0)
    error = failure_of(late, request)
    assert isinstance(error, DeadlineExceeded)
    assert "rank 2 waited 7 s for rank 0 (in round 1, last seen 7.0 s ago) to end the open round" in error.message
    assert error.details["rank"] == 0


def test_whoever_waits_and_is_gone_is_not_let_in() -> None:
    store = elastic()
    one = arrived(store)
    late, _ = arrive(store, rank=2)
    late.hang_up()
    assert one.committed(one.commit(1, members=1)).members == ()
    again, request = arrive(store, rank=2)
    one.committed(one.commit(2))
    assert joined(again, request).rank == 2


def test_ranks_are_one_workers_each() -> None:
    store = elastic(most=2)
    arrived(store, rank=1)
    arrive(store, rank=0)
    with pytest.raises(RankTaken, match="waits for its first round"):
        store.connect(role="worker").control("JOIN", m.Join(rank=0), m.Joined)
    with pytest.raises(BadArgument, match=r"rank 2 is not in \[0, 2\)"):
        store.connect(role="worker").control("JOIN", m.Join(rank=2), m.Joined)


def test_newcomers_are_told_when_the_round_before_is_done() -> None:
    """What an early commit has promised may not come."""
    store = elastic()
    one = arrived(store)
    one.create(sgd("w"))
    late, request = arrive(store)
    one.committed(one.commit(1, present=[1], early=True))
    assert not late.is_answered(request)
    one.ask("LEAVE")
    assert isinstance(failure_of(late, request), TornRound)


def test_whoever_asks_again_before_the_round_is_done_is_one_worker() -> None:
    store = elastic()
    one = arrived(store)
    one.create(sgd("w"))
    late, _ = arrive(store)
    one.committed(one.commit(1, present=[1], early=True))
    late.hang_up()
    other, request_of_other = arrive(store)
    again = store.connect(client=late.client, role="worker")
    request = again.send("JOIN", m.Join())
    one.finished(one.finish(1))
    assert again.joined(request).rank == 1
    assert not other.is_answered(request_of_other)
    assert members_of(store)[-1] == (1, (0, 1), ())
