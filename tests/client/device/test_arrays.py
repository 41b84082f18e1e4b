"""Arrays on a device are pushed and pulled in the order of their streams, and nothing waits for a device but who must.

The device is a fake one that does its work as late, and in as bad an order, as fences allow: a wait that is missing
shows as wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.device import arrays as device_arrays
from psstore.client.device import batches, pinned_transfer
from psstore.client.store import Store
from psstore.errors import BadArgument, DeviceFailed, DTypeMismatch, ShapeMismatch
from tests.client.device.fake_arrays import Array, DLPack, Interface, Stream, torch_on

F32 = np.float32


@pytest.fixture(params=range(3))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _core.Device:
    opened = _core.open_device(f"fake:0?seed={request.param}")
    monkeypatch.setattr(device_arrays, "device_at", lambda index: opened)
    return opened


@pytest.fixture
def stream(device: _core.Device) -> Stream:
    return Stream(device)


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=2") as store:
        yield store


def some(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def test_a_push_sends_what_the_stream_will_have_made(store: Store, stream: Stream) -> None:
    value = some(3, 70_000)
    store.create("w", np.zeros_like(value))
    array = Interface(stream, np.full_like(value, 7))
    stream.write(array, value)  # queued, and not done
    store.push("w", array)
    assert_array_equal(store.pull("w"), value)


def test_a_pull_is_there_for_what_is_queued_after_it(store: Store, stream: Stream) -> None:
    value = some(3, 70_000)
    store.create("w", value)
    array = Interface(stream, np.zeros_like(value))  # is written to before, on its stream
    assert store.pull("w", out=array) is array
    assert_array_equal(array.read(), value)


def test_many_arrays_on_several_streams_and_in_main_memory_travel_in_one_call(
    store: Store, stream: Stream, device: _core.Device
) -> None:
    values = {f"t{i}": some(i + 1, 100, seed=i) for i in range(6)}
    for name, value in values.items():
        store.create(name, np.zeros_like(value))
    streams = [stream, Stream(device)]
    store.push_many(
        {
            name: value if i % 3 == 2 else Interface(streams[i % 3], value)
            for i, (name, value) in enumerate(values.items())
        }
    )
    out = [
        np.empty_like(value) if i % 3 == 2 else Interface(streams[i % 3], np.zeros_like(value))
        for i, value in enumerate(values.values())
    ]
    results = store.pull_many(list(values), out=out)
    for result, given, value in zip(results, out, values.values(), strict=True):
        assert result is given
        assert_array_equal(given.read() if isinstance(given, Interface) else given, value)


def test_more_than_a_pinned_transfer_holds_goes_through_it(
    store: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(pinned_transfer, "MOST_PINNED_BYTES", 4 << 20)
    value = some(5 << 20)
    store.create("w", np.zeros_like(value))
    store.push("w", Interface(stream, value))
    assert_array_equal(store.pull("w"), value)
    out = Interface(stream, np.zeros_like(value))
    store.pull("w", out=out)
    assert_array_equal(out.read(), value)
    transfers = store._operations.context.transfers
    for pinned in (transfers.out_of(stream.device), transfers.into(stream.device)):
        assert 2 << 20 <= pinned.pinned_bytes <= 4 << 20


def test_a_tensor_with_gaps_behind_another_one_is_sent_as_its_copy_will_be(
    store: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = some(4, 5)
    store.create("dense", np.zeros_like(value))
    store.create("with gaps", np.zeros_like(value.T))
    with monkeypatch.context() as patch:
        torch_on(stream, patch)
        store.push_many({"dense": torch.from_numpy(value), "with gaps": torch.from_numpy(value).t()})
    assert_array_equal(store.pull("dense"), value)
    assert_array_equal(store.pull("with gaps"), value.T)


def test_the_last_of_overlapping_pushes_counts(store: Store, stream: Stream) -> None:
    store.create("w", np.zeros(200_000, F32))
    started = [store.start_push_many({"w": Interface(stream, some(200_000, seed=i))}) for i in range(8)]
    for push in started:
        push.result()
    assert_array_equal(store.pull("w"), some(200_000, seed=7))


def test_a_started_push_is_not_there_for_commit_before_its_copy(store: Store, stream: Stream) -> None:
    store.create("w", np.ones(4, F32), rule="sgd")
    store.start_push_many({"w": Interface(stream, np.full(4, 2, F32))})
    store.settle()
    store.commit({"lr": 0.5})
    assert_array_equal(store.pull("w"), np.zeros(4, F32))


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_codecs_take_from_a_device_and_bring_there(store: Store, stream: Stream, codec: str) -> None:
    gradient, start = some(3000), some(3000, seed=1)
    with psstore.connect("local://") as other:
        pulled = []
        for one, wrapped in ((store, True), (other, False)):
            one.create("w", Interface(stream, start) if wrapped else start, rule="sgd")
            for _ in range(2):
                one.push("w", Interface(stream, gradient) if wrapped else gradient, codec=codec)
                one.commit({"lr": 0.5})
            out = Interface(stream, np.zeros_like(start)) if wrapped else np.zeros_like(start)
            one.pull("w", out=out, codec=codec)
            pulled.append(out.read() if isinstance(out, Interface) else out)
    assert_array_equal(pulled[0], pulled[1])


def test_a_pull_leaves_what_is_not_newer_as_it_is(store: Store, stream: Stream) -> None:
    store.create("w", np.ones(4, F32))
    out = Interface(stream, np.full(4, 5, F32))
    store.pull("w")
    assert store.pull("w", out=out, if_newer_than=store.version_of("w")) is None
    assert_array_equal(out.read(), np.full(4, 5, F32))


def test_an_array_that_names_no_stream_holds_the_value_on_return(
    store: Store, stream: Stream, device: _core.Device
) -> None:
    value = some(1000)
    store.create("w", value)
    out = Interface(stream, np.zeros_like(value), stream=None)
    stream.queue.record().wait()
    store.pull("w", out=out)
    assert_array_equal(Stream(device).read(out), value)  # on a stream that waits for nothing


def test_dlpack_is_asked_for_the_stream_that_reads(store: Store, stream: Stream, device: _core.Device) -> None:
    value = some(1000)
    store.create("w", np.zeros_like(value))
    array = DLPack(stream, value)
    store.push("w", array)
    assert array.asked_by != stream.queue.stream
    assert_array_equal(store.pull("w"), value)
    out = DLPack(stream, np.zeros_like(value))
    assert store.pull("w", out=out) is out
    assert_array_equal(Stream(device).read(out), value)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"stream": 0}, BadArgument, "says stream 0"),
        ({"strides": (8,)}, BadArgument, "has gaps"),
        ({"mask": object()}, BadArgument, "has a mask"),
        ({"typestr": "<i4"}, DTypeMismatch, "dtype int32"),
        ({"typestr": ">f4"}, DTypeMismatch, "dtype >f4"),
        ({"shape": (2, 2)}, ShapeMismatch, "expected shape"),
    ],
)
def test_what_can_not_be_sent_is_named(
    store: Store, stream: Stream, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    store.create("w", np.zeros(4, F32))
    with pytest.raises(error, match=message):
        store.push("w", Interface(stream, np.ones(4, F32), **changed))
    with pytest.raises(error, match=message):
        store.pull("w", out=Interface(stream, np.ones(4, F32), **changed))


def test_a_device_that_fails_is_named_and_the_store_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _core.open_device("fake:0?fail_after=1")
    monkeypatch.setattr(device_arrays, "device_at", lambda index: failing)
    stream = Stream(failing)
    with psstore.connect("local://") as store:
        store.create("w", np.zeros(4, F32))
        array = Interface(stream, np.ones(4, F32))
        with pytest.raises(DeviceFailed, match="fake:0"):
            store.push("w", array)
        store.push("w", np.full(4, 3, F32))
        assert_array_equal(store.pull("w"), np.full(4, 3, F32))
