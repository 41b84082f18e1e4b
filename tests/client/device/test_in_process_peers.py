"""An embedded store and arrays of its process on one device: nothing goes through the host, and nothing waits there.

The device is a fake one that does its work as late, and in as bad an order, as fences allow. The store and the arrays
have opened it each for itself, so that a wait that is missing between the two shows as wrong bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.device import arrays as device_arrays
from psstore.client.device import pinned_transfer
from psstore.client.device.peers import InProcessPeer
from psstore.client.store import Store
from psstore.errors import DeviceFailed, NonFinite
from psstore.protocol.frames import Output
from psstore.protocol.service import ShardService
from tests.client.device.fake_arrays import Array, DLPack, Interface, Stream

F32 = np.float32
Place = Callable[[Array], Any]
"""Where an array is to be."""

NUM_ROUNDS = 4
SIZES = {"large": 1_200_000, "middle": 70_000, "small": 7}
"""Elements: frames that are full, one that is not, and one that is not worth sharing."""


@pytest.fixture(params=range(4))
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    opened = _core.open_device(f"fake:0?seed={request.param}")
    monkeypatch.setattr(device_arrays, "device_at", lambda index: opened)
    return Stream(opened)


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=2&device=fake:0?seed=7") as store:
        yield store


def some(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(F32)


def trained(store: Store, place: Place) -> list[Array]:
    """All values after each round."""
    for seed, (name, size) in enumerate(SIZES.items()):
        store.create(name, some(size, seed), rule="adam")
    out = {name: place(np.zeros(size, F32)) for name, size in SIZES.items()}
    values = []
    for round_ in range(NUM_ROUNDS):
        store.push_many({name: place(some(size, 100 * round_)) for name, size in SIZES.items()})
        store.commit({"lr": 0.01})
        store.pull_many(list(out), out=list(out.values()))
        values += [array.read() if isinstance(array, Interface) else array.copy() for array in out.values()]
    return values


@pytest.fixture(scope="module")
def expected() -> list[Array]:
    with psstore.connect("local://?shards=2") as store:
        return trained(store, lambda array: array)


def pinned_bytes(store: Store, stream: Stream) -> int:
    transfers = store._operations.context.transfers
    return transfers.out_of(stream.device).pinned_bytes + transfers.into(stream.device).pinned_bytes


def test_steps_are_those_of_main_memory(store: Store, stream: Stream, expected: list[Array]) -> None:
    for value, wanted in zip(trained(store, lambda array: Interface(stream, array)), expected, strict=True):
        assert_array_equal(value, wanted)


def test_a_step_goes_from_memory_to_memory_and_the_host_waits_for_nothing(
    store: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = some(1_200_000, 1)
    store.create("w", np.zeros_like(value), rule="sgd")
    gradient, out = Interface(stream, value), Interface(stream, np.zeros_like(value))
    is_over = threading.Event()
    monkeypatch.setattr(pinned_transfer, "_wait", lambda fence, kept: is_over.wait(60))
    woken = ShardService.woken

    def nothing(service: ShardService, now: float) -> list[Output]:
        assert not woken(service, now), "a reply has waited for the device"
        return []

    monkeypatch.setattr(ShardService, "woken", nothing)
    try:
        store.push("w", gradient)
        store.commit({"lr": 1.0})
        store.pull("w", out=out)
        assert_array_equal(out.read(), -value)
    finally:
        is_over.set()
    assert pinned_bytes(store, stream) == 0


def test_a_gradient_may_be_written_over_on_its_stream_once_it_is_pushed(store: Store, stream: Stream) -> None:
    value = some(1_200_000, 1)
    store.create("w", np.zeros_like(value), rule="add")
    gradient = Interface(stream, value)
    for _ in range(3):
        store.push("w", gradient)
        stream.write(gradient, np.full_like(value, np.nan))
        stream.write(gradient, value)
    assert_array_equal(store.pull("w"), value + value + value)


def test_a_value_is_read_before_it_changes(store: Store, stream: Stream) -> None:
    size = SIZES["large"]
    store.create("w", np.zeros(size, F32), rule="add")
    out = Interface(stream, np.full(size, -1, F32))
    for i in range(NUM_ROUNDS):
        store.pull("w", out=out)
        store.push("w", Interface(stream, np.ones(size, F32)))
        assert_array_equal(out.read(), np.full(size, i, F32))


def test_arrays_that_tell_no_stream_hold_the_value_on_return(store: Store, stream: Stream) -> None:
    value = some(SIZES["large"], 1)
    store.create("w", np.zeros_like(value))
    store.push("w", DLPack(stream, value))
    out = Interface(stream, np.zeros_like(value), stream=None)
    stream.queue.record().wait()
    store.pull("w", out=out)
    assert_array_equal(Stream(stream.device).read(out), value)


def test_pushes_use_memory_again_however_far_the_host_is_ahead(store: Store, stream: Stream) -> None:
    value = some(SIZES["large"], 1)
    store.create("w", np.zeros_like(value), rule="sgd")
    gradient, out = Interface(stream, value), Interface(stream, np.zeros_like(value))
    for _ in range(20):
        store.push("w", gradient)
        store.commit({"lr": 1.0})
        store.pull("w", out=out)
    shared = [session.near for session in store._operations.client.sessions]
    assert all(isinstance(near, InProcessPeer) for near in shared)
    assert sum(near.num_bytes for near in shared if isinstance(near, InProcessPeer)) < value.nbytes + (3 << 20)


def test_workers_of_one_process_train_together_on_one_device(stream: Stream) -> None:
    workers, size = 3, 200_000
    made = threading.Barrier(workers)

    def work(server: psstore.LocalStore, rank: int, place: Place) -> Array:
        with server.connect(rank=rank) as store:
            store.create("w", np.zeros(size, F32), rule="adam")
            made.wait(30)
            out = place(np.zeros(size, F32))
            for round_ in range(NUM_ROUNDS):
                store.push("w", place(some(size, 10 * round_ + rank)))
                store.commit({"lr": 0.01})
                store.pull("w", out=out)
            return out.read() if isinstance(out, Interface) else out

    def all_of(device: str, place: Callable[[int], Place]) -> list[Array]:
        with psstore.LocalStore(workers=workers, device=device) as server, ThreadPoolExecutor(workers) as threads:
            works = [threads.submit(work, server, rank, place(rank)) for rank in range(workers)]
            return [one.result() for one in works]

    streams = [Stream(stream.device) for _ in range(workers)]
    ours = all_of("fake:0?seed=3", lambda rank: lambda array: Interface(streams[rank], array))
    theirs = all_of("cpu", lambda rank: lambda array: array)
    for value, wanted in zip(ours, theirs, strict=True):
        assert_array_equal(value, wanted)


def test_pushes_that_have_to_be_looked_at_go_through_the_host(stream: Stream) -> None:
    value = some(200_000, 1)
    value[7] = np.nan
    with (
        psstore.LocalStore(device="fake:0", refuse_non_finite=True) as server,
        server.connect() as store,
    ):
        store.create("w", np.zeros_like(value))
        with pytest.raises(NonFinite):
            store.push("w", Interface(stream, value))
        assert pinned_bytes(store, stream) > 0


def test_a_device_that_fails_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _core.open_device("fake:0")
    monkeypatch.setattr(device_arrays, "device_at", lambda index: opened)
    stream = Stream(opened)

    def use(store: Store) -> None:
        ones = np.ones(200_000, F32)
        store.create("w", np.zeros_like(ones))
        for _ in range(10):
            out = Interface(stream, np.zeros_like(ones))
            store.push("w", Interface(stream, ones))
            store.pull("w", out=out)
            assert_array_equal(out.read(), ones)

    with psstore.connect("local://?device=fake:0?fail_after=3") as store, pytest.raises(DeviceFailed):
        use(store)
