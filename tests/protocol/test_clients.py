"""Which clients the coordinator remembers after they went, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from psstore.errors import Overloaded
from psstore.protocol.clients import AWAY_S, KEPT_AWAY, MAX_ANSWER_BYTES, MAX_ANSWERS, MAX_AWAY, Clients
from psstore.wire.messages import Dropped, Signed


def short() -> Dropped:
    return Dropped(facts=())


def large() -> Dropped:
    return Dropped(facts=(Signed(blob=bytes(MAX_ANSWER_BYTES // 4), mac=b""),))


class Store:
    """`Clients` that come one after the other, each over one connection."""

    def __init__(self) -> None:
        self.clients = Clients()
        self.now = 100.0
        self._conn = 0

    def visit(self, client: str, *requests: int, answer: Callable[[], Dropped] = short) -> int:
        """Comes, asks what changes something, and goes. Returns how many of the requests were carried out."""
        self._conn += 1
        carried_out: list[int] = []

        def carry_out() -> Dropped:
            carried_out.append(1)
            return answer()

        self.clients.attached(self._conn, client)
        try:
            for request in requests:
                self.clients.once(client, request, carry_out)
        finally:
            self.clients.detached(self._conn, self.now)
        return len(carried_out)

    def crowd(self, count: int, *, over_s: float = 0.0) -> None:
        """So many others come and go."""
        for number in range(count):
            self.now += over_s / count
            self.visit(f"{self.now} {number}", 1)


def test_client_that_comes_back_gets_the_answers_that_it_got() -> None:
    store = Store()
    assert store.visit("first", 1, 2) == 2
    assert store.visit("first", 1, 2, 3) == 1


def test_client_that_was_away_for_long_is_remembered_while_few_others_go() -> None:
    store = Store()
    store.visit("first", 1)
    store.crowd(KEPT_AWAY - 1, over_s=100 * AWAY_S)
    assert store.visit("first", 1) == 0


def test_client_that_was_away_for_a_moment_is_remembered_while_many_others_go() -> None:
    store = Store()
    store.visit("first", 1)
    store.crowd(MAX_AWAY - 1, over_s=AWAY_S / 2)
    assert store.visit("first", 1) == 0


def test_client_that_was_away_for_long_is_forgotten_when_many_others_have_gone() -> None:
    store = Store()
    store.visit("first", 1)
    store.crowd(KEPT_AWAY + 1, over_s=1.5 * AWAY_S)
    assert store.visit("first", 1) == 1


def test_no_more_clients_are_remembered_than_there_may_be() -> None:
    store = Store()
    store.visit("first", 1)
    store.crowd(MAX_AWAY)
    assert store.visit("first", 1) == 1


def test_last_answers_of_a_client_are_remembered() -> None:
    store = Store()
    requests = range(1, MAX_ANSWERS + 2)
    store.visit("first", *requests)
    assert store.visit("first", *requests[1:]) == 0
    with pytest.raises(Overloaded, match="request 1 came before"):
        store.visit("first", 1)


def test_what_is_answered_at_length_is_forgotten_first_come_first_and_not_carried_out_again() -> None:
    store = Store()
    for client in ("first", "second", "third"):
        store.visit(client, 7, 8, answer=large)
    assert store.visit("third", 7, 8) == 0
    assert store.visit("second", 8) == 0
    for client, request in (("first", 7), ("first", 8), ("second", 7)):
        with pytest.raises(Overloaded, match="not kept any longer"):
            store.visit(client, request)
    assert store.visit("first", 9) == 1


def test_an_answer_that_many_got_counts_once() -> None:
    store = Store()
    once = large()
    for client in range(100):
        store.visit(str(client), 1, answer=lambda: once)
    assert store.visit("0", 1) == 0
    for client in range(100):
        store.visit(str(client), *range(2, MAX_ANSWERS + 2))
    for client in range(3):
        store.visit(f"another {client}", 1, answer=large)
    assert store.visit("99", MAX_ANSWERS + 1) == 0


def test_clients_that_are_forgotten_count_no_longer() -> None:
    store = Store()
    for number in range(20):
        store.visit(f"early {number}", 1, answer=large)
    store.crowd(KEPT_AWAY + 1, over_s=1.5 * AWAY_S)
    store.visit("late", 1, 2, answer=large)
    assert store.visit("late", 1, 2) == 0
