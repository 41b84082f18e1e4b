"""Until when a quorum waits for who is missing, if it waits as long as that pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from psstore.protocol.grace import KEPT, SLACK, Grace
from psstore.protocol.membership import Liveness
from psstore.types import ADAPTIVE
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, decisions_in, sgd, tensor_of

LATE = 2
"""The rank that the others may wait for."""


def seen(took_s: Sequence[float]) -> Grace:
    """The rank has taken so long for its contributions, and begun another one at time 0. The last decision was then."""
    grace, now = Grace(), -sum(took_s)
    for one in took_s:
        grace.answered(LATE, now, brings=True)
        now += one
        grace.came(LATE, now, brings=True)
    grace.answered(LATE, 0.0, brings=True)
    grace.decided(0.0)
    return grace


def waits_until(grace: Grace, came_at: float, *, num_there: int = 2) -> float:
    """The time that is worth waiting for, of a round that others have come to by then."""
    grace.came(0, came_at, brings=True)
    return came_at + (grace.ends(num_there=num_there, missing=[LATE]) - came_at) / SLACK


@pytest.mark.parametrize(
    ("took_s", "until"),
    [
        ([1.4] * 4, 1.4),  # two wait for 0.4 s, and it brings 1 s
        ([1.5] * 4, 1.0),  # just not worth it
        ([4.0] * 4, 1.0),
        ([1.2, 1.2, 1.2, 6.0], 1.2),  # it comes soon, or there is no point in waiting
        ([1.2, 6.0, 6.0, 6.0], 1.0),  # it hardly ever comes soon
        ([0.9] * 4, 1.0),  # it has never taken so long: something is wrong
        ([0.9, 0.9, 0.9, 1.1], 1.1),  # of the times that it might still take, all are short
        ([], 1.0),  # nobody knows
    ],
)
def test_it_waits_until_the_time_at_which_the_gain_exceeds_the_cost_by_most(took_s: list[float], until: float) -> None:
    assert waits_until(seen(took_s), 1.0) == pytest.approx(until)


def test_the_more_wait_the_less_it_pays() -> None:
    assert waits_until(seen([1.2] * 4), 1.0, num_there=4) == pytest.approx(1.2)
    assert waits_until(seen([1.2] * 4), 1.0, num_there=6) == 1.0


def test_of_several_that_are_missing_the_one_counts_that_is_worth_the_longest_wait() -> None:
    grace = seen([1.1] * 4)
    grace.answered(3, 0.0, brings=True)
    grace.came(0, 1.0, brings=True)
    assert grace.ends(num_there=2, missing=[3]) == 1.0
    assert grace.ends(num_there=2, missing=[3, LATE]) == pytest.approx(1.0 + SLACK * 0.1)


def test_only_the_last_contributions_of_a_worker_count() -> None:
    assert waits_until(seen([1.3] * KEPT + [9.0] * KEPT), 1.0) == 1.0
    assert waits_until(seen([9.0] * KEPT + [1.3] * KEPT), 1.0) == pytest.approx(1.3)


def test_what_a_life_has_taken_says_nothing_of_the_next() -> None:
    grace = seen([1.4] * 4)
    grace.forget(LATE)
    grace.answered(LATE, 0.0, brings=True)
    assert waits_until(grace, 1.0) == 1.0


def test_a_commit_of_nothing_says_nothing_of_how_long_a_contribution_takes() -> None:
    """As one by which a learner goes on to the open round."""
    grace = seen([1.4] * 4)
    grace.came(LATE, 0.2, brings=False, late=True)
    grace.answered(LATE, 0.2, brings=False)
    assert waits_until(grace, 1.0) == pytest.approx(1.4)


# ---- of a store ----


def train_late(store: FakeStore, peers: Sequence[Peer], ids: list[int], round: int, *, late_s: float) -> list[int]:
    """A round that the first two end after a second, and the third so much later; who is in its decision."""
    store.pass_time(1.0)
    waiting = [peer.commit(round, ids) for peer in peers[:2]]
    store.pass_time(late_s)
    requests = [*waiting, peers[2].commit(round, ids)]
    told = [peer.committed(request) for peer, request in zip(peers, requests, strict=True)]
    return [member.rank for member in decisions_in(told[0])[-1].members]


@pytest.mark.parametrize(("late_s", "waits"), [(0.3, True), (0.7, False)])
def test_a_round_learns_from_those_before_whether_to_wait(late_s: float, waits: bool) -> None:
    store = FakeStore(num_workers=3, quorum=2, grace_s=ADAPTIVE, liveness=Liveness(silence_s=1e6, detached_s=1e6))
    peers = [store.worker(rank) for rank in range(3)]
    ids = [tensor_of(peers[0].create(sgd("w", zeros=True)).tensors[0]).id]
    assert train_late(store, peers, ids, 1, late_s=late_s) == [0, 1], "of whom nothing is known, nobody waits"
    for round in (2, 3, 4):
        took_part = train_late(store, peers, ids, round, late_s=late_s)
    assert took_part == ([0, 1, 2] if waits else [0, 1])


def test_clients_are_told_that_a_grace_is_to_pay() -> None:
    store = FakeStore(num_workers=3, quorum=2, grace_s=ADAPTIVE)
    peer = store.dial()
    welcome = m.decode_body(m.Welcome, peer.ask("HELLO", m.Hello(client=peer.client)).body)
    assert welcome.consistency.grace_s == ADAPTIVE
