"""What workers hand in for their next lives, and when they are asked."""

from __future__ import annotations

from unittest import mock

import pytest

from psstore.errors import BadArgument, OutOfMemory, StaleIncarnation
from psstore.types import UNBOUNDED
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer


def hand_in(peer: Peer, version: int, state: bytes = b"state") -> None:
    peer.ask("HAND_IN", m.HandIn(version=version, state=state))


def back(peer: Peer) -> m.HandedBack:
    return peer.control("HAND_BACK", m.HandBack(), m.HandedBack)


def round_(number: int, *peers: Peer) -> list[bool]:
    """Which of them were asked to hand in."""
    return [peer.committed(request).hand_in for request, peer in [(peer.commit(number), peer) for peer in peers]]


def test_the_last_one_is_given_back_also_to_the_next_life() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    assert back(peer) == m.HandedBack()
    hand_in(peer, 0, b"first")
    peer.committed(peer.commit(1))
    hand_in(peer, 1, b"second")
    assert back(peer) == m.HandedBack(version=1, state=b"second")
    peer.ask("LEAVE")
    assert back(store.worker(0)) == m.HandedBack(version=1, state=b"second")


def test_only_workers_hand_in_and_never_as_of_what_is_not_decided() -> None:
    store = FakeStore(num_workers=1)
    with pytest.raises(StaleIncarnation):
        hand_in(store.connect(), 0)
    peer = store.worker(0)
    with pytest.raises(BadArgument, match="version 1; expected 0 to 0"):
        hand_in(peer, 1)
    peer.committed(peer.commit(1))
    hand_in(peer, 1)
    with pytest.raises(BadArgument, match="version 0; expected 1 to 1"):
        hand_in(peer, 0)


def test_who_hands_in_is_asked_with_the_next_decision_and_until_it_has() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    hand_ins = store.coordinator.rounds.hand_ins
    hand_in(one, 0)
    made: list[int] = []
    hand_ins.want_next(0, lambda: made.append(store.coordinator.rounds.log.last))
    assert hand_ins.missing(1) == [0]
    assert round_(1, one, two) == [True, False], "rank 1 has never handed in"
    assert made == [1]
    assert round_(2, one, two) == [True, False]
    assert made == [1], "the checkpoint is of one decision"
    hand_in(one, 2)
    assert hand_ins.missing(1) == []
    assert round_(3, one, two) == [False, False]


def test_a_commit_that_comes_again_is_asked_again() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    hand_in(peer, 0)
    store.coordinator.rounds.hand_ins.want_next(0, lambda: None)
    assert round_(1, peer) == [True]
    assert round_(1, peer) == [True], "its connection was lost before the answer came"


def test_each_worker_of_its_own_pace_is_asked_when_it_commits_next() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=UNBOUNDED)
    one, two = (store.worker(rank) for rank in range(2))
    for peer in (one, two):
        hand_in(peer, 0)
    hand_ins = store.coordinator.rounds.hand_ins
    hand_ins.want_next(0, lambda: None)
    assert round_(1, one) == [True]
    hand_in(one, 1)
    assert hand_ins.missing(1) == [1]
    assert round_(1, two) == [True]
    hand_in(two, 2)
    assert hand_ins.missing(1) == []


def test_what_is_handed_in_later_takes_no_place_before_the_checkpoint_begins() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    hand_in(peer, 0, b"at 0")
    hand_ins = store.coordinator.rounds.hand_ins
    hand_ins.want_next(0, lambda: None)
    round_(1, peer)
    hand_in(peer, 1, b"at 1")
    round_(2, peer)
    hand_in(peer, 2, b"at 2")
    assert hand_ins.nearest[0].state == b"at 1"
    hand_ins.enough()
    assert hand_ins.nearest[0].state == b"at 2"


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    store = FakeStore(num_workers=2)
    one, two = (store.worker(rank) for rank in range(2))
    for peer in (one, two):
        hand_in(peer, 0)
    round_(1, one, two)
    hand_in(one, 1)
    assert store.coordinator.rounds.hand_ins.missing(1) == [1]
    two.ask("LEAVE")
    assert store.coordinator.rounds.hand_ins.missing(1) == []


def test_nobody_is_asked_any_more_once_it_is_enough() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    hand_in(peer, 0)
    hand_ins = store.coordinator.rounds.hand_ins
    hand_ins.want_next(0, lambda: None)
    hand_ins.enough()
    assert round_(1, peer) == [False]


def test_what_is_larger_than_a_message_comes_in_pieces_and_counts_when_its_end_has_come() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    hand_in(peer, 0, b"before")
    peer.ask("HAND_IN", m.HandIn(version=0, state=b"one ", more=True))
    assert back(peer).state == b"before"
    with pytest.raises(BadArgument, match="from byte 3 on as of version 0; expected byte 4"):
        peer.ask("HAND_IN", m.HandIn(version=0, state=b"two", offset=3))
    peer.ask("HAND_IN", m.HandIn(version=0, state=b"two", offset=4))
    assert back(peer).state == b"one two"


def test_a_next_life_does_not_go_on_with_what_the_last_one_began() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    peer.ask("HAND_IN", m.HandIn(version=0, state=b"one ", more=True))
    peer.ask("LEAVE")
    with pytest.raises(BadArgument, match="expected byte 0"):
        store.worker(0).ask("HAND_IN", m.HandIn(version=0, state=b"two", offset=4))


def test_what_is_handed_in_is_bounded_all_together() -> None:
    store = FakeStore(num_workers=2, max_handed_bytes=10)
    one, two = (store.worker(rank) for rank in range(2))
    hand_in(one, 0, b"123456")
    with pytest.raises(OutOfMemory, match="rank 1 hands in 5 bytes or more"):
        hand_in(two, 0, b"12345")
    hand_in(two, 0, b"1234")
    assert back(one).state == b"123456"


def test_large_ones_are_given_back_in_pieces() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    with mock.patch.object(m, "HANDED_PIECE_BYTES", 4):
        hand_in(peer, 0, b"one two")
        assert back(peer) == m.HandedBack(version=0, state=b"one ", more=True)
        assert peer.control("HAND_BACK", m.HandBack(offset=4), m.HandedBack) == m.HandedBack(version=0, state=b"two")
