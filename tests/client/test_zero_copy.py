"""Values that are borrowed: the same as pulled ones, where they lie, until they are given back; whatever ends first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client import zero_copy
from psstore.client.layout import OneVersion
from psstore.client.store import Store
from psstore.errors import StoreClosed, StoreUnreachable, UnknownTensor
from psstore.net.fd_server import MemoryServer
from psstore.protocol.holds import Hold, Holds
from psstore.protocol.service import ShardService
from psstore.protocol.sharing import MAX_LEASED_BYTES, Lease
from psstore.types import TensorSpec
from tests.client.proxy import Proxy
from tests.support.between_frames import between_frames
from tests.support.cluster import MAY_FORK, PATIENCE_S, TRANSPORTS, Cluster, clusters
from tests.support.server_process import eventually
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.one_loop

F32 = np.float32

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (700, 512),
    "scale": (),
    "weight": (300, 300),
    "none": (0, 4),
    "bias": (33,),
}
"""Many slices, none, and one that is not lent; the last slices of the large ones are no whole pages."""

Values = dict[str, "np.typing.NDArray[Any]"]


def make(store: Store, rule: str = "sgd") -> Values:
    """The tensors' first values."""
    chance = np.random.default_rng(0)
    values = {name: chance.standard_normal(shape).astype(F32) for name, shape in SHAPES.items()}
    specs = [TensorSpec(name=name, shape=shape, rule=rule, zeros=False) for name, shape in SHAPES.items()]
    store.create_many(specs, list(values.values()))
    return values


def step(store: Store) -> None:
    """Everything is one less."""
    store.push_many({name: np.ones(shape, F32) for name, shape in SHAPES.items()})
    store.commit({"lr": 1.0})
    store.pull_many(list(SHAPES))  # by then the step is taken everywhere


def assert_same(found: Values, expected: Values) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_array_equal(found[name], value, strict=True)


def less(values: Values, steps: int) -> Values:
    for _ in range(steps):
        values = {name: value - np.ones_like(value) for name, value in values.items()}
    return values


def num_mappings(store: Store) -> int:
    """Of the views that are at hand."""
    shelves = store._operations.borrowing._idle.values()
    return sum(view.values.num_mappings for shelf in shelves for view in shelf)


@pytest.fixture(scope="module", params=[*TRANSPORTS, pytest.param("shm", marks=pytest.mark.sockets)])
def cluster(loop_name: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clusters(request.param) as start:
        yield start(shards=2)


def test_borrowed_values_are_those_that_are_pulled(cluster: Cluster, store: Store) -> None:
    values = make(store)
    with store.borrow(list(SHAPES)) as borrowed:
        assert_same(borrowed, values)
        assert not any(value.flags.writeable for value in borrowed.values())
    assert (num_mappings(store) > 0) == (cluster.transport == "shm")
    step(store)
    with store.borrow(list(reversed(SHAPES))) as borrowed:
        assert list(borrowed) == list(reversed(SHAPES))
        assert_array_equal(borrowed["embedding"], values["embedding"] - F32(1))
    assert store.version_of("embedding") == 1


@pytest.mark.parametrize("names", [["none"], ["scale", "none"], ["embedding", "none"], ["none", "bias"]])
def test_tensors_without_elements_are_borrowed_wherever_they_come(store: Store, names: list[str]) -> None:
    values = make(store)
    with store.borrow(names) as borrowed:
        assert_same(borrowed, {name: values[name] for name in names})


def test_borrowed_values_stay_what_they_are_while_steps_are_taken(store: Store) -> None:
    values = make(store)
    for taken in range(0, 6, 2):
        with store.borrow(list(SHAPES)) as before:
            step(store)
            with store.borrow(list(SHAPES)) as between:
                step(store)
                assert_same(before, less(values, taken))
                assert_same(between, less(values, taken + 1))


def test_loan_of_which_a_part_comes_after_a_step_is_begun_again(cluster: Cluster, store: Store) -> None:
    """Unless it may be of several versions."""
    values = make(store)
    reader = cluster.connect(role="client")
    with between_frames(reader, lambda: step(store)):
        with reader.borrow(["embedding"], consistent=False) as borrowed:
            assert set(np.unique((values["embedding"] - borrowed["embedding"]).round())) == {0, 1}
        with reader.borrow(list(SHAPES)) as borrowed:
            assert_same(borrowed, less(values, 2))
    assert eventually(lambda: all(counters["holds"] == 0 for counters in reader.stats()))


def test_borrowing_fails_as_pulling_does_and_leaves_nothing_borrowed(store: Store) -> None:
    with pytest.raises(UnknownTensor), store.borrow(["nobody's"]):
        raise AssertionError("there is nothing to borrow")
    with store.borrow([]) as nothing:
        assert nothing == {}


def test_awaited_store_borrows_as_well(cluster: Cluster, store: Store) -> None:
    values = make(store)

    async def read() -> None:
        async with await cluster.connect_async(role="client") as awaited:
            for consistent in (None, True, False):
                async with awaited.borrow(list(SHAPES), consistent=consistent) as borrowed:
                    assert_same(borrowed, values)
            with pytest.raises(ZeroDivisionError):
                async with awaited.borrow(list(SHAPES)):
                    _ = 1 // 0

    asyncio.run(read())


def test_threads_borrow_while_another_takes_steps(cluster: Cluster, store: Store) -> None:
    values = make(store)
    names = list(SHAPES)
    done = threading.Event()

    def read(_: int) -> int:
        seen = 0
        while not done.is_set():
            with store.borrow(names) as borrowed:
                steps = float(values["scale"] - borrowed["scale"])
                first = {name: value.copy() for name, value in borrowed.items()}
                assert 0 <= round(steps) <= 20
                assert_same(borrowed, first)
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, i) for i in range(2)]
        try:
            for _ in range(20):
                step(store)
        finally:
            done.set()
        assert all(reader.result(PATIENCE_S) > 0 for reader in readers)


# ---- in the memory of one shard, which tells what it has lent ----


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[tuple[ShardService, str]]:
    """Its parameter: bytes that a connection may lease."""
    lender = MemoryServer(_core.ValueArena(), push_bytes=16 << 20)
    service = make_service(
        arena=lender.values, lender=lender, max_leased_bytes=getattr(request, "param", MAX_LEASED_BYTES)
    )
    with serving(service, lender=lender) as url:
        service.welcoming.identity = replace(service.identity, addresses=((url,),))
        yield service, url


@pytest.fixture
def near(service: tuple[ShardService, str]) -> Iterator[Store]:
    with psstore.connect(service[1], rank=0, transport="shm", wait_s=PATIENCE_S) as store:
        yield store


def num_lent(service: ShardService) -> int:
    return service.data.num_leases


@pytest.fixture
def shard(service: tuple[ShardService, str]) -> ShardService:
    return service[0]


def test_values_that_stay_where_they_are_are_not_mapped_again(near: Store, shard: ShardService) -> None:
    values = make(near)
    with near.borrow(list(SHAPES)) as first:
        pass
    for taken in range(1, 4):
        step(near)  # in place, as nobody reads
        with near.borrow(list(SHAPES)) as borrowed:
            assert borrowed["embedding"] is first["embedding"]
            assert_same(borrowed, less(values, taken))
    assert eventually(lambda: num_lent(shard) == 0)


def test_who_always_borrows_finds_values_in_one_of_two_places(near: Store) -> None:
    values = make(near)
    seen = []
    for taken in range(8):
        with near.borrow(list(SHAPES)) as borrowed:
            assert_same(borrowed, less(values, taken))
            seen.append(borrowed["embedding"].ctypes.data)
            step(near)
    assert seen[2:] == 3 * seen[2:4]
    assert seen[2] != seen[3]


def test_what_is_borrowed_is_given_back_however_the_block_ends(near: Store, shard: ShardService) -> None:
    make(near)
    with near.borrow(list(SHAPES)):
        assert num_lent(shard) > 0
    assert eventually(lambda: num_lent(shard) == 0)
    with pytest.raises(ZeroDivisionError), near.borrow(list(SHAPES)):
        raise ZeroDivisionError
    assert eventually(lambda: num_lent(shard) == 0)
    abandoned = near.borrow(list(SHAPES)).__enter__()
    assert abandoned["bias"].shape == (33,)
    assert eventually(lambda: num_lent(shard) == 0)


def test_interrupted_borrowing_leaves_nothing_borrowed(near: Store, shard: ShardService) -> None:
    make(near)
    near.create_many([TensorSpec(name="late", shape=(200_000,), zeros=False)], [None], offer=False)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), near.borrow([*SHAPES, "late"]):
        raise AssertionError("there is no value yet")
    timer.join()
    near.push("late", np.ones(200_000, F32))
    assert eventually(lambda: num_lent(shard) == 0)
    with near.borrow(["late"]) as borrowed:
        assert_array_equal(borrowed["late"], np.ones(200_000, F32))


def test_store_that_is_closed_in_the_block_ends_it_with_an_error(service: tuple[ShardService, str]) -> None:
    store = psstore.connect(service[1], role="client", transport="shm")
    values = make(store)

    def read() -> None:
        with store.borrow(list(SHAPES)) as borrowed:
            store.close()
            assert_same(borrowed, values)  # nobody takes steps

    with pytest.raises(StoreClosed):
        read()


def test_version_that_shards_hold_is_lent_where_it_lies_though_all_has_changed(
    near: Store, service: tuple[ShardService, str]
) -> None:
    """The first answers are taken for those of several versions, and a step is taken before the next ones."""
    values, (shard, url) = make(near), service
    hold = Holds.hold

    async def hold_before_a_step(self: Holds, **options: Any) -> Hold:
        held = await hold(self, **options)
        await asyncio.to_thread(step, near)
        await asyncio.to_thread(near.keys)  # says, too, that it has read what the step's pull was lent
        return held

    with psstore.connect(url, role="client", transport="shm", wait_s=PATIENCE_S) as reader:
        with (
            mock.patch.object(OneVersion, "__bool__", return_value=False),
            mock.patch.object(Holds, "hold", hold_before_a_step),
            reader.borrow(list(SHAPES)) as borrowed,
        ):
            assert eventually(lambda: shard.data.num_holds == 0)
            assert num_lent(shard) == 1
            assert_same(borrowed, values)
            step(near)
            assert_same(borrowed, values)
        assert num_mappings(reader) > 0
        with reader.borrow(list(SHAPES), consistent=False) as borrowed:
            assert_same(borrowed, less(values, 2))


# ---- connections that are lost ----


@pytest.mark.parametrize("service", [4 * 700 * 512 + 1], indirect=True)
def test_more_bytes_than_may_be_leased_are_received(near: Store, shard: ShardService) -> None:
    values = make(near)
    names = ["embedding"]
    with near.borrow(names) as first, near.borrow(names) as second, near.borrow(names) as third:
        assert num_lent(shard) == 2
        step(near)
        for borrowed in (first, second, third):
            assert_array_equal(borrowed["embedding"], values["embedding"])
    assert eventually(lambda: num_lent(shard) == 0)
    with near.borrow(names) as borrowed:
        assert_array_equal(borrowed["embedding"], values["embedding"] - F32(1))


@pytest.fixture
def cut_off(service: tuple[ShardService, str]) -> Iterator[tuple[Store, Proxy]]:
    """A client of the shard, and what cuts it off."""
    shard, url = service
    host, port = url.removeprefix("ps://").split(":")
    proxy = Proxy((host, int(port)), iter(()))
    through = f"ps://{proxy.address[0]}:{proxy.address[1]}"
    shard.welcoming.identity = replace(shard.identity, addresses=((through,),))
    with psstore.connect(through, rank=0, transport="shm", wait_s=PATIENCE_S) as store:
        yield store, proxy
    proxy.close()


def cut(store: Store, proxy: Proxy) -> None:
    """Returns when it has noticed."""
    session = store._operations.client.sessions[0]
    before = session.connection
    proxy.cut()
    assert eventually(lambda: session.connection > before)


def test_connection_that_is_lost_while_values_are_borrowed_is_an_error(cut_off: tuple[Store, Proxy]) -> None:
    store, proxy = cut_off
    values = make(store)

    def read(divisor: int) -> None:
        with store.borrow(list(SHAPES)):
            cut(store, proxy)
            _ = 1 // divisor

    with pytest.raises(StoreUnreachable, match="was lost while its values were borrowed"):
        read(1)
    with pytest.raises(ZeroDivisionError):  # the block's own error says more
        read(0)
    with store.borrow(list(SHAPES)) as borrowed:
        assert_same(borrowed, values)


def test_what_is_borrowed_for_too_long_is_taken_back_and_its_borrower_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lender = MemoryServer(_core.ValueArena(), push_bytes=16 << 20)
    shard = make_service(arena=lender.values, lender=lender)
    with serving(shard, lender=lender, unread_s=1.0, lease_s=1.0) as url:
        shard.welcoming.identity = replace(shard.identity, addresses=((url,),))
        with psstore.connect(url, rank=0, transport="shm", wait_s=PATIENCE_S) as store:
            values = make(store)

            def read_for_long() -> None:
                with store.borrow(list(SHAPES)):
                    assert eventually(lambda: num_lent(shard) == 0)
                    assert "has not given back what it was lent" in caplog.text

            with pytest.raises(StoreUnreachable, match="was lost while its values were borrowed"):
                read_for_long()
            with store.borrow(list(SHAPES)) as borrowed:
                assert_same(borrowed, values)


def test_values_that_were_taken_back_are_told_of_before_their_borrower_has_heard_of_the_end() -> None:
    """The shard has closed the connection, and the client's loop has had no turn since."""
    lender = MemoryServer(_core.ValueArena(), push_bytes=16 << 20)
    shard = make_service(arena=lender.values, lender=lender)
    goes_on = threading.Event()

    async def stand_still() -> None:
        goes_on.wait()  # all of the loop does

    def read(store: Store) -> None:
        with store.borrow(list(SHAPES)):
            store._backend.thread.submit(stand_still())
            assert eventually(lambda: num_lent(shard) == 0)
            threading.Timer(0.2, goes_on.set).start()

    with serving(shard, lender=lender, unread_s=1.0, lease_s=1.0) as url:
        shard.welcoming.identity = replace(shard.identity, addresses=((url,),))
        with psstore.connect(url, rank=0, transport="shm", wait_s=PATIENCE_S) as store:
            make(store)
            with pytest.raises(StoreUnreachable, match="was lost while its values were borrowed"):
                read(store)


def test_loan_is_begun_again_if_a_connection_is_lost_before_all_has_come(
    near: Store, shard: ShardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = make(near)
    lost, found = zero_copy.Borrowing._lost, ["psstore-somewhere"]

    def lost_at_first(self: zero_copy.Borrowing, loan: zero_copy.BorrowedPull) -> str | None:
        return found.pop() if found else lost(self, loan)

    monkeypatch.setattr(zero_copy.Borrowing, "_lost", lost_at_first)
    with near.borrow(list(SHAPES)) as borrowed:
        assert not found
        assert eventually(lambda: num_lent(shard) == 1)
        step(near)
        assert_same(borrowed, values)


def test_answer_that_comes_when_the_loan_is_over_is_not_wanted(near: Store) -> None:
    make(near)
    layout = next(iter(near._operations.context.layouts._known.values()))
    loan = zero_copy.BorrowedPull(layout, [])
    loan.end()
    place = zero_copy.Place(loan, 0, 1)
    memory = near._operations.client.sessions[0].core.memory
    assert memory is not None
    assert not place.borrow(memory, layout.frames[0].table, Lease(0, 1, 1))


@pytest.mark.sockets
def test_store_that_dies_leaves_what_is_borrowed_readable() -> None:
    with clusters("shm") as start:
        cluster = start(shards=2)
        assert cluster.process is not None
        with psstore.connect(cluster.url, role="client", transport="shm", connect_timeout_s=3.0) as store:
            values = make(store)
            session = store._operations.client.sessions[0]
            shards = cluster.process.shards()

            def read() -> None:
                with store.borrow(list(SHAPES)) as borrowed:
                    before = session.connection
                    for shard in shards:
                        shard.kill()
                    assert eventually(lambda: session.connection > before)
                    assert_same(borrowed, values)

            with pytest.raises(StoreUnreachable):
                read()


CHILD = """
import os, sys, numpy, psstore
store = psstore.connect(sys.argv[1], role="client", transport="shm")
store.create("large", numpy.ones(300_000, numpy.float32))
child = None
try:
    with store.borrow(["large"]) as borrowed:
        child = os.fork()
        assert borrowed["large"].sum() == 300_000
except psstore.errors.StoreClosed as error:
    assert child == 0, error
    print("child:", error, flush=True)
    os._exit(0)
assert child != 0
print("status:", os.waitpid(child, 0)[1], flush=True)
with store.borrow(["large"]) as borrowed:
    print("parent:", borrowed["large"].sum(), flush=True)
"""


@pytest.mark.sockets
def test_forked_child_can_read_what_its_parent_has_borrowed() -> None:
    with clusters("shm") as start:
        command = [sys.executable, "-W", MAY_FORK, "-c", CHILD, start().url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stderr == ""
    assert "child: this store was connected before the process forked" in ended.stdout
    assert "status: 0" in ended.stdout
    assert "parent: 300000.0" in ended.stdout
