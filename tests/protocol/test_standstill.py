"""When a shard may stand still: it waits for what workers hand in, and takes that from nobody else who waits for it."""

from __future__ import annotations

import pytest

from psstore.protocol.hand_ins import HandIns
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, carrying

GATHER_S = 60.0

WHO = "c" * 32


@pytest.fixture
def store() -> FakeStore:
    """A store after a round, whose only worker has handed in before that."""
    return FakeStore(num_workers=1)


@pytest.fixture
def peer(store: FakeStore) -> Peer:
    peer = store.worker(0)
    peer.ask("HAND_IN", m.HandIn(version=0, state=b"at 0"))
    end_round(peer, 1)
    store.services[0].standstill.allow(WHO)
    return peer


def end_round(peer: Peer, number: int) -> bool:
    """Whether the worker is asked to hand in. The shard applies what was decided."""
    committed = peer.committed(peer.commit(number))
    peer.ask("PULL", carrying(decisions=committed.decisions, at_least=committed.decision))
    return committed.hand_in


def stands_still(store: FakeStore) -> bool:
    return store.services[0].standstill.ask(WHO, gather_s=GATHER_S, now=store.now)


def hand_ins_of(store: FakeStore) -> HandIns:
    return store.coordinator.rounds.hand_ins


def test_it_waits_until_workers_have_handed_in_as_of_the_last_decision(store: FakeStore, peer: Peer) -> None:
    assert not stands_still(store)
    assert end_round(peer, 2)
    assert not stands_still(store)
    peer.ask("HAND_IN", m.HandIn(version=2, state=b"at 2"))
    assert stands_still(store)


def test_it_waits_for_workers_no_longer_than_it_was_told(store: FakeStore, peer: Peer) -> None:
    assert not stands_still(store)
    store.now += GATHER_S
    assert stands_still(store)


def test_a_checkpoint_that_waits_for_a_decision_still_hears_of_it(store: FakeStore, peer: Peer) -> None:
    made: list[int] = []
    hand_ins_of(store).want_next(1, lambda: made.append(store.coordinator.rounds.log.last))
    assert not stands_still(store)
    assert end_round(peer, 2)
    assert made == [2]
