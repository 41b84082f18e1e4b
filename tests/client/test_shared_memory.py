"""Stores whose clients share memory with the shards: the same bytes as over sockets, whoever dies or has no room."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
import psstore.client.remote as remote
from psstore import _core
from psstore.client.store import Store
from psstore.errors import BadArgument, StoreUnreachable
from psstore.net import client_connection, fd_client
from psstore.net.client_connection import ClientConnection
from psstore.net.fd_server import MAPPED, MAX_VISITORS, TICKET_BYTES, MemoryServer
from psstore.protocol.connection import Connection
from psstore.protocol.session import Session
from psstore.protocol.sharing import SHARED_FROM_BYTES
from psstore.types import TensorSpec
from psstore.wire.messages import Share, Shared, decode_body
from tests.support.cluster import Cluster, clusters
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess, eventually
from tests.support.server_thread import make_service, serving

SHAPES = {"embedding": (700, 512), "weight": (300, 300), "bias": (33,)}
F32 = np.float32


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> list[_core.ClientMemory]:
    """All that this process borrows from now on."""
    found: list[_core.ClientMemory] = []

    def watch(offer: Shared) -> _core.ClientMemory | None:
        memory = fd_client.borrow(offer)
        if memory is not None:
            found.append(memory)
        return memory

    monkeypatch.setattr(remote, "borrow", watch)
    return found


def train(url: str, transport: Any, prefix: str, rounds: int = 4) -> list[Any]:
    """The parameters after so many rounds of Adam."""
    chance = np.random.default_rng(0)
    names = [f"{prefix}.{name}" for name in SHAPES]
    with psstore.connect(url, rank=0, transport=transport) as store:
        specs = [
            TensorSpec(name=name, shape=shape, rule="adam") for name, shape in zip(names, SHAPES.values(), strict=True)
        ]
        store.create_many(specs)
        for _ in range(rounds):
            gradients = [chance.standard_normal(shape, dtype=F32) for shape in SHAPES.values()]
            store.push_many(dict(zip(names, gradients, strict=True)))
            store.commit({"lr": 0.1})
            last = store.pull_many(names)
        return last


@pytest.fixture(scope="module")
def shared_cluster(loop_name: str) -> Iterator[Cluster]:
    with clusters("shm") as start:
        yield start(shards=2)


@pytest.mark.sockets
def test_training_gives_the_bytes_that_it_gives_over_sockets(
    shared_cluster: Cluster, borrowed: list[_core.ClientMemory]
) -> None:
    shared = train(shared_cluster.url, "shm", "shared")
    assert len(borrowed) == 2
    assert all(memory.num_reads > 0 and memory.num_writes > 0 for memory in borrowed)
    for ours, theirs in zip(shared, train(shared_cluster.url, "tcp", "sent"), strict=True):
        assert_array_equal(ours, theirs)
    assert len(borrowed) == 2


@pytest.mark.sockets
def test_plain_tensors_and_half_precision_go_through_shared_memory(
    shared_cluster: Cluster, borrowed: list[_core.ClientMemory]
) -> None:
    value = np.linspace(-1, 1, 600_000, dtype=F32)
    with shared_cluster.connect(role="client") as store:
        store.create("plain", value)
        store.push("plain", value, op="add")
        assert_array_equal(store.pull("plain"), 2 * value)
        assert_array_equal(store.pull("plain", dtype="float16"), (2 * value).astype(np.float16))
        store.drop("plain")
    assert [memory.num_writes for memory in borrowed] == [2, 2]
    assert [memory.num_reads for memory in borrowed] == [2, 2]


# ---- when a shard hears what was read ----


def out_of_place(store: Store) -> int:
    """Changes for which a value was copied, since somebody still read it. Asks after all that the store has said."""
    return sum(int(shard["applied_out_of_place"]) for shard in store.stats())


@pytest.mark.sockets
def test_what_a_worker_has_read_is_told_along_with_its_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "RELEASE_S", 600.0)
    monkeypatch.setattr(ClientConnection, "_release", None)  # nor is it told by itself
    with clusters("shm") as start:
        cluster = start(shards=2)
        train(cluster.url, "shm", "shared", rounds=6)
        with cluster.connect(role="client") as store:
            assert out_of_place(store) == 0


@contextlib.contextmanager
def noted(owner: type, *methods: str) -> Iterator[list[str]]:
    """Which of these are called."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for name in methods:
            method = getattr(owner, name)

            def note(self: Any, *given: Any, name: str = name, method: Any = method, **named: Any) -> Any:
                called.append(name)
                return method(self, *given, **named)

            patched.setattr(owner, name, note)
        yield called


@pytest.mark.sockets
def test_what_goes_through_shared_memory_needs_no_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push of large tensors and of small ones, behind the word that values were read; and the pull after it. Where
    they are answered soon: on a busy machine some are."""
    monkeypatch.setattr(client_connection, "RELEASE_S", 600.0)  # a busy machine comes to it
    with clusters("shm") as start:
        store = start().connect(rank=0)
        gradients = {"large": np.ones((2, 1 << 20), F32), "small": np.ones(100, F32)}
        store.create_many([TensorSpec(name=name, shape=value.shape, rule="sgd") for name, value in gradients.items()])
        found = []
        for round in range(1, 20):
            with noted(ClientConnection, "flush", "_on_readable") as pushing:
                store.push_many(gradients)
            store.commit({"lr": 1.0})
            with noted(Session, "request") as pulling:
                values = store.pull_many(list(gradients))
            for value in values:
                assert_array_equal(value, np.full(value.shape, -round, F32))
            found.append([len(pushing), len(pulling)])
        assert np.min(found, axis=0).tolist() == [0, 0], found


@pytest.mark.sockets
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whoever_keeps_nobody_waiting_tells_at_once_what_was_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "RELEASE_S", 600.0)
    with clusters("shm") as start:
        cluster = start(workers=2, mode=mode)
        reader = cluster.connect(role="client" if mode == "sync" else "worker")
        other = cluster.connect(role="client")
        other.create("sum", np.zeros(400_000, F32), rule="add")
        for _ in range(3):
            reader.pull("sum")
            reader.stats()
            other.push("sum", np.ones(400_000, F32))
        assert out_of_place(other) == 0


@pytest.mark.sockets
def test_worker_that_is_idle_tells_what_it_has_read_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "RELEASE_S", 0.05)
    with clusters("shm") as start:
        cluster = start()
        worker, other = cluster.connect(rank=0), cluster.connect(role="client")
        (session,) = worker._operations.client.sessions
        other.create("sum", np.zeros(400_000, F32), rule="add")
        for _ in range(3):
            worker.pull("sum")
            assert eventually(lambda: not session.owes_releases)
            worker.stats()
            other.push("sum", np.ones(400_000, F32))
        assert out_of_place(other) == 0


# ---- deaths ----

WORKER = """
import os, signal, sys, numpy as np, psstore
store = psstore.connect(sys.argv[1], rank=0, transport="shm")
store.create("doomed", np.zeros(400_000, np.float32), rule="sgd")
store.push("doomed", np.ones(400_000, np.float32))
print("pushed", flush=True)
signal.pause()
"""


def num_push_arenas(shards: list[psutil.Process]) -> int:
    """Those that the shards have mapped."""
    maps = [Path(f"/proc/{shard.pid}/maps").read_text() for shard in shards]
    return sum("psstore-pushes" in line for of_shard in maps for line in of_shard.splitlines())


@pytest.mark.sockets
def test_client_that_is_killed_leaves_nothing_behind() -> None:
    with clusters("shm") as start:
        cluster = start(shards=2)
        assert cluster.process is not None
        shards = [shard for shard in cluster.process.shards() if "psstore.server.shard" in shard.cmdline()]
        worker = subprocess.Popen([sys.executable, "-c", WORKER, cluster.url], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "pushed\n"
        assert num_push_arenas(shards) == 2
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        with cluster.connect(role="client") as store:
            store.drop("doomed")  # what was staged for it was in the arena still
            assert eventually(lambda: num_push_arenas(shards) == 2)  # our own


@pytest.mark.sockets
def test_store_that_is_killed_is_reported_as_over_sockets() -> None:
    with clusters("shm") as start:
        cluster = start()
        assert cluster.process is not None
        url = cluster.url
        with psstore.connect(url, role="client", transport="shm", timeout_s=3.0, connect_timeout_s=3.0) as store:
            store.create("plain", np.zeros(100_000, F32))
            assert store.shares_memory
            for shard in cluster.process.shards():
                shard.kill()
            with pytest.raises(StoreUnreachable):
                store.push("plain", np.ones(100_000, F32))


# ---- what is offered, and to whom ----


@pytest.fixture
def lender() -> MemoryServer:
    return MemoryServer(_core.ValueArena(), push_bytes=4 << 20)


@pytest.fixture
def store_url(lender: MemoryServer) -> Iterator[str]:
    service = make_service(arena=lender.values, lender=lender)
    with serving(service, lender=lender) as url:
        service.welcoming.identity = replace(service.identity, addresses=((url,),))
        yield url


def visit(offer: Shared, ticket: bytes) -> int:
    """How many files somebody with that ticket gets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(b"\0" + offer.address.encode())
        with contextlib.suppress(BrokenPipeError):
            sock.send(ticket)
        try:
            _, files, _, _ = socket.recv_fds(sock, 1, 3)
        except ConnectionResetError:  # it was hung up on with the ticket unread
            return 0
        for file in files:
            os.close(file)
        return len(files)


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_too_small_to_be_worth_it_goes_over_the_stream(
    missing: int, store_url: str, borrowed: list[_core.ClientMemory]
) -> None:
    with psstore.connect(store_url, rank=0, transport="shm") as store:
        store.create("plain", np.zeros(SHARED_FROM_BYTES // 4 - missing, F32))
        before = borrowed[0].num_writes
        for i in range(1, 4):  # after the first time by the short way, if at all
            store.push("plain", np.full(SHARED_FROM_BYTES // 4 - missing, i, F32))
            assert_array_equal(store.pull("plain"), np.full(SHARED_FROM_BYTES // 4 - missing, i, F32))
    assert (borrowed[0].num_writes - before, borrowed[0].num_reads) == ((0, 0) if missing else (3, 3))


def test_what_does_not_fit_goes_over_the_stream(store_url: str, borrowed: list[_core.ClientMemory]) -> None:
    values = {f"t{i}": np.full(200_000, i, F32) for i in range(12)}  # 9.6 MB in all, in an arena of 4 MiB
    with psstore.connect(store_url, rank=0, transport="shm") as store:
        for name in values:
            store.create(name, shape=(200_000,), rule="sgd")
        for round_ in (1, 2):
            for name, value in values.items():
                store.push(name, value)
            store.commit({"lr": 1.0})
            for name, value in values.items():
                assert_array_equal(store.pull(name), -round_ * value)
    assert borrowed[0].num_writes == 8  # four at a time have room, in each round


def stranger() -> Connection:
    return Connection(id=1, opened_at=0.0, protocol=make_service().data.connect(1))


def test_ticket_is_good_for_one_visit(store_url: str, lender: MemoryServer) -> None:
    offer = lender.offer(stranger(), Share())
    assert visit(offer, offer.ticket) == 3
    assert visit(offer, offer.ticket) == 0


def test_who_has_no_ticket_gets_nothing(store_url: str, lender: MemoryServer) -> None:
    connection = stranger()
    offer = lender.offer(connection, Share())
    assert visit(offer, bytes(TICKET_BYTES)) == 0
    lender.withdraw(connection)
    assert visit(offer, offer.ticket) == 0


def test_a_client_that_is_gone_by_the_time_it_is_heard_shares_nothing(store_url: str, lender: MemoryServer) -> None:
    connection, shared = stranger(), list[Connection]()
    lender.on_shared = lambda client, _: shared.append(client)
    offer = lender.offer(connection, Share())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(b"\0" + offer.address.encode())
        sock.send(offer.ticket)
        _, files, _, _ = socket.recv_fds(sock, 1, 3)
        connection.end()
        sock.send(MAPPED)
        assert sock.recv(1) == b""
    for file in files:
        os.close(file)
    assert not shared


def test_silent_visitor_keeps_nobody_waiting(store_url: str, lender: MemoryServer) -> None:
    offer = lender.offer(stranger(), Share())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(b"\0" + offer.address.encode())
        assert visit(offer, offer.ticket) == 3


def test_silent_visitors_make_room_for_who_has_a_ticket(store_url: str, lender: MemoryServer) -> None:
    offer = lender.offer(stranger(), Share())
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_VISITORS):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(b"\0" + offer.address.encode())
        assert visit(offer, offer.ticket) == 3


@pytest.mark.parametrize("for_all_users", [False, True])
def test_other_users_of_the_machine_get_nothing_unless_the_token_is_theirs_too(
    store_url: str, lender: MemoryServer, for_all_users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psstore.net.fd_server.peer_user", lambda _: 12345)
    lender._for_all_users = for_all_users
    offer = lender.offer(stranger(), Share())
    assert visit(offer, offer.ticket) == (3 if for_all_users else 0)


@pytest.mark.parametrize("offer", [Shared(), Shared(address="psstore-of-another-machine", ticket=b"x")])
def test_shard_that_is_elsewhere_shares_nothing_and_nobody_is_warned(
    offer: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    assert fd_client.borrow(offer) is None
    assert not caplog.records


def test_memory_that_cannot_be_mapped_is_told_once_and_sockets_are_used(
    store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: int) -> None:
        raise OSError("no more addresses")

    monkeypatch.setattr(_core, "ClientMemory", fail)
    with caplog.at_level(logging.WARNING, "psstore.client"), psstore.connect(store_url, rank=0) as store:
        store.create("plain", np.zeros(100_000, F32))
        assert_array_equal(store.pull("plain"), np.zeros(100_000, F32))
        assert store._operations.client.sessions[0].core.memory is None
    (record,) = (record for record in caplog.records if record.name == "psstore.client")
    assert "no more addresses; its socket is used instead" in record.getMessage()


# ---- what a caller asks for ----


@pytest.mark.parametrize("transport", ["tcp", "auto", "shm"])
def test_transport_says_whether_memory_is_shared(
    transport: Any, store_url: str, borrowed: list[_core.ClientMemory]
) -> None:
    with psstore.connect(store_url, rank=0, transport=transport):
        assert bool(borrowed) == (transport != "tcp")


def test_transport_may_be_named_by_the_environment(
    store_url: str, borrowed: list[_core.ClientMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSSTORE_TRANSPORT", "tcp")
    with psstore.connect(store_url, rank=0):
        assert not borrowed
    monkeypatch.setenv("PSSTORE_TRANSPORT", "pigeon")
    with pytest.raises(BadArgument, match="PSSTORE_TRANSPORT is 'pigeon'; expected auto, tcp, unix, shm"):
        psstore.connect(store_url)


def test_shared_memory_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    service = make_service()
    with serving(service) as url:
        service.welcoming.identity = replace(service.identity, addresses=((url,),))
        with pytest.raises(BadArgument, match="shares no memory with this process"):
            psstore.connect(url, transport="shm")


def test_transport_that_the_store_is_not_reached_by_is_an_error(store_url: str) -> None:
    with pytest.raises(BadArgument, match="not from this host by transport 'unix'"):
        psstore.connect(store_url, transport="unix")
    with pytest.raises(BadArgument, match="transport is 'pigeon'"):
        psstore.connect(store_url, transport="pigeon")  # type: ignore[arg-type]


def test_a_connection_is_given_memory_to_push_through_once() -> None:
    """Each has open files of the shard, which others need."""
    with StoreProcess() as process, RawClient(process.url) as raw:
        raw.hello()
        offers = []
        for _ in range(2):
            offers.append(decode_body(Shared, raw.ask("SHARE", "SHARED").body))
            found = fd_client.borrow(offers[-1])
        assert offers[0].address
        assert (offers[1], found) == (Shared(), None)
