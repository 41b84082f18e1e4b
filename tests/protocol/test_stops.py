"""Where training ends: which commits count, and who is told what."""

from __future__ import annotations

import pytest

from psstore.protocol.stops import NEVER
from psstore.types import UNBOUNDED
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer


def stop(peer: Peer, version: int | None = None, *, finish: bool = False, everyone: bool = False) -> bool:
    """Whether it is told that none of its commits counts any more."""
    return peer.control("STOP", m.Stop(version=version, finish=finish, everyone=everyone), m.Stopped).stop


def test_rounds_end_at_the_version_that_was_said() -> None:
    store = FakeStore(num_workers=2)
    peers = [store.worker(rank) for rank in range(2)]
    for peer in peers:
        stop(peer, 2)
    for number in (1, 2):
        for request, peer in [(peer.commit(number), peer) for peer in peers]:
            committed = peer.committed(request)
            assert (committed.decision, committed.late, committed.stop) == (number, False, number == 2)
    beyond = peers[0].committed(peers[0].commit(3))
    assert (beyond.decision, beyond.last, beyond.late, beyond.stop, beyond.next_round) == (2, 2, True, True, 3)
    assert store.coordinator.rounds.log.last == 2


@pytest.mark.parametrize("staleness", [2, UNBOUNDED])
def test_no_worker_of_its_own_pace_gets_beyond_the_version(staleness: int) -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=staleness)
    one, two = (store.worker(rank) for rank in range(2))
    stop(one, 3)
    stop(two, 3)
    assert one.committed(one.commit(1)).stop is False
    assert two.committed(two.commit(1)).stop is False
    assert one.committed(one.commit(2)).stop is True, "it made the last decision that counts"
    late = two.committed(two.commit(2))
    assert (late.late, late.stop, late.decision) == (True, True, 3)
    assert store.coordinator.rounds.log.last == 3


def test_who_waits_for_the_slowest_is_let_go_when_all_are_done() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=1)
    fast, slow = (store.worker(rank) for rank in range(2))
    fast.committed(fast.commit(1))
    waiting = fast.commit(2)
    assert not fast.is_answered(waiting)
    stop(slow)
    assert fast.committed(waiting).stop


@pytest.mark.parametrize("is_told_meanwhile", [False, True])
def test_who_waits_for_the_slowest_is_let_go_though_others_were_done_before(*, is_told_meanwhile: bool) -> None:
    store = FakeStore(num_workers=4, quorum=1, staleness=1)
    fast, other, done, _slow = (store.worker(rank) for rank in range(4))
    stop(done, 0)
    if not is_told_meanwhile:
        stop(fast, 3)
    fast.committed(fast.commit(1))
    waiting = fast.commit(2)
    assert not fast.is_answered(waiting)
    if is_told_meanwhile:
        stop(other)
    else:
        other.committed(other.commit(1))
    assert fast.committed(waiting).stop


def test_who_has_ended_the_open_round_hears_that_it_does_not_count() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    waiting = one.commit(1)
    stop(two)
    committed = one.committed(waiting)
    assert (committed.late, committed.stop, committed.decision, committed.last) == (True, True, 0, 0)
    assert two.committed(two.commit(1)).late


def test_an_open_round_may_be_finished_first() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    waiting = one.commit(1)
    stop(two, finish=True)
    assert not one.is_answered(waiting)
    for committed in (two.committed(two.commit(1)), one.committed(waiting)):
        assert (committed.decision, committed.late, committed.stop) == (1, False, True)


def test_a_stopped_commit_that_comes_again_gets_the_same_answer() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    stop(peer, 0)
    assert peer.committed(peer.commit(1)) == peer.committed(peer.commit(1))


def test_the_latest_word_holds_and_a_new_life_knows_none() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    stop(peer, 0)
    stop(peer, 1)
    assert not peer.committed(peer.commit(1)).late
    assert peer.committed(peer.commit(2)).late
    peer.ask("LEAVE")
    successor = store.worker(0)
    assert successor.committed(successor.commit(2)).decision == 2


def test_everybodys_end_holds_for_whoever_takes_the_place_of_one() -> None:
    store = FakeStore(num_workers=2)
    one = store.worker(0)
    stop(one, finish=True)
    two = store.worker(1)  # the round waited for it all the time
    requests = [(peer, peer.commit(1)) for peer in (one, two)]
    assert [peer.committed(request).stop for peer, request in requests] == [True, True]
    two.ask("LEAVE")
    successor = store.connect(role="worker")
    assert successor.join(1).stop
    assert stop(successor, 9), "its own word changes nothing"
    late = successor.committed(successor.commit(2))
    assert (late.late, late.stop, late.decision) == (True, True, 1)


def test_nobodys_own_word_puts_off_everybodys_end() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    stop(one, 1, everyone=True)
    stop(two, 9)
    stop(two, 8, everyone=True)
    requests = [(peer, peer.commit(1)) for peer in (one, two)]
    assert [peer.committed(request).stop for peer, request in requests] == [True, True]


def test_a_worker_that_is_through_with_an_end_goes_on_to_another_one() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    stop(one)
    for peer in (one, two):
        stop(peer, NEVER)
    requests = [(peer, peer.commit(1)) for peer in (one, two)]
    assert [peer.committed(request).late for peer, request in requests] == [False, False]


def test_the_next_group_knows_no_end_of_the_one_before() -> None:
    store = FakeStore(num_workers=2)
    for _ in range(2):
        peers = [store.worker(rank) for rank in range(2)]
        stop(peers[0], 1, everyone=True)
        for peer in peers:
            peer.ask("LEAVE")
    peers = [store.worker(rank) for rank in range(2)]
    stop(peers[0], 1)
    requests = [(peer, peer.commit(1)) for peer in peers]
    assert [peer.committed(request).decision for peer, request in requests] == [1, 1]


def test_an_early_commit_of_a_round_that_is_stopped_promises_nothing() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    waiting = one.commit(1, early=True)
    stop(two)
    assert one.committed(waiting).late
    one.ask("LEAVE")
    assert store.coordinator.rounds.torn is None
