"""Pulls: into the caller's memory, in other encodings, and only if there is news; over every transport."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from psstore.client.layout import Layout
from psstore.client.store import Store
from psstore.errors import BadArgument, DeadlineExceeded, DTypeMismatch, NotInitialised, PsstoreError, ShapeMismatch
from psstore.partition.router import Router
from psstore.protocol.requests import Answer
from psstore.types import TensorSpec
from tests.support.cluster import TRANSPORTS, Cluster, StartCluster, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
LARGE = 700_000
"""Elements: three slices, on both shards, received in place."""


def values(num_elems: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(num_elems).standard_normal(num_elems).astype(F32)


# ---- out= -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_elems", [5, LARGE])
def test_out_receives_into_the_arrays_own_memory(store: Store, num_elems: int) -> None:
    store.create("a", values(num_elems))
    out = np.empty(num_elems, F32)
    address = out.ctypes.data
    assert store.pull("a", out=out) is out
    assert out.ctypes.data == address
    assert_array_equal(out, values(num_elems))


@pytest.mark.parametrize("num_elems", [5, LARGE])
def test_out_receives_into_a_torch_parameter(store: Store, num_elems: int) -> None:
    store.create("a", values(num_elems))
    out = torch.nn.Parameter(torch.zeros(num_elems))
    assert store.pull("a", out=out) is out
    assert_array_equal(out.detach().numpy(), values(num_elems))


def test_out_that_is_not_contiguous_is_filled_by_a_copy(store: Store) -> None:
    store.create("a", values(6).reshape(2, 3))
    array = np.zeros((3, 2), F32)
    tensor = torch.zeros(3, 2)
    store.pull_many(["a", "a"], out=[array.T, tensor.T])
    assert_array_equal(array.T, values(6).reshape(2, 3))
    assert_array_equal(tensor.T.numpy(), values(6).reshape(2, 3))


def test_out_leaves_its_neighbours_alone(store: Store) -> None:
    store.create("a", values(LARGE))
    memory = np.full(LARGE + 2, 7, F32)
    store.pull("a", out=memory[1:-1])
    assert (memory[0], memory[-1]) == (7, 7)
    assert_array_equal(memory[1:-1], values(LARGE))


def test_out_that_does_not_fit_is_refused_untouched(store: Store) -> None:
    store.create("a", [1.0, 2.0])
    out = np.full(3, 7, F32)
    with pytest.raises(ShapeMismatch, match=r"expected shape \(2,\), got \(3,\)"):
        store.pull("a", out=out)
    with pytest.raises(DTypeMismatch, match="float64"):
        store.pull("a", out=np.zeros(2))
    readonly = np.zeros(2, F32)
    readonly.flags.writeable = False
    with pytest.raises(BadArgument, match="read-only"):
        store.pull("a", out=readonly)
    with pytest.raises(BadArgument, match="list"):
        store.pull("a", out=[0.0, 0.0])
    assert_array_equal(out, np.full(3, 7, F32))


def test_pull_many_answers_in_the_order_asked(store: Store) -> None:
    for i in range(20):
        store.create(f"t{i}", np.full(i, i, F32))
    names = [f"t{i}" for i in reversed(range(20))]
    for name, value in zip(names, store.pull_many(names), strict=True):
        assert_array_equal(value, np.full(int(name[1:]), int(name[1:]), F32))


# ---- dtype= ---------------------------------------------------------------------------------------


def test_half_precision_travels_in_half_the_bytes(store: Store) -> None:
    store.create("a", values(LARGE))
    before = store.bytes_pulled
    half = store.pull("a", dtype="float16")
    assert store.bytes_pulled - before == 2 * LARGE
    assert_array_equal(half, values(LARGE).astype(np.float16))


def test_bfloat16_goes_into_torch_tensors(store: Store) -> None:
    store.create("a", values(LARGE))
    out = torch.empty(LARGE, dtype=torch.bfloat16)
    store.pull("a", out=out)
    assert torch.equal(out, torch.from_numpy(values(LARGE)).to(torch.bfloat16))
    with pytest.raises(BadArgument, match="numpy has no bfloat16"):
        store.pull("a", dtype="bfloat16")


def test_other_dtypes_are_refused(store: Store) -> None:
    store.create("a", np.zeros(2))
    with pytest.raises(DTypeMismatch, match="float64"):
        store.pull("a", dtype="float16")
    with pytest.raises(DTypeMismatch, match="int8"):
        store.pull("a", dtype="int8")


# ---- if_newer_than= -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_elems", [1, LARGE])
def test_unchanged_trained_tensor_costs_no_bytes(store: Store, num_elems: int) -> None:
    store.create("w", np.zeros(num_elems, F32), rule="sgd")
    store.push("w", np.ones(num_elems, F32))
    store.commit({"lr": 1.0})
    store.pull("w")
    before = store.bytes_pulled
    assert store.version_of("w") == store.version
    assert store.pull("w", if_newer_than=store.version_of("w")) is None
    assert store.bytes_pulled == before
    store.push("w", np.ones(num_elems, F32))
    store.commit()
    assert_array_equal(store.pull("w", if_newer_than=store.version_of("w")), np.full(num_elems, -2, F32))


@pytest.mark.parametrize("num_elems", [1, LARGE])
def test_unchanged_plain_tensor_costs_no_bytes(store: Store, num_elems: int) -> None:
    store.create("a", np.zeros(num_elems, F32))
    store.push("a", np.ones(num_elems, F32))
    store.pull("a")
    seen = store.version_of("a")
    assert store.pull("a", if_newer_than=seen) is None
    store.push("a", np.full(num_elems, 2, F32))
    assert_array_equal(store.pull("a", if_newer_than=seen), np.full(num_elems, 2, F32))
    assert store.version_of("a") > seen


def test_pull_many_brings_only_what_is_new(store: Store) -> None:
    store.create_many(
        [TensorSpec(name=name, shape=(2,), rule="sgd") for name in "ab"], [np.zeros(2, F32), np.zeros(2, F32)]
    )
    store.push("a", [1.0, 1.0])
    store.commit({"lr": 1.0})
    version = store.version
    store.push("b", [1.0, 1.0])
    store.commit()
    a, b = store.pull_many(["a", "b"], if_newer_than=version)
    assert a is None
    assert_array_equal(b, np.array([-1, -1], F32))


# ---- waiting --------------------------------------------------------------------------------------


def test_pull_of_a_value_that_never_comes_ends_with_an_error(store: Store) -> None:
    store.create_many([TensorSpec(name="a", shape=(2,), zeros=False)], offer=False)
    with pytest.raises((NotInitialised, DeadlineExceeded), match="'a'") as caught:
        store.pull("a", wait_s=0.05)
    assert isinstance(caught.value, PsstoreError)


def test_reader_sees_what_a_worker_committed(cluster: Cluster, store: Store) -> None:
    store.create("w", [1.0], rule="sgd")
    with cluster.connect(role="client") as reader:
        assert reader.rank is None
        store.push("w", [1.0])
        store.commit({"lr": 1.0})
        store.pull("w")
        assert_array_equal(reader.pull("w"), np.array([0], F32))


# ---- what others were told ------------------------------------------------------------------------


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as start:
        yield start


def test_reader_sees_a_step_that_was_acknowledged_on_every_shard(start: StartCluster) -> None:
    """Whoever took the step has left, and carried it to nobody."""
    cluster = start(shards=2)
    worker, reader = cluster.connect(), cluster.connect(role="client")
    worker.create_many([TensorSpec(name=name, shape=(4,), rule="sgd") for name in "ab"])
    assert_array_equal(reader.pull_many(["a", "b"]), np.zeros((2, 4), F32))
    worker.push_many({name: -np.ones(4, F32) for name in "ab"})
    assert worker.commit({"lr": 1.0}).decision == 1
    worker.close()
    assert_array_equal(reader.pull("b"), np.ones(4, F32))
    assert_array_equal(reader.pull("a"), np.ones(4, F32))
    assert (reader.version, reader.version_of("a"), reader.version_of("b")) == (1, 1, 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_readers_and_other_workers_see_each_step_in_all_slices(start: StartCluster, mode: str) -> None:
    cluster = start(shards=4, workers=2 if mode == "async" else 1, mode=mode)
    worker, *others = [*cluster.workers(), cluster.connect(role="client")]
    worker.create("a", np.zeros(LARGE, F32), rule="sgd")
    for step in range(1, 6):
        worker.push("a", -np.ones(LARGE, F32))
        worker.commit({"lr": 1.0})
        for other in others:
            assert_array_equal(other.pull("a"), np.full(LARGE, step, F32))
            assert other.version_of("a") == step
    assert others[-1].pull("a", if_newer_than=5) is None


def test_version_of_a_tensor_is_that_of_its_oldest_slice(start: StartCluster) -> None:
    cluster = start(shards=2)
    worker, reader = cluster.connect(), cluster.connect(role="client")
    worker.create("a", np.zeros(LARGE, F32), rule="sgd")
    layout = Layout([worker.describe("a")], ["float32"], ways=Router(2, num_channels=1), pull=True)
    tables = [frame.table.with_versions([3 + i for i in range(len(frame.table))]) for frame in layout.frames]
    assert layout.version([Answer(table, 9) for table in tables], "a") == 3
    assert reader.version_of("a") == 0
