"""A shard whose connections are all taken: who asks nothing makes room, and readers leave some to workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from psstore.errors import Overloaded
from psstore.protocol import connections
from psstore.protocol.connection import HANDSHAKE_S
from tests.support.raw_client import RawClient, failure_of
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.sockets

LIMIT = 16
MAX_VISITORS = 14


@pytest.fixture
def address() -> Iterator[str]:
    with serving(make_service(max_connections=LIMIT), max_connections=LIMIT) as address:
        yield address


@contextmanager
def connected(address: str, number: int) -> Iterator[list[RawClient]]:
    clients = [RawClient(address) for _ in range(number)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def check_made_room(client: RawClient) -> None:
    """It was told so, and its connection is closed."""
    frame = client.receive()
    assert frame is not None
    assert isinstance(failure_of(frame), Overloaded)
    assert client.closed_by_server()


def train(client: RawClient) -> None:
    client.hello(role="worker")
    assert client.join().rank == 0


def ask(clients: Sequence[RawClient]) -> None:
    for client in clients:
        client.hello()
        client.stats()


def test_the_oldest_stranger_makes_room(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.0)
    with connected(address, LIMIT) as strangers, RawClient(address) as worker:
        train(worker)
        check_made_room(strangers[0])
        ask(strangers[1:2])


def test_strangers_that_have_just_come_are_left_time_for_their_handshake(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", HANDSHAKE_S)
    with connected(address, LIMIT) as strangers, RawClient(address) as late:
        with pytest.raises(Overloaded, match="all the 16 connections"):
            late.hello()
        ask(strangers[:1])


def test_a_visitor_that_asked_nothing_makes_room_and_one_that_did_stays(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "VISITOR_S", 0.0)
    with connected(address, 2) as workers, connected(address, MAX_VISITORS) as visitors:
        for worker in workers:
            worker.hello(role="worker")
        ask(visitors[:2])
        for visitor in visitors[2:]:
            visitor.hello()
        with RawClient(address) as late:
            train(late)
        check_made_room(visitors[2])
        for visitor in (*visitors[:2], *visitors[3:]):
            visitor.stats()


def test_readers_leave_some_connections_to_workers(address: str) -> None:
    with connected(address, MAX_VISITORS) as readers, RawClient(address) as late, RawClient(address) as worker:
        ask(readers)
        with pytest.raises(Overloaded, match="all the 14 connections that it takes of clients that are no workers"):
            late.hello()
        train(worker)
        readers[0].stats()
