"""Which clients the coordinator remembers after they went, and for how long."""

from __future__ import annotations

from psstore.protocol.clients import AWAY_S, KEPT_AWAY, MAX_ANSWERS, MAX_AWAY, Clients
from psstore.wire.messages import Dropped


class Store:
    """`Clients` that come one after the other, each over one connection."""

    def __init__(self) -> None:
        self.clients = Clients()
        self.now = 100.0
        self._conn = 0

    def visit(self, client: str, *requests: int) -> int:
        """Comes, asks what changes something, and goes. Returns how many of the requests were carried out."""
        self._conn += 1
        carried_out: list[int] = []

        def answer() -> Dropped:
            carried_out.append(1)
            return Dropped(facts=())

        self.clients.attached(self._conn, client)
        for request in requests:
            self.clients.once(client, request, answer)
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
    requests = range(MAX_ANSWERS + 1)
    store.visit("first", *requests)
    assert store.visit("first", *requests[1:]) == 0
    assert store.visit("first", 0) == 1
