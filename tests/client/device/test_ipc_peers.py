"""A worker and shards on one device pass gradients and values from memory to memory, and not through the host.

The device is a fake one, whose memory is a file that both processes have mapped. Each does its own work as late, and in
as bad an order, as its fences allow, and knows nothing of the other's: a wait that is missing shows as wrong bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.device import arrays as device_arrays
from psstore.client.device import peers, pinned_transfer
from psstore.client.device.pinned_transfer import PinnedTransfer
from psstore.client.store import Store
from psstore.errors import AvailabilityError, DeviceFailed
from psstore.protocol.sharing import Lease
from tests.client.device.fake_arrays import Array, Interface, Stream, stream_on
from tests.support.server_process import StoreProcess, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32
NUM_ROUNDS = 2
SIZES = {"large": 1_200_000, "middle": 70_000, "small": 7}
"""Elements: frames that are full, one that is not, and one that is not worth sharing."""

LARGE = 4_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[StoreProcess]:
    """Shard 0 on the worker's device, shard 1 on another."""
    with StoreProcess("--shards", "2", "--device", "fake:0?seed=7,fake:1") as process:
        yield process


@pytest.fixture(params=range(2))
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return stream_on(f"fake:0?seed={request.param}", monkeypatch)


def some(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(F32)


def create(store: Store) -> None:
    for seed, (name, size) in enumerate(SIZES.items()):
        store.create(name, some(size, seed), rule="adam", exist="overwrite")


def gradients(round_: int) -> dict[str, Array]:
    return {name: some(size, 100 * round_) for name, size in SIZES.items()}


def trained(store: Store, stream: Stream | None) -> list[Array]:
    """All values after each round. Arrays are on the stream's device, or in main memory."""
    create(store)
    values: list[Array] = []
    out = {name: np.zeros(size, F32) for name, size in SIZES.items()}
    there = None if stream is None else {name: Interface(stream, value) for name, value in out.items()}
    for round_ in range(NUM_ROUNDS):
        given = gradients(round_)
        store.push_many(given if stream is None else {k: Interface(stream, v) for k, v in given.items()})
        store.commit({"lr": 0.01})
        store.pull_many(list(out), out=list((out if there is None else there).values()))
        values += [value.copy() for value in out.values()] if there is None else [a.read() for a in there.values()]
    return values


@pytest.fixture(scope="module")
def expected() -> list[Array]:
    with psstore.connect("local://?shards=2") as store:
        return trained(store, None)


def shard_bytes(store: Store) -> int:
    return int(store.stats()[0]["memory_bytes"])


def pinned_bytes(store: Store, stream: Stream) -> int:
    transfers = store._operations.context.transfers
    return transfers.out_of(stream.device).pinned_bytes + transfers.into(stream.device).pinned_bytes


def test_steps_are_those_of_main_memory_wherever_shards_are(
    server: StoreProcess, stream: Stream, expected: list[Array]
) -> None:
    with psstore.connect(server.url) as store:
        for value, wanted in zip(trained(store, stream), expected, strict=True):
            assert_array_equal(value, wanted)


def test_nothing_goes_through_the_host_to_a_shard_on_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_on("fake:0", monkeypatch)
    with StoreProcess("--device", "fake:0") as server, psstore.connect(server.url) as store:
        value = some(2_500_000, 1)
        store.create("w", np.zeros_like(value))
        for _ in range(2):
            store.push("w", Interface(stream, value))
            out = Interface(stream, np.zeros_like(value))
            store.pull("w", out=out)
            assert_array_equal(out.read(), value)
        assert pinned_bytes(store, stream) == 0


def test_what_is_shared_travels_in_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_on("fake:0", monkeypatch)
    rooms: list[int] = []
    leases: list[Lease] = []
    take, end_lease = peers.DevicePeer.take, peers.PeerDirectory.end_lease

    def taken(self: peers.DevicePeer, num_bytes: int) -> _core.PushRoom | None:
        rooms.append(num_bytes)
        return take(self, num_bytes)

    def ended(self: peers.PeerDirectory, lease: Lease) -> bool:
        leases.append(lease)
        return end_lease(self, lease)

    monkeypatch.setattr(peers.DevicePeer, "take", taken)
    monkeypatch.setattr(peers.PeerDirectory, "end_lease", ended)
    with StoreProcess("--device", "fake:0") as server, psstore.connect(server.url) as store:
        value = some(2_500_000, 1)
        store.create("w", np.zeros_like(value))
        store.push("w", Interface(stream, value))
        store.pull("w", out=Interface(stream, np.zeros_like(value)))
        assert set(rooms) == {value.nbytes}
        assert len(leases) == 1


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_read_of_shared_values_that_is_given_up_ends_their_lease(
    server: StoreProcess, stream: Stream, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    reading, over = threading.Event(), threading.Event()
    end_lease = peers.PeerDirectory.end_lease

    def noted(self: peers.PeerDirectory, lease: Lease) -> bool:
        over.set()
        return end_lease(self, lease)

    def passed(self: PinnedTransfer, *kept: object) -> asyncio.Future[None]:
        copied = asyncio.get_running_loop().create_future()
        if not is_cancelled:
            copied.set_exception(DeviceFailed("fake:0 failed"))
        if any(isinstance(one, peers.DevicePeer) for one in kept):
            reading.set()
        return copied

    async def pull_in_vain() -> None:
        async with await psstore.connect_async(server.url) as store:
            await store.create("w", some(SIZES["large"], 1), rule="add", exist="overwrite")
            pull = asyncio.ensure_future(store.pull("w", out=Interface(stream, some(SIZES["large"], 2))))
            assert await asyncio.to_thread(reading.wait, 30)
            if is_cancelled:
                pull.cancel()
            with pytest.raises(asyncio.CancelledError if is_cancelled else DeviceFailed):
                await pull
            assert await asyncio.to_thread(over.wait, 30)

    monkeypatch.setattr(peers.PeerDirectory, "end_lease", noted)
    monkeypatch.setattr(PinnedTransfer, "_passed", passed)
    asyncio.run(pull_in_vain())


@pytest.mark.timeout(30)  # a shard that forgets a device's work goes on with it when something else wakes it up
def test_a_value_is_read_before_it_changes(server: StoreProcess, stream: Stream) -> None:
    with psstore.connect(server.url) as store:
        size = SIZES["large"]
        store.create("w", np.zeros(size, F32), rule="add", exist="overwrite")
        out = Interface(stream, np.full(size, -1, F32))
        for i in range(3):
            store.pull("w", out=out)
            store.push("w", np.ones(size, F32))
            assert store.pull("w")[0] == i + 1
            assert_array_equal(out.read(), np.full(size, i, F32))


def lose_connections(store: Store | psstore.AsyncStore) -> None:
    driver = store._backend._driver  # type: ignore[attr-defined]

    def lose() -> None:
        for reconnector in driver.reconnectors.values():
            if reconnector._connection is not None:
                reconnector._connection.abort()

    driver._loop.call_soon_threadsafe(lose)


def test_a_lost_connection_costs_no_round(server: StoreProcess, stream: Stream, expected: list[Array]) -> None:
    with psstore.connect(server.url) as store:
        create(store)
        out = [Interface(stream, np.zeros(size, F32)) for size in SIZES.values()]
        for round_ in range(NUM_ROUNDS):
            push = store.start_push_many({k: Interface(stream, v) for k, v in gradients(round_).items()})
            lose_connections(store)
            push.result()
            store.commit({"lr": 0.01})
            pull = store.start_pull_many(list(SIZES), out=out)
            lose_connections(store)
            pull.result()
        for array, wanted in zip(out, expected[-len(SIZES) :], strict=True):
            assert_array_equal(array.read(), wanted)


def test_a_push_that_is_cancelled_sends_what_was_pushed_also_over_another_connection(stream: Stream) -> None:
    size = SIZES["large"]

    async def push_in_vain(server: StoreProcess) -> None:
        async with await psstore.connect_async(server.url, role="client") as store:
            await store.create("w", np.zeros(size, F32))
            await store.create("more than the socket has room for", np.zeros(LARGE, F32))
            first = [Interface(stream, np.full(size, value, F32)) for value in range(2)]
            await asyncio.gather(*(store.push("w", one) for one in first))  # now there is room that is shared
            await store.pull("w")
            pushed = Interface(stream, np.full(size, 2, F32))
            with server.stopped():
                in_front = asyncio.ensure_future(store.push("more than the socket has room for", np.ones(LARGE, F32)))
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(store.push("w", pushed), 0.5)
                stream.write(pushed, np.full(size, -7, F32))
                assert (pushed.read() == -7).all()
                lose_connections(store)
                await asyncio.sleep(0.1)
            await in_front
            assert_array_equal(await store.pull("w"), np.full(size, 2, F32))

    with StoreProcess("--device", "fake:0") as server:
        asyncio.run(push_in_vain(server))


def test_a_copy_that_is_late_for_its_connection_changes_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's connection is lost while its copy to the shard's memory waits behind other work of the device."""
    streams = [stream_on(f"fake:0?seed={seed}", monkeypatch) for seed in range(2)]
    held, free = threading.Event(), threading.Event()
    wait = pinned_transfer._wait

    def wait_held(fence: _core.Fence, kept: object) -> None:
        if not held.is_set():
            held.set()
            assert free.wait(60)
        wait(fence, kept)

    size = SIZES["large"]
    with (
        StoreProcess("--workers", "2", "--device", "fake:0?seed=7") as server,
        psstore.connect(server.url) as first,
        psstore.connect(server.url) as second,
    ):
        first.create("w", np.zeros(size, F32), rule="sgd")
        monkeypatch.setattr(device_arrays, "device_at", lambda index: streams[0].device)
        monkeypatch.setattr(pinned_transfer, "_wait", wait_held)
        push = first.start_push_many({"w": Interface(streams[0], np.full(size, 6, F32))})
        assert held.wait(60)
        lose_connections(first)
        first.stats()  # over another one
        for _ in range(3):
            second.pull("w")  # what the shard has let go of is somebody's next
        monkeypatch.setattr(device_arrays, "device_at", lambda index: streams[1].device)
        second.push("w", Interface(streams[1], np.full(size, 2, F32)))
        used = shard_bytes(second)
        free.set()
        push.result()
        commit = first.start_commit({"lr": 1.0})
        second.commit({"lr": 1.0})
        commit.result()
        assert_array_equal(second.pull("w"), np.full(size, -4, F32))
        assert eventually(lambda: shard_bytes(second) < used), "the shard has its memory again"


def test_frames_go_through_the_host_where_memory_can_not_be_shared(
    server: StoreProcess, expected: list[Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_on("fake:0", monkeypatch)
    monkeypatch.setattr(peers, "borrow_pushes", lambda offer, blocks: None)
    with psstore.connect(server.url) as store:
        for value, wanted in zip(trained(store, stream), expected, strict=True):
            assert_array_equal(value, wanted)


def test_values_that_can_not_be_imported_are_asked_for_again(
    server: StoreProcess, expected: list[Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_on("fake:0", monkeypatch)
    monkeypatch.setattr(peers.IpcPeer, "learn", lambda self, blocks: False)
    with psstore.connect(server.url) as store:
        for value, wanted in zip(trained(store, stream), expected, strict=True):
            assert_array_equal(value, wanted)


def test_a_shard_that_dies_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_on("fake:0", monkeypatch)
    with StoreProcess("--device", "fake:0") as server:
        with psstore.connect(server.url, timeout_s=2.0, connect_timeout_s=2.0) as store:
            array = Interface(stream, some(500_000, 0))
            store.create("w", np.zeros(500_000, F32))
            store.push("w", array)
            for shard in server.shards():
                shard.kill()
            with pytest.raises(AvailabilityError):
                store.push("w", array)
        server.wait()
