"""The embedded store: its threads, its modes and its end. What it shares with the others is in the tests beside it."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.errors import (
    BadArgument,
    BadChecksum,
    BadHyper,
    DTypeMismatch,
    NonFinite,
    OutOfMemory,
    StoreClosed,
    WorkerLost,
)
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, at_once
from tests.support.server_process import eventually

F32 = np.float32


def test_threads_of_one_process_train_together() -> None:
    with psstore.LocalStore(shards=3, workers=4) as server:

        def train(rank: int) -> object:
            with server.connect(rank=rank) as store:
                store.create("w", np.zeros(1000, F32), rule="sgd")
                for _ in range(10):
                    store.push("w", np.full(1000, rank, F32))
                    store.commit({"lr": 1.0})
                    last = store.pull("w")
                return last

        for result in at_once(*[lambda rank=rank: train(rank) for rank in range(4)]):
            assert_array_equal(result, np.full(1000, -15, F32))


def test_private_store_ends_with_its_connection() -> None:
    threads = threading.active_count()
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        assert (store.num_shards, store.num_workers, store.rank) == (2, 1, 0)
        assert threading.active_count() > threads
    assert threading.active_count() == threads


def test_shared_store_outlives_its_connections() -> None:
    with psstore.LocalStore() as server:
        with server.connect() as store:
            store.create("a", [1.0])
        with server.connect() as store:
            assert_array_equal(store.pull("a"), np.array([1], F32))


def test_a_store_that_was_closed_is_gone_with_what_it_held() -> None:
    with psstore.LocalStore() as server, server.connect() as store:
        store.create("a", [1.0])
        store.push("a", np.ones(1, F32))
    held = weakref.ref(server._cluster.hosts[0])
    del server, store
    gc.collect()
    assert held() is None


def test_closing_the_store_ends_calls_under_way() -> None:
    server = psstore.LocalStore()
    store = server.connect(role="client")
    store.create_many([TensorSpec(name="never", shape=(1,), zeros=False)], offer=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.pull, "never")
        store.keys()  # ordered after the pull
        server.close()
        with pytest.raises(StoreClosed):
            waiting.result(PATIENCE_S)
    with pytest.raises(StoreClosed):
        store.keys()
    with pytest.raises(StoreClosed):
        server.connect()
    store.close()
    assert "closed" in repr(server)


def test_a_forked_child_may_close_it() -> None:
    with psstore.LocalStore() as server:
        child = multiprocessing.get_context("fork").Process(target=server.close)
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        with server.connect() as store:
            store.barrier()


def test_worker_closed_by_an_error_is_lost_at_once() -> None:
    with psstore.LocalStore(workers=2) as server, server.connect(rank=0) as store:
        store.create("w", shape=(1,), rule="sgd")
        with pytest.raises(RuntimeError), server.connect(rank=1):
            raise RuntimeError
        store.push("w", [1.0])
        with pytest.raises(WorkerLost, match="rank 1"):
            store.commit()


def test_values_that_are_not_finite_are_refused_if_asked_for() -> None:
    with psstore.LocalStore(refuse_non_finite=True) as server, server.connect() as store:
        store.create("w", [1.0, 2.0], rule="sgd")
        with pytest.raises(NonFinite, match="'w'"):
            store.push("w", [1.0, float("nan")])
        store.push("w", [1.0, 1.0])
        store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), np.array([0, 1], F32))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_contribution_that_is_far_beyond_the_usual_is_refused_if_asked_for(shards: int) -> None:
    with psstore.LocalStore(shards, refuse_norm=4.0) as server, server.connect() as store:
        store.create("w", np.zeros(4, F32), rule="sgd")
        store.create_table("rows", dim=2, rule="sgd", group=1)
        for size in [*[1.0] * 8, 4.1, 4.0]:
            store.push("w", [0.0, 0.0, 0.0, 3 * size], codec="bf16")
            store.push_rows("rows", [7, 7], np.full((2, 2), size * np.sqrt(2), F32))  # the row's norm is 4
            result = store.commit({"lr": 1.0})
            assert (result.refused is not None) == result.skipped == (size > 4.0)
            if result.refused is not None:
                told = result.refused
                assert told.rank == 0
                assert told.norm == pytest.approx(20.5, rel=1e-2)
                assert told.median == pytest.approx(5.0)
                assert told.limit == pytest.approx(20.0)
            assert result.counts == (size <= 4.0)
        assert_array_equal(store.pull("w"), [0, 0, 0, -36])


def test_what_a_codec_keeps_back_of_a_refused_contribution_goes_with_it() -> None:
    with psstore.LocalStore(refuse_norm=4.0) as server, server.connect() as store:
        store.create("w", np.zeros(4096, F32), rule="sgd")
        for size in [1.0] * 8 + [100.0, 1.0]:
            store.push("w", np.linspace(-size, size, 4096, dtype=F32), codec="int8")
            result = store.commit({"lr": 1.0})
        assert result.counts
        assert np.abs(store.residuals(["w"])["w"]).max() < 0.01


def test_float64_tensors_take_no_other_precision() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create("w", np.zeros(2), rule="sgd")
        with pytest.raises(DTypeMismatch, match="expected dtype float64, got float32"):
            store.push("w", np.zeros(2, F32))
        store.push("w", np.array([1e-17, 1.0]))
        store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), np.array([-1e-17, -1.0]))


@pytest.mark.parametrize(
    "hypers", [{"lr": {"a": 1.0}}, {0: 0.1}, {"lr": 0.1, 0: {"lr": 0.1}}, {"lr": 0.1, "rate": {0: 1.0}}]
)
def test_hypers_of_no_known_form_are_refused(hypers: dict[object, object]) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create("w", shape=(1,), rule="sgd")
        store.push("w", [1.0])
        with pytest.raises(BadArgument, match="hypers"):
            store.commit(hypers)  # type: ignore[arg-type]


@pytest.mark.parametrize("hypers", [{"lr": "fast"}, {0: {"lr": None}}])
def test_a_hyper_parameter_that_is_no_number_is_refused(hypers: dict[object, object]) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create("w", shape=(1,), rule="sgd")
        with pytest.raises(BadHyper, match=r"'lr' is .*; expected a number"):
            store.commit(hypers)  # type: ignore[arg-type]


def test_memory_has_a_limit_as_in_other_processes() -> None:
    with psstore.connect("local://?shards=2&max_memory=4MiB") as store:
        store.create("fits", np.ones(1 << 18, np.float32))
        with pytest.raises(OutOfMemory, match="raise --max-memory"):
            store.create("does not", np.ones(1 << 20, np.float32))
        assert sum(int(shard["max_memory_bytes"]) for shard in store.stats()) == 4 << 20
    with psstore.LocalStore() as server, server.connect() as store:
        assert 0 < int(store.stats()[0]["max_memory_bytes"]) < 1 << 60


def test_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(BadArgument, match="max_memory is 'much'"):
        psstore.LocalStore(max_memory="much")


def test_each_worker_pushes_in_the_round_that_it_is_in() -> None:
    """All of them have one loop, and what their pushes say was worked out before."""
    with (
        psstore.LocalStore(workers=2, mode="async") as server,
        server.connect(rank=0) as first,
        server.connect(rank=1) as second,
    ):
        for store in (first, second):
            store.create("w", shape=(8,), rule="sgd")
        for store in (first, first, second, first, second):
            store.push("w", np.ones(8, F32))
            other = second if store is first else first
            other.push("w", np.ones(8, F32))
            store.commit({"lr": 1.0})
        assert second.version == 5
        assert_array_equal(second.pull("w"), np.full(8, -5, F32))


def test_a_read_that_waits_is_answered_by_a_push_of_a_call_that_went_before() -> None:
    async def read(store: psstore.AsyncStore) -> object:
        return await store.pull("w", wait_s=PATIENCE_S)

    with psstore.LocalStore() as server, server.connect() as store, ThreadPoolExecutor(1) as pool:
        store.create("w", shape=(8,), rule="sgd")
        for step in range(1, 9):
            store.commit({"lr": 1.0}, early=True, present=["w"])
            reading = pool.submit(asyncio.run, read(server.connect_async(role="client")))
            assert eventually(lambda: server._cluster.hosts[0]._service.data.next_wake() is not None)
            store.push("w", np.ones(8, F32))
            assert_array_equal(reading.result(PATIENCE_S), np.full(8, -step, F32))
            store.finish()


def test_who_does_wrong_is_told_by_the_shard_before_it_is_left() -> None:
    with psstore.LocalStore() as server, server.connect() as store:
        store.create("w", [1.0])
        store.push("w", np.ones(1, F32))
        (pipe,) = store._backend._wires  # type: ignore[attr-defined]
        pipe.session.core.say(bytes(64))
        with pytest.raises(BadChecksum):
            store.pull("w")
        with server.connect(role="client") as other:
            assert_array_equal(other.pull("w"), np.ones(1, F32))


def test_an_early_commit_is_known_as_soon_as_it_was_started() -> None:
    """Whoever's program fails then leaves the others in the middle of their step."""
    with psstore.LocalStore() as server, server.connect() as store:
        store.create("w", shape=(8,), rule="sgd")
        for _ in range(100):
            started = store.start_commit({"lr": 1.0}, early=True, present=["w"])
            assert store.is_promised
            started.result(PATIENCE_S)
            store.push("w", np.ones(8, F32))
            store.finish()
            assert not store.is_promised
