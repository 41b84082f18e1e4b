"""Pulls in codecs into arrays on a device are decoded there: the values of main memory, and no more bytes than come.

The device is a fake one that does its work as late, and in as bad an order, as fences allow: a wait that is missing
shows as wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.device import pinned_transfer
from psstore.client.store import Store
from psstore.errors import UnknownKey
from tests.client.device.fake_arrays import Array, Interface, Stream, stream_on
from tests.support.server_process import StoreProcess

pytestmark = pytest.mark.one_loop

F32 = np.float32

FOLLOWING = ("int8", "sign")

SIZES = {"large": 600_000, "middle": 70_001, "small": 7, "none": 0}
NAMES = list(SIZES)


@pytest.fixture(params=range(3))
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return stream_on(f"fake:0?seed={request.param}", monkeypatch)


@pytest.fixture
def server() -> Iterator[psstore.LocalStore]:
    """Two workers, who commit at once: one pulls to a device, the other the same to main memory."""
    with psstore.LocalStore(shards=2, workers=2, mode="async") as server:
        yield server


@pytest.fixture
def stores(server: psstore.LocalStore) -> Iterator[tuple[Store, Store]]:
    with server.connect(rank=0) as one, server.connect(rank=1) as other:
        for seed, (name, size) in enumerate(SIZES.items()):
            for store in (one, other):
                store.create(name, some(size, seed), rule="sgd")
        yield one, other


def some(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(F32)


def step(store: Store, seed: int) -> None:
    """It is there for everybody."""
    store.push_many({name: some(size, seed) for name, size in SIZES.items()})
    store.commit({"lr": 0.1})
    store.pull_many(NAMES)


def places(stream: Stream, dtype: type = F32) -> list[Interface]:
    return [Interface(stream, np.full(size, 3, dtype)) for size in SIZES.values()]


@pytest.mark.parametrize("codec", FOLLOWING)
def test_changes_are_added_on_the_device(stores: tuple[Store, Store], stream: Stream, codec: str) -> None:
    one, other = stores
    out = places(stream)
    for round_ in range(4):
        assert one.pull_many(NAMES, out=out, codec=codec) == out
        for array, wanted in zip(out, other.pull_many(NAMES, codec=codec), strict=True):
            assert_array_equal(array.read(), wanted)
        assert one.bytes_pulled == other.bytes_pulled - round_ * 4 * sum(SIZES.values())
        step(other, round_)


@pytest.mark.parametrize("codec", FOLLOWING)
def test_what_is_followed_comes_in_half_precision_where_that_is_wanted(
    stores: tuple[Store, Store], stream: Stream, codec: str
) -> None:
    one, other = stores
    out = places(stream, np.float16)
    for round_ in range(2):
        one.pull_many(NAMES, out=out, codec=codec)
        for array, wanted in zip(out, other.pull_many(NAMES, codec=codec), strict=True):
            assert_array_equal(array.read(), wanted.astype(np.float16))
        step(other, round_)


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", F32), ("fp16", F32), ("fp16", np.float16), ("bf16", np.float16)])
def test_half_precision_is_widened_on_the_device(
    stores: tuple[Store, Store], stream: Stream, codec: str, dtype: type
) -> None:
    one, other = stores
    out = places(stream, dtype)
    wanted: list[Array] = [np.empty(size, dtype) for size in SIZES.values()]
    for round_ in range(2):
        one.pull_many(NAMES, out=out, codec=codec)
        other.pull_many(NAMES, out=wanted, codec=codec)
        for array, value in zip(out, wanted, strict=True):
            assert_array_equal(array.read(), value)
        step(other, round_)


def test_dtypes_of_arrays_in_one_call_may_differ(stores: tuple[Store, Store], stream: Stream) -> None:
    one, other = stores
    one.create("wide", np.arange(70_000, dtype=np.float64), rule="sgd")
    other.create("wide", np.arange(70_000, dtype=np.float64), rule="sgd")
    names = ["large", "middle", "small", "wide"]
    dtypes: list[type] = [np.float16, F32, np.float16, np.float64]
    sizes = [SIZES["large"], SIZES["middle"], SIZES["small"], 70_000]
    codecs = {"large": "fp16", "middle": "bf16", "small": "bf16"}
    out = [Interface(stream, np.zeros(size, dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    wanted: list[Array] = [np.zeros(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    one.pull_many(names, out=out, codec=codecs)
    other.pull_many(names, out=wanted, codec=codecs)
    for array, value in zip(out, wanted, strict=True):
        assert_array_equal(array.read(), value)


def test_what_is_on_no_device_travels_in_the_same_call(stores: tuple[Store, Store], stream: Stream) -> None:
    one, other = stores
    out = [Interface(stream, np.zeros(size, F32)) if i % 2 else None for i, size in enumerate(SIZES.values())]
    given = [np.empty(size, F32) if place is None else place for place, size in zip(out, SIZES.values(), strict=True)]
    codecs = {"large": "int8", "middle": "sign", "small": "bf16"}
    for round_ in range(2):
        one.pull_many(NAMES, out=given, codec=codecs)
        for array, wanted in zip(given, other.pull_many(NAMES, codec=codecs), strict=True):
            assert_array_equal(array.read() if isinstance(array, Interface) else array, wanted)
        step(other, round_)


def test_who_follows_on_a_device_and_in_main_memory_has_the_same_in_both(
    stores: tuple[Store, Store], stream: Stream
) -> None:
    one, other = stores
    out = places(stream)
    for round_ in range(3):
        one.pull_many(NAMES, out=out, codec="sign")
        for array, here in zip(out, one.pull_many(NAMES, codec="sign"), strict=True):
            assert_array_equal(array.read(), here)
        step(other, round_)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_pull_leaves_what_is_not_newer_as_it_is(stores: tuple[Store, Store], stream: Stream, codec: str) -> None:
    one, other = stores
    out = Interface(stream, np.zeros(SIZES["large"], F32))
    one.pull("large", out=out, codec=codec)
    stream.write(out, np.full(SIZES["large"], 5, F32))
    assert one.pull("large", out=out, codec=codec, if_newer_than=one.version_of("large")) is None
    assert_array_equal(out.read(), np.full(SIZES["large"], 5, F32))
    other.pull("large", codec=codec)
    step(other, 1)
    assert one.pull("large", out=out, codec=codec, if_newer_than=one.version_of("large")) is out
    assert_array_equal(out.read(), other.pull("large", codec=codec))


def test_pulls_that_overlap_add_a_change_once(stores: tuple[Store, Store], stream: Stream) -> None:
    one, other = stores
    one.pull_many(NAMES, out=places(stream), codec="int8")
    other.pull_many(NAMES, codec="int8")
    for round_ in range(3):
        step(other, round_)
        outs = [places(stream) for _ in range(4)]
        for started in [one.start_pull_many(NAMES, out=out, codec="int8") for out in outs]:
            started.result()
        wanted = other.pull_many(NAMES, codec="int8")
        for out in outs:
            for array, value in zip(out, wanted, strict=True):
                assert_array_equal(array.read(), value)


def test_a_pull_that_was_given_up_is_no_change_lost(stores: tuple[Store, Store], stream: Stream) -> None:
    one, other = stores
    out, unused = places(stream), places(stream)
    for round_ in range(6):
        one.start_pull_many(NAMES, out=unused, codec="int8").cancel()
        one.pull_many(NAMES, out=out, codec="int8")
        for array, wanted in zip(out, other.pull_many(NAMES, codec="int8"), strict=True):
            assert_array_equal(array.read(), wanted)
        step(other, round_)


def test_a_device_without_memory_for_values_has_the_host_follow(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    stream = stream_on(f"fake:0?bytes={4 * SIZES['large'] + (1 << 20)}", monkeypatch)
    out = Interface(stream, np.zeros(SIZES["large"], F32))
    for round_ in range(3):
        one.pull("large", out=out, codec="int8")
        assert_array_equal(out.read(), other.pull("large", codec="int8"))
        step(other, round_)


def test_a_tensor_that_is_another_by_now_is_followed_anew(stores: tuple[Store, Store], stream: Stream) -> None:
    one, other = stores
    out = Interface(stream, np.zeros(SIZES["middle"], F32))
    one.pull("middle", out=out, codec="int8")
    other.drop("middle")
    with pytest.raises(UnknownKey):
        one.pull("middle", out=out, codec="int8")
    one.create("middle", some(SIZES["middle"], 50), rule="sgd")
    one.pull("middle", out=out, codec="int8")
    assert_array_equal(out.read(), some(SIZES["middle"], 50))


def test_no_more_is_pinned_than_a_pinned_transfer_holds(
    stores: tuple[Store, Store], stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_transfer, "MOST_PINNED_BYTES", 4 << 20)
    one, other = stores
    for i in range(12):
        one.create(f"t{i}", some(1 << 20, i), rule="sgd")
    names = [f"t{i}" for i in range(12)]
    out = [Interface(stream, np.zeros(1 << 20, F32)) for _ in names]
    one.pull_many(names, out=out, codec="int8")
    for array, wanted in zip(out, other.pull_many(names, codec="int8"), strict=True):
        assert_array_equal(array.read(), wanted)
    assert one._operations.context.transfers.into(stream.device).pinned_bytes <= 5 << 20


@pytest.mark.sockets
def test_a_lost_connection_adds_nothing_twice(stream: Stream) -> None:
    with (
        StoreProcess("--shards", "2", "--workers", "2", "--mode", "async") as server,
        psstore.connect(server.url, rank=0) as one,
        psstore.connect(server.url, rank=1) as other,
    ):
        for name, size in SIZES.items():
            for store in (one, other):
                store.create(name, np.zeros(size, F32), rule="sgd")
        driver = one._backend._driver  # type: ignore[attr-defined]

        def lose() -> None:
            for reconnector in driver.reconnectors.values():
                if reconnector._connection is not None:
                    reconnector._connection.abort()

        out = places(stream)
        for round_ in range(4):
            pull = one.start_pull_many(NAMES, out=out, codec="int8")
            driver._loop.call_soon_threadsafe(lose)
            pull.result()
            for array, wanted in zip(out, other.pull_many(NAMES, codec="int8"), strict=True):
                assert_array_equal(array.read(), wanted)
            step(other, round_)
