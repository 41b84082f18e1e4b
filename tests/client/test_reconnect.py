"""Connections that are cut, anywhere: nothing is lost, nothing counts twice, nobody notices but the clock."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.store import Store
from psstore.config import Transport
from psstore.errors import DeadlineExceeded, StoreUnreachable, TableFull
from psstore.net.address import TcpAddress, parse_address
from psstore.net.client import REFUSED_S
from psstore.types import PARTITION_BITS
from tests.client.proxy import Proxy
from tests.support.cluster import PATIENCE_S, SHM, TO_SHARDS, at_once, clusters
from tests.support.row_model import hash_of
from tests.support.server_process import StoreProcess, eventually

pytestmark = pytest.mark.sockets

F32 = np.float32
NUM_ELEMS = 300_000
"""1.2 MB: two slices, so that a cut falls in the middle of a payload more often than not."""


PREAMBLE_BYTES = 5
OP_AT = 5
"""Where a frame's header has its operation."""


def proxied(url: str, allowances: Iterator[int]) -> Proxy:
    address = parse_address(url)
    assert isinstance(address, TcpAddress)
    return Proxy((address.host, address.port), allowances)


def cuts(seed: int, count: int, transport: str) -> Iterator[int]:
    """Bytes until each cut: some within the handshake, most within a payload; if that lies in shared memory, where
    frames are told where."""
    chance = random.Random(seed)
    most = {"tcp": 6.5, "shm": 3.5}[transport]
    return iter([int(10 ** chance.uniform(1.5, most)) for _ in range(count)])


CUT = pytest.mark.parametrize(
    ("transport", "seed", "connections"),
    [
        *[("tcp", 0, 1), ("tcp", 1, 1), ("tcp", 2, 3)],
        *[pytest.param("shm", seed, 1, marks=pytest.mark.one_loop) for seed in (3, 4)],
    ],
)


@pytest.fixture
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """Lets clients take the store's addresses for those of proxies, which the test puts into the list."""
    import psstore.client.remote as remote

    proxies: list[Proxy] = []
    usable = remote._usable

    def detour(addresses: tuple[str, ...], transport: Transport) -> list[TcpAddress]:
        (address,) = (cast(TcpAddress, one) for one in usable(addresses, transport))
        for proxy in proxies:
            if proxy._target == (address.host, address.port):
                return [TcpAddress(*proxy.address)]
        return [address]

    monkeypatch.setattr(remote, "_usable", detour)
    yield proxies
    for proxy in proxies:
        proxy.close()


@contextmanager
def cut_connections(transport: Transport, seed: int, connections: int, behind_proxy: list[Proxy]) -> Iterator[Store]:
    """A client of two shards whose connections are cut, again and again."""
    with clusters("tcp") as start:
        cluster = start(shards=2)
        assert cluster.process is not None
        behind_proxy += [
            proxied(address, cuts(2 * seed + i, 12, transport)) for i, address in enumerate(cluster.process.addresses)
        ]
        with psstore.connect(cluster.url, role="client", transport=transport, connections=connections) as store:
            yield store
        assert sum(proxy.num_cut for proxy in behind_proxy) > 5


@CUT
def test_additions_count_once_whatever_is_cut(
    transport: Transport, seed: int, connections: int, behind_proxy: list[Proxy]
) -> None:
    with cut_connections(transport, seed, connections, behind_proxy) as store:
        store.create("sum", shape=(NUM_ELEMS,), rule="add")
        for step in range(20):
            store.push("sum", np.full(NUM_ELEMS, step, F32))
        assert_array_equal(store.pull("sum"), np.full(NUM_ELEMS, sum(range(20)), F32))


def losing_first_answer(op: str, lost: list[bytes]) -> Callable[[bytes], bytes]:
    """What becomes of the bytes of one read: the first answer of that operation is lost with its connection."""

    def lose(data: bytes) -> bytes:
        if not lost and len(data) >= _core.HEADER_BYTES and data[OP_AT] == _core.OPS[op]:
            lost.append(data)
            raise ConnectionResetError
        return data

    return lose


def test_a_refusal_whose_answer_is_lost_is_told_when_the_connection_is_back(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a later write of the same call was applied before the connection was lost."""
    monkeypatch.setattr("psstore.client.row_frames.FRAME_BYTES", 16)  # a frame for each partition
    partition_of = {one: hash_of(one) >> 64 - PARTITION_BITS for one in range(1000)}
    first = min(partition_of, key=partition_of.__getitem__)
    new = next(one for one in partition_of if one != first and partition_of[one] == partition_of[first])
    other = max(partition_of, key=partition_of.__getitem__)
    lost: list[bytes] = []
    with clusters("tcp") as start:
        cluster = start()
        behind_proxy.append(proxied(cluster.url, iter(())))
        with psstore.connect(cluster.url, role="client", transport="tcp") as store:
            store.create_table("t", dim=1, rule="sgd", max_rows=64)
            store.assign_rows("t", [first], np.ones((1, 1), F32))
            behind_proxy[0].change = losing_first_answer("ASSIGNED", lost)
            with pytest.raises(TableFull):
                store.assign_rows("t", [new, other], np.ones((2, 1), F32))
            assert len(lost) == 1
            assert_array_equal(store.keys("t"), np.array([first, other], np.uint64))
            store.assign_rows("t", [first], np.zeros((1, 1), F32))


@CUT
def test_small_calls_that_were_started_count_once_whatever_is_cut(
    transport: Transport, seed: int, connections: int, behind_proxy: list[Proxy]
) -> None:
    with cut_connections(transport, seed, connections, behind_proxy) as store:
        names = ["one", "other"]
        for name in names:
            store.create(name, shape=(256,), rule="add")
        for step in range(50):
            pushes = [store.start_push_many({name: np.full(256, step, F32) for name in names}) for _ in range(20)]
            pull = store.start_pull_many(names)
            for push in pushes:
                push.result(PATIENCE_S)
            for value in pull.result(PATIENCE_S):
                assert value[0] == 20 * sum(range(step + 1))


@CUT
def test_training_gives_the_same_bytes_whatever_is_cut(
    transport: Transport, seed: int, connections: int, behind_proxy: list[Proxy]
) -> None:
    rounds = 10
    with clusters("tcp") as start:
        cluster = start(shards=2, workers=2)
        assert cluster.process is not None
        behind_proxy += [
            proxied(address, cuts(2 * seed + i, 12, transport)) for i, address in enumerate(cluster.process.addresses)
        ]
        connect = partial(psstore.connect, cluster.url, transport=transport, connections=connections)
        stores = at_once(*[partial(connect, rank=rank) for rank in range(2)])

        def train(store: Store) -> object:
            store.create("w", shape=(NUM_ELEMS,), rule="sgd")
            for step in range(rounds):
                assert store.rank is not None
                store.push("w", np.full(NUM_ELEMS, (store.rank + 1) * 2.0**step, F32))
                assert not store.commit({"lr": 1.0}).late
                last = store.pull("w")
            return last

        results = at_once(*[lambda store=store: train(store) for store in stores])
        for result in results:
            assert_array_equal(result, np.full(NUM_ELEMS, -1.5 * (2**rounds - 1), F32))
        assert sum(proxy.num_cut for proxy in behind_proxy) > 5
        for store in stores:
            store.close()


def damage(seed: int, num_bytes: int, times: int) -> Callable[[bytes], bytes]:
    """Changes one bit in about so many bytes, `times` in all; but none of the first bytes of a connection, which say
    that the peer speaks the protocol."""
    chance = random.Random(seed)
    left = times

    def change(data: bytes) -> bytes:
        nonlocal left
        if left == 0 or len(data) <= PREAMBLE_BYTES or chance.random() * num_bytes > len(data):
            return data
        left -= 1
        changed = bytearray(data)
        changed[chance.randrange(PREAMBLE_BYTES, len(data))] ^= 1 << chance.randrange(8)
        return bytes(changed)

    return change


@pytest.mark.parametrize(("num_elems", "num_bytes"), [(8, 400), (NUM_ELEMS, 500_000)])
def test_training_gives_the_same_bytes_whatever_bits_change_on_the_way(
    num_elems: int, num_bytes: int, behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small frames are nearly all header, table and body, large ones payload."""
    monkeypatch.setattr("psstore.client.remote._is_local", lambda _: False)
    with StoreProcess("--shards", "2") as process:
        behind_proxy += [proxied(address, iter(())) for address in process.addresses]
        with psstore.connect(process.url, transport="tcp") as store:
            store.create("w", shape=(num_elems,), rule="sgd")
            connected = sum(proxy.num_accepted for proxy in behind_proxy)
            for seed, proxy in enumerate(behind_proxy):
                proxy.change = damage(seed, num_bytes, times=10)
            for step in range(20):
                store.push("w", np.full(num_elems, 2.0**step, F32))
                store.commit({"lr": 1.0})
                assert_array_equal(store.pull("w"), np.full(num_elems, 1 - 2.0 ** (step + 1), F32))
        # Whichever end has noticed it, and chance says which, gave the connection up.
        assert sum(proxy.num_accepted for proxy in behind_proxy) >= connected + 5


def test_commit_that_waits_counts_once_whatever_is_cut(behind_proxy: list[Proxy]) -> None:
    with clusters("tcp") as start:
        cluster = start(workers=2)
        other = cluster.connect(rank=1)
        behind_proxy.append(proxied(cluster.url, iter(())))
        store = cluster.connect(rank=0)
        store.create("w", np.zeros(8, F32), rule="sgd")
        thread = store._backend.thread
        for round in range(1, 11):
            for worker in (store, other):
                worker.push("w", np.ones(8, F32))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(store.commit, {"lr": 1.0})
                if round % 2:  # until the loop waits for the answer; else mostly before it, or before it is asked for
                    assert eventually(lambda: bool(thread._callers) and not thread.calls.busy)
                behind_proxy[0].cut()
                other.commit({"lr": 1.0})
                committed = waiting.result(PATIENCE_S)
            assert (committed.decision, committed.late, store.round) == (round, False, round + 1)
            assert_array_equal(store.pull("w"), np.full(8, -round, F32))


def test_a_connection_that_ends_after_a_small_call_is_made_again_without_another_call(
    behind_proxy: list[Proxy],
) -> None:
    with clusters("tcp") as start:
        cluster = start()
        assert cluster.process is not None
        behind_proxy.append(proxied(cluster.process.addresses[0], iter(())))
        with psstore.connect(cluster.url, role="client", transport="tcp") as store:
            store.create("sum", shape=(8,), rule="add")
            for _ in range(3):
                store.push("sum", np.ones(8, F32))
            connected = behind_proxy[0].num_accepted
            behind_proxy[0].cut()
            assert eventually(lambda: behind_proxy[0].num_accepted > connected)
            assert_array_equal(store.pull("sum"), np.full(8, 3, F32))


def test_connection_that_swallows_everything_is_replaced_while_others_are_waited_for(
    behind_proxy: list[Proxy],
) -> None:
    with clusters("tcp") as start:
        cluster = start(workers=2)
        other = cluster.connect(rank=1)
        behind_proxy.append(proxied(cluster.url, iter(())))
        with psstore.connect(cluster.url, rank=0, transport="tcp", timeout_s=10.0) as store:
            for worker in (store, other):
                worker.create("w", np.zeros(8, F32), rule="sgd")
                worker.push("w", np.ones(8, F32))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(store.commit, {"lr": 1.0})
                assert eventually(lambda: bool(store._backend.thread._callers))
                behind_proxy[0].swallow()
                assert not other.commit({"lr": 1.0}).late
                assert not waiting.result(PATIENCE_S).late
            assert_array_equal(store.pull("w"), np.full(8, -1, F32))


def swallow_and_wait(proxy: Proxy) -> None:
    """Until the worker has another link to the coordinator, and its heartbeats, too."""
    wanted = proxy.num_accepted + 2
    proxy.swallow()
    assert eventually(lambda: proxy.num_accepted >= wanted)


@pytest.mark.one_loop  # it is the client that notices
def test_connection_that_swallows_everything_is_replaced_while_a_worker_asks_for_nothing(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a shard may be led elsewhere by now, by one that would take the worker for lost. Again and again."""
    monkeypatch.setattr("psstore.client.remote.has_two_hosts", lambda addresses: True)
    monkeypatch.setattr("psstore.client.remote.MIN_LOOK_S", 0.05)
    with clusters("tcp") as start:
        cluster = start()
        behind_proxy.append(proxied(cluster.url, iter(())))
        with psstore.connect(cluster.url, transport="tcp") as store:
            swallow_and_wait(behind_proxy[0])
            swallow_and_wait(behind_proxy[0])
            assert store.stats()


def test_heartbeats_begin_as_soon_as_there_is_room_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process at its limit of files or threads, as by what loads its data, may have room in a moment."""
    make, made = _core.Heartbeat, list[_core.Heartbeat]()
    refusals = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    def crowded(*given: Any) -> _core.Heartbeat:
        if refusals:
            raise refusals.pop()
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr("psstore.client.remote.ROOM_AGAIN_S", 0.01)
    monkeypatch.setattr(_core, "Heartbeat", crowded)
    with clusters("tcp") as start, psstore.connect(start().url, transport="tcp"):
        assert eventually(lambda: any(one.alive for one in made))
    assert caplog.text.count("no heartbeats are sent for now") == 1
    assert not any(one.alive for one in made)


def test_a_name_is_looked_up_again_where_there_was_no_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    to_thread, refusals = asyncio.to_thread, [RuntimeError("can't start new thread")]

    async def crowded(*given: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await to_thread(*given)

    monkeypatch.setattr(asyncio, "to_thread", crowded)
    with clusters("tcp") as start:
        url = start().url.replace("127.0.0.1", "localhost")
        with psstore.connect(url, transport="tcp") as store:
            assert store.stats()
    assert not refusals


CALLS: dict[str, Callable[[Store], object]] = {
    "push": lambda store: store.push("w", np.ones(8, F32)),
    "a started push": lambda store: store.start_push_many({"w": np.ones(8, F32)}).result(PATIENCE_S),
    "an encoded push": lambda store: store.push("w", np.ones(8, F32), codec="bf16"),
    "add": lambda store: store.push("sum", np.ones(8, F32)),
    "a started add": lambda store: store.start_push_many({"sum": np.ones(8, F32)}).result(PATIENCE_S),
    "assign": lambda store: store.push("last", np.ones(8, F32)),
    "pull": lambda store: store.pull("sum"),
    "a started pull": lambda store: store.start_pull_many(["sum"]).result(PATIENCE_S),
    "stats": lambda store: store.stats(),
    "create": lambda store: store.create("new", np.ones(8, F32), rule="add"),
    "keys": lambda store: store.keys(),
}


@contextmanager
def half_open(transport: Transport, timeout_s: float, behind_proxy: list[Proxy]) -> Iterator[tuple[Store, Proxy]]:
    """A worker with one connection, over which nothing comes through any more, though nobody has closed it."""
    with clusters("tcp") as start:
        cluster = start()
        proxy = proxied(cluster.url, iter(()))
        behind_proxy.append(proxy)
        with psstore.connect(cluster.url, transport=transport, timeout_s=timeout_s) as store:
            store.create("w", np.zeros(8, F32), rule="sgd")
            store.create("sum", np.zeros(8, F32), rule="add")
            store.create("last", np.zeros(8, F32), rule="assign")
            for _ in range(3):  # so that calls go the short way
                for name in ("w", "sum", "last"):
                    store.push(name, np.ones(8, F32))
                    store.start_push_many({name: np.ones(8, F32)}).result(PATIENCE_S)
                store.pull("sum")
                store.start_pull_many(["sum"]).result(PATIENCE_S)
            proxy.swallow()
            yield store, proxy


@pytest.mark.parametrize("transport", ["tcp", SHM])
@pytest.mark.parametrize("call", CALLS)
def test_connection_that_swallows_everything_is_replaced_whatever_is_asked(
    call: str, transport: Transport, behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psstore.protocol.keepalive.MIN_LOOK_S", 0.05)
    monkeypatch.setattr("psstore.protocol.keepalive.LOOKS_PER_TIMEOUT", 400)
    with half_open(transport, timeout_s=20.0, behind_proxy=behind_proxy) as (store, proxy):
        CALLS[call](store)
        assert proxy.num_accepted > 2  # who asks for the shards, and the connection that was lost


@pytest.mark.one_loop  # it is the client that notices
@pytest.mark.parametrize("call", [call for call in CALLS if "pull" not in call])
def test_connection_that_swallows_everything_is_replaced_however_soon_an_answer_is_wanted(
    call: str, behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no time for a look before the deadline."""
    monkeypatch.setattr("psstore.protocol.keepalive.MIN_LOOK_S", 0.1)
    monkeypatch.setattr("psstore.protocol.keepalive.LOOKS_PER_TIMEOUT", 0.01)
    with half_open("tcp", timeout_s=2.0, behind_proxy=behind_proxy) as (store, proxy):
        with pytest.raises(DeadlineExceeded, match="last heard"):
            CALLS[call](store)
        CALLS[call](store)
        assert proxy.num_accepted > 2


def test_link_that_takes_long_for_a_push_keeps_its_connection(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psstore.protocol.keepalive.MIN_LOOK_S", 0.3)
    monkeypatch.setattr("psstore.protocol.keepalive.LOOKS_PER_TIMEOUT", 200)
    with clusters("tcp") as start:
        cluster = start()
        address = parse_address(cluster.url)
        assert isinstance(address, TcpAddress)
        behind_proxy.append(Proxy((address.host, address.port), iter(()), pause_s=0.02))
        with psstore.connect(cluster.url, role="client", transport="tcp", timeout_s=60.0) as store:
            store.create("sum", shape=(8 * NUM_ELEMS,), rule="add")
            connected = behind_proxy[0].num_accepted
            store.push("sum", np.ones(8 * NUM_ELEMS, F32))
            assert behind_proxy[0].num_accepted == connected


def test_a_version_may_take_longer_to_come_than_a_follower_waits_for_one(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for less each time, and asks again, would be sent its beginning for ever."""
    monkeypatch.setattr("psstore.protocol.client.GRACE_S", 0.1)
    with clusters("tcp") as start:
        cluster = start()
        cluster.connect(rank=0).publish({"x": np.ones(2 * NUM_ELEMS, F32)})
        address = parse_address(cluster.url)
        assert isinstance(address, TcpAddress)
        behind_proxy.append(Proxy((address.host, address.port), iter(()), pause_s=0.02))
        with psstore.follow(cluster.url, transport="tcp", wait_s=PATIENCE_S) as reader:
            assert_array_equal(reader.next(timeout_s=0.1).values["x"], np.ones(2 * NUM_ELEMS, F32))


def test_store_that_answers_keeps_its_connections_however_long_others_are_waited_for(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psstore.protocol.keepalive.MIN_LOOK_S", 0.5)
    with clusters("tcp") as start:
        cluster = start(workers=2)
        behind_proxy.append(proxied(cluster.url, iter(())))
        with psstore.connect(cluster.url, rank=0, transport="tcp", timeout_s=2.0, wait_s=4.0) as store:
            connected = behind_proxy[0].num_accepted
            with pytest.raises(DeadlineExceeded, match="rank 1"):
                store.barrier()
            assert behind_proxy[0].num_accepted == connected


@pytest.mark.one_loop  # it is the client that notices
@pytest.mark.parametrize("wait", ["commit", "pull"])
def test_store_that_stands_still_ends_the_wait_for_others(wait: str) -> None:
    with clusters("tcp") as start:
        cluster = start(workers=2)
        assert cluster.process is not None
        other = cluster.connect(rank=1)
        store = psstore.connect(cluster.url, rank=0, transport="tcp", timeout_s=3.0, connect_timeout_s=3.0)
        for worker in (store, other):
            worker.create("w", np.zeros(8, F32), rule="sgd")
        waits: dict[str, Callable[[], object]] = {
            "commit": lambda: store.commit({"lr": 1.0}),
            "pull": lambda: store.pull("w"),
        }
        with (
            cluster.process.stopped(),
            pytest.raises(StoreUnreachable, match=r"answers nothing.*; last heard") as caught,
        ):
            waits[wait]()
        assert "no connection to shard 0 at ps://" in caught.value.message
        store.close()


def test_store_that_stays_away_is_reported_with_its_address(behind_proxy: list[Proxy]) -> None:
    with clusters("tcp") as start:
        cluster = start()
        proxy = proxied(cluster.url, iter(()))
        behind_proxy.append(proxy)
        store = psstore.connect(cluster.url, role="client", timeout_s=2.0, connect_timeout_s=2.0)
        store.create("a", [1.0])
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(StoreUnreachable) as caught:
            store.push("a", [2.0])
        assert float(str(caught.value.details["tried_s"])) < PATIENCE_S
        assert str(TcpAddress(*proxy.address)) in caught.value.message
        store.close()


@pytest.mark.one_loop  # it is the client that notices
@pytest.mark.parametrize("long", [False, True])
def test_shard_that_is_refused_for_a_while_comes_back(long: bool, behind_proxy: list[Proxy]) -> None:
    """Who asks meanwhile notices nothing, or hears of it before long; no link is given up for good."""
    with clusters("tcp") as start:
        cluster = start()
        proxy = proxied(cluster.url, iter(()))
        behind_proxy.append(proxy)
        with psstore.connect(cluster.url, role="client", transport="tcp") as store:
            store.create("sum", shape=(8,), rule="add")
            proxy.end()
            if long:
                with pytest.raises(StoreUnreachable, match="Connection refused"):
                    store.push("sum", np.ones(8, F32))
                proxy.begin_again()
            else:
                threading.Timer(REFUSED_S / 8, proxy.begin_again).start()
            store.push("sum", np.ones(8, F32))
            assert_array_equal(store.pull("sum"), np.ones(8, F32))


@pytest.mark.one_loop
def test_a_host_that_refuses_is_told_from_an_address_of_it_that_nobody_here_reaches(
    behind_proxy: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name has an IPv6 address, too, and the worker's host has none."""
    look_up = socket.getaddrinfo

    def both(host: str, *port: Any, **options: Any) -> list[Any]:
        return [*look_up(host, *port, **options), *look_up("224.0.0.1", *port, **options)]

    with clusters("tcp") as start:
        cluster = start()
        proxy = proxied(cluster.url, iter(()))
        behind_proxy.append(proxy)
        monkeypatch.setattr(socket, "getaddrinfo", both)
        with psstore.connect(cluster.url, role="client", transport="tcp") as store:
            store.create("sum", shape=(8,), rule="add")
            proxy.end()
            began = time.monotonic()
            with pytest.raises(StoreUnreachable, match="Connection refused"):
                store.push("sum", np.ones(8, F32))
            assert time.monotonic() - began < 10.0  # after REFUSED_S, and not timeout_s


def test_shard_that_stood_still_for_too_long_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.net.client.HANDSHAKE_S", 1.0)
    with clusters("tcp") as start:
        cluster = start()
        assert cluster.process is not None
        with psstore.connect(
            cluster.url, role="client", transport="tcp", timeout_s=3.0, connect_timeout_s=3.0
        ) as store:
            store.create("sum", shape=(8,), rule="add")
            with cluster.process.stopped(), pytest.raises(StoreUnreachable, match="answers nothing"):
                store.pull("sum")
            store.push("sum", np.ones(8, F32))
            assert_array_equal(store.pull("sum"), np.ones(8, F32))


@pytest.mark.parametrize("transport", TO_SHARDS)
@pytest.mark.parametrize("killed", ["shard 1", "shard 0", "the supervisor"])
def test_workers_hear_at_once_of_a_store_that_was_killed(killed: str, transport: Transport) -> None:
    with clusters("unix" if transport == "unix" else "tcp") as start:
        cluster = start(shards=2, workers=2)
        process = cluster.process
        assert process is not None
        stores = [psstore.connect(cluster.url, rank=rank, transport=transport) for rank in range(2)]
        for store in stores:
            store.create("w", shape=(NUM_ELEMS,), rule="sgd")
            store.push("w", np.ones(NUM_ELEMS, F32))
        with ThreadPoolExecutor(2) as pool:
            committing = pool.submit(stores[0].commit, {"lr": 1.0})
            adding = pool.submit(lambda: [stores[1].push("w", np.ones(NUM_ELEMS, F32)) for _ in iter(int, 1)])
            pids = dict(zip(("shard 0", "shard 1"), process.shard_pids(), strict=True))
            pids["the supervisor"] = process.process.pid
            os.kill(pids[killed], signal.SIGKILL)
            began = time.monotonic()
            for waiting in (committing, adding):
                with pytest.raises(StoreUnreachable, match=r"shard [01] at"):
                    waiting.result(PATIENCE_S)
            assert time.monotonic() - began < 20.0  # 2 s on a machine that does nothing else
        for store in stores:
            store.close()


def test_a_store_that_was_shut_down_is_said_to_be() -> None:
    with StoreProcess() as process:
        store = psstore.connect(process.url, role="client", timeout_s=0.5, connect_timeout_s=30.0)
        assert process.stop() == 0
        with pytest.raises(StoreUnreachable, match="the store is shutting down"):
            store.keys()
        store.close()


def test_restarted_store_is_not_taken_for_the_old_one() -> None:
    with clusters("tcp") as start:
        first = start()
        address = parse_address(first.url)
        assert isinstance(address, TcpAddress)
        store = psstore.connect(first.url, role="client")
        store.create("a", [1.0])
        assert first.process is not None
        first.process.stop()
        with clusters("unix") as start_other:
            start_other("--port", str(address.port))
            with pytest.raises(StoreUnreachable, match="was restarted and has lost what it held; connect again"):
                store.pull("a")
        store.close()
