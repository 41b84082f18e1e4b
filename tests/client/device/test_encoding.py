"""What is pushed in a codec from a device is encoded there: with the bytes and residuals of main memory.

The device is a fake one that does its work as late, and in as bad an order, as fences allow: a wait that is missing
shows as wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.device import arrays as device_arrays
from psstore.client.device import batches, pinned_transfer
from psstore.client.device.batches import PinnedBuffer
from psstore.client.store import Store
from psstore.codec.codecs import parse
from psstore.errors import AvailabilityError, DeviceFailed, DTypeMismatch
from tests.client.device.fake_arrays import Array, Interface, Stream, stream_on
from tests.support.server_process import StoreProcess

pytestmark = pytest.mark.one_loop

F32 = np.float32

CODECS = ("bf16", "fp16", "int8", "sign", "topk:0.1")

SIZES = {"large": 600_000, "middle": 70_001, "small": 7, "none": 0}
"""Elements: several slices of which one is not full, one slice, and less than a block of an encoding."""

NAMES = list(SIZES)


@pytest.fixture(params=range(3))
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return stream_on(f"fake:0?seed={request.param}", monkeypatch)


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=2") as store:
        yield store


@pytest.fixture
def reference() -> Iterator[Store]:
    with psstore.connect("local://?shards=2") as store:
        yield store


def some(size: int, seed: int = 0, *, finite: bool = True) -> Array:
    values = np.random.default_rng(seed).standard_normal(size).astype(F32)
    if not finite and size > 300:
        values[[3, 290]] = np.nan, np.inf
    return values


def create(*stores: Store, rule: str = "reduce") -> None:
    for store in stores:
        for name, size in SIZES.items():
            store.create(name, np.zeros(size, F32), rule=rule)


def gradients(seed: int, *, finite: bool = True) -> dict[str, Array]:
    return {name: some(size, seed, finite=finite) for name, size in SIZES.items()}


def on(stream: Stream, values: dict[str, Array]) -> dict[str, Interface]:
    return {name: Interface(stream, value) for name, value in values.items()}


def assert_same(ours: Store, theirs: Store) -> None:
    """What arrived, what was kept back, and how many bytes it took."""
    for name, ours_value, theirs_value in zip(NAMES, ours.pull_many(NAMES), theirs.pull_many(NAMES), strict=True):
        assert_array_equal(ours_value, theirs_value, err_msg=name)
    ours_kept, theirs_kept = ours.residuals(NAMES), theirs.residuals(NAMES)
    assert ours_kept.keys() == theirs_kept.keys()
    for name, kept in theirs_kept.items():
        assert_array_equal(ours_kept[name], kept, err_msg=name)
    assert ours.bytes_pushed == theirs.bytes_pushed


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_have_the_bytes_of_main_memory(store: Store, reference: Store, stream: Stream, codec: str) -> None:
    create(store, reference)
    for round_ in range(3):
        given = gradients(round_)
        store.push_many(on(stream, given), codec=codec)
        reference.push_many(given, codec=codec)
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_arrives_and_is_not_taken_up(
    store: Store, reference: Store, stream: Stream, codec: str
) -> None:
    create(store, reference)
    for finite in (True, False, True):
        given = gradients(int(finite), finite=finite)
        store.push_many(on(stream, given), codec=codec)
        reference.push_many(given, codec=codec)
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)
        assert all(np.isfinite(kept).all() for kept in store.residuals(NAMES).values())


def test_only_a_codecs_bytes_leave_the_device(store: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    room = pinned_transfer.PinnedTransfer._allocate

    async def seen(self: pinned_transfer.PinnedTransfer, num_bytes: int) -> PinnedBuffer:
        left.append(num_bytes)
        return await room(self, num_bytes)

    monkeypatch.setattr(pinned_transfer.PinnedTransfer, "_allocate", seen)
    create(store)
    store.push_many(on(stream, gradients(1)), codec={"large": "sign", "middle": "topk:0.01"})
    large, middle = parse("sign"), parse("topk:0.01")
    assert large is not None
    assert middle is not None
    slices = store.describe("large").slice_elems
    encoded = sum(large.num_bytes(min(slices, SIZES["large"] - begin)) for begin in range(0, SIZES["large"], slices))
    assert sum(left) == encoded + middle.num_bytes(SIZES["middle"]) + 4 * SIZES["small"]


def test_half_precision_is_encoded_as_in_main_memory(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    for round_ in range(2):
        given = {name: value.astype(np.float16) for name, value in gradients(round_).items()}
        store.push_many(on(stream, given), codec="sign")
        reference.push_many(given, codec="sign")
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


def test_tensors_in_and_without_codecs_wherever_they_are_travel_together(
    store: Store, reference: Store, stream: Stream
) -> None:
    create(store, reference)
    codecs = {"large": "int8", "small": "sign"}
    for round_ in range(2):
        given = gradients(round_)
        reference.push_many(given, codec=codecs)
        there = {"large", "middle"} if round_ else {"middle", "small"}
        store.push_many({k: Interface(stream, v) if k in there else v for k, v in given.items()}, codec=codecs)
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


def test_pushing_again_begins_with_the_residual_of_before(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    for round_ in range(2):
        for again in range(3):
            given = gradients(10 * round_ + again)
            store.push_many(on(stream, given), codec="sign")
            reference.push_many(given, codec="sign")
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


def test_a_round_that_is_skipped_leaves_the_residual_as_it_was(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    for round_ in range(4):
        given = gradients(round_)
        store.push_many(on(stream, given), codec="int8")
        reference.push_many(given, codec="int8")
        for one in (store, reference):
            one.commit(non_finite=round_ == 1)
        assert_same(store, reference)


def test_a_residual_follows_the_loss_scale(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    for round_, scale in enumerate((1024.0, 1024.0, 1000.0, 3.0)):
        given = gradients(round_)
        store.push_many(on(stream, given), codec="sign", loss_scale=scale)
        reference.push_many(given, codec="sign", loss_scale=scale)
        for one in (store, reference):
            one.commit(loss_scale=scale)
        assert_same(store, reference)


def test_residuals_go_where_the_next_push_comes_from(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    other = Stream(_core.open_device("fake:1"))
    places = [stream, None, other, stream, None]
    for round_, place in enumerate(places):
        given = gradients(round_)
        if place is other:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device_arrays, "device_at", lambda index: other.device)
                store.push_many(on(other, given), codec="int8")
        else:
            store.push_many(given if place is None else on(place, given), codec="int8")
        reference.push_many(given, codec="int8")
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


def test_residuals_of_a_checkpoint_go_on_where_they_were(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    reference.push_many(gradients(1), codec="topk:0.1")
    reference.commit()
    store.set_residuals(reference.residuals(NAMES))
    for one, given in ((reference, gradients(2)), (store, on(stream, gradients(2)))):
        one.push_many(given, codec="topk:0.1")
        one.commit()
    for name, kept in reference.residuals(NAMES).items():
        assert_array_equal(store.residuals([name])[name], kept)
    store.set_residuals(dict.fromkeys(NAMES))
    assert store.residuals(NAMES) == {}


def test_what_is_added_in_a_codec_counts_at_once(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference, rule="add")
    for i in range(3):
        store.push_many(on(stream, gradients(i)), codec="sign")
        reference.push_many(gradients(i), codec="sign")
        assert_same(store, reference)


def test_a_device_without_memory_for_residuals_has_the_host_encode(
    store: Store, reference: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 2 * 4 * SIZES["large"]  # the gradient, and half of the residual's two buffers
    stream = stream_on(f"fake:0?bytes={num_bytes + (1 << 20)}", monkeypatch)
    create(store, reference)
    array = Interface(stream, np.zeros(SIZES["large"], F32))
    for round_ in range(4):
        given = gradients(round_)["large"]
        stream.write(array, given)
        store.push("large", array, codec="int8")
        reference.push("large", given, codec="int8")
        for one in (store, reference):
            one.commit()
        assert_same(store, reference)


def test_more_than_a_pinned_transfer_holds_is_encoded_batch_by_batch(
    store: Store, reference: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batches, pinned_transfer):
        monkeypatch.setattr(module, "BATCH_BYTES", 64 << 10)
    monkeypatch.setattr(pinned_transfer, "MOST_PINNED_BYTES", 4 << 20)
    many = {f"t{i}": some(50_000 + i, i) for i in range(120)}
    for one in (store, reference):
        for name, value in many.items():
            one.create(name, np.zeros_like(value), rule="reduce")
    for _ in range(2):
        store.push_many(on(stream, many), codec="int8")
        reference.push_many(many, codec="int8")
        for one in (store, reference):
            one.commit()
        for ours, theirs in zip(store.pull_many(list(many)), reference.pull_many(list(many)), strict=True):
            assert_array_equal(ours, theirs)


def test_threads_push_at_the_same_time(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    streams = [Stream(stream.device) for _ in SIZES]

    def push(index: int, name: str, value: Array) -> None:
        store.push(name, Interface(streams[index], value), codec="sign")

    with ThreadPoolExecutor(len(SIZES)) as threads:
        for round_ in range(3):
            given = gradients(round_)
            pushes = [threads.submit(push, i, name, value) for i, (name, value) in enumerate(given.items())]
            for one in pushes:
                one.result()
            reference.push_many(given, codec="sign")
            store.commit()
            reference.commit()
            assert_same(store, reference)


def test_a_push_that_was_given_up_can_be_pushed_again(store: Store, reference: Store, stream: Stream) -> None:
    create(store, reference)
    for round_ in range(6):
        given = gradients(round_)
        arrays = on(stream, given)  # stay until what is queued on their stream is done
        store.start_push_many(arrays, codec="sign").cancel()
        store.push_many(arrays, codec="sign")
        reference.push_many(given, codec="sign")
        for one in (store, reference):
            one.commit()
        for ours, theirs in zip(store.pull_many(NAMES), reference.pull_many(NAMES), strict=True):
            assert_array_equal(ours, theirs)
    for name, kept in reference.residuals(NAMES).items():
        assert_array_equal(store.residuals([name])[name], kept)


def test_a_push_that_does_not_fit_changes_no_residual(store: Store, stream: Stream) -> None:
    create(store)
    store.create("wide", np.zeros(8), rule="reduce")
    pushed = {"large": Interface(stream, some(SIZES["large"])), "wide": Interface(stream, np.zeros(8))}
    num_bytes = store.bytes_pushed
    with pytest.raises(DTypeMismatch, match="wide"):
        store.push_many(pushed, codec="int8")
    store.commit()
    assert store.residuals(NAMES) == {}
    assert store.bytes_pushed == num_bytes


def test_a_device_that_fails_is_named_and_the_round_goes_on_without_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_on("fake:0?fail_after=2", monkeypatch)
    create(store)
    with pytest.raises(DeviceFailed, match="fake:0"):
        store.push("middle", Interface(stream, some(SIZES["middle"])), codec="int8")
    store.push("middle", some(SIZES["middle"], 3))
    store.commit()
    assert_array_equal(store.pull("middle"), some(SIZES["middle"], 3))


@pytest.mark.sockets
def test_a_lost_connection_costs_no_round_and_no_residual(reference: Store, stream: Stream) -> None:
    create(reference)
    with StoreProcess("--shards", "2") as server, psstore.connect(server.url) as store:
        create(store)
        driver = store._backend._driver  # type: ignore[attr-defined]

        def lose() -> None:
            for reconnector in driver.reconnectors.values():
                if reconnector._connection is not None:
                    reconnector._connection.abort()

        for round_ in range(4):
            given = gradients(round_)
            push = store.start_push_many(on(stream, given), codec="int8")
            driver._loop.call_soon_threadsafe(lose)
            push.result()
            reference.push_many(given, codec="int8")
            for one in (store, reference):
                one.commit()
            assert_same(store, reference)


@pytest.mark.sockets
def test_a_shard_that_dies_is_an_error_and_no_hang(stream: Stream) -> None:
    with StoreProcess() as server:
        with psstore.connect(server.url, timeout_s=2.0, connect_timeout_s=2.0) as store:
            create(store)
            array = Interface(stream, some(SIZES["large"]))
            store.push("large", array, codec="sign")
            for shard in server.shards():
                shard.kill()
            with pytest.raises(AvailabilityError):
                store.push("large", array, codec="sign")
        server.wait()
