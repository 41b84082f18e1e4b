"""Backup workers, bounded staleness and asynchrony, each under a schedule made to break it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.rounds import CommitResult
from psstore.client.store import Store
from tests.support.cluster import PATIENCE_S, TRANSPORTS, Cluster, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
NUM_ELEMS = 600_000
"""Three slices: on every shard of two."""


def start_training(cluster: Cluster) -> list[Store]:
    stores = cluster.workers()
    stores[0].create("w", shape=(NUM_ELEMS,), rule="sgd")
    return stores


def step(store: Store, gradient: float) -> CommitResult:
    store.push("w", np.full(NUM_ELEMS, gradient, F32))
    return store.commit({"lr": 1.0}, average=False)


def slices(store: Store) -> list[float]:
    """What a pull sees: one number per slice of `w`, as no slice is ever seen half updated."""
    pulled = store.pull("w")
    cut = store.describe("w").slice_elems
    seen = [pulled[begin : begin + cut] for begin in range(0, NUM_ELEMS, cut)]
    for values in seen:
        assert_array_equal(values, np.full(len(values), values[0]))
    return [float(values[0]) for values in seen]


def value(store: Store) -> float:
    """The one number that is in all of `w`, where every shard has to be at the same decision."""
    first, *rest = slices(store)
    assert rest == [first] * len(rest)
    return first


# ---- backup workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_backup_drops_the_late_one_alike_everywhere_and_it_catches_up(transport: str) -> None:
    with clusters(transport) as start, ThreadPoolExecutor(3) as pool:
        stores = start_training(start(shards=2, workers=3, mode="backup"))
        late = stores[1]
        for round_ in (1, 2):
            futures = [pool.submit(step, store, 1.0) for store in (stores[0], stores[2])]
            for future in futures:
                done = future.result(PATIENCE_S)
                assert (done.round, done.decision, done.late) == (round_, round_, False)
        assert value(stores[0]) == -4

        assert late.round == 1
        told = step(late, 1000.0)
        assert (told.round, told.late) == (1, True)
        assert late.round == 3, "it goes on with the round that is open"
        assert value(late) == -4, "what came too late counts on no shard"

        futures = [pool.submit(step, store, 1.0) for store in (late, stores[2])]
        assert all(not future.result(PATIENCE_S).late for future in futures)
        assert value(late) == value(stores[2]) == -6
        assert step(stores[0], 1000.0).late
        assert value(stores[0]) == -6


# ---- bounded staleness ------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("staleness", [1, 3])
def test_ssp_blocks_the_fast_worker_at_clock_plus_s_plus_one_and_not_before(transport: str, staleness: int) -> None:
    with clusters(transport) as start, ThreadPoolExecutor(1) as pool:
        fast, slow = start_training(start(shards=2, workers=2, mode="ssp", staleness=staleness))
        for round_ in range(1, staleness + 1):
            done = pool.submit(step, fast, 1.0).result(PATIENCE_S)
            assert done.round == round_, "not before"
            assert fast.staleness == round_
        blocked: Future[CommitResult] = pool.submit(step, fast, 1.0)
        wait_for_commits(slow, staleness + 1)
        assert not blocked.done(), f"{staleness + 1} rounds ahead"
        assert set(slices(slow)) <= {-staleness, -(staleness + 1.0)}, "what was committed, as far as it was carried"

        step(slow, 1.0)
        assert blocked.result(PATIENCE_S).round == staleness + 1
        assert fast.staleness == staleness
        assert value(fast) == -(staleness + 2)


def wait_for_commits(store: Store, count: int) -> None:
    """Until the coordinator has decided so many: an event to wait for, where waiting is what is under test."""
    while int(store.stats()[0]["decisions"]) < count:
        threading.Event().wait(0.01)


# ---- asynchrony -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_async_never_blocks(transport: str) -> None:
    with clusters(transport) as start:
        fast, slow = start_training(start(shards=2, workers=2, mode="async"))
        for round_ in range(1, 21):
            assert step(fast, 1.0).decision == round_
        assert fast.staleness == 20
        assert set(slices(slow)) <= {-19.0, -20.0}, "the last decision is with the fast worker alone, until it pulls"
        assert step(slow, 1.0).decision == 21
        assert value(slow) == -21


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_async_loses_nothing_when_all_push_at_once(transport: str) -> None:
    with clusters(transport) as start, ThreadPoolExecutor(3) as pool:
        stores = start_training(start(shards=2, workers=3, mode="async"))

        def work(store: Store) -> None:
            for _ in range(10):
                decision = step(store, 1.0).decision
                assert max(slices(store)) <= -decision, "at least what it has just committed"

        for future in [pool.submit(work, store) for store in stores]:
            future.result(PATIENCE_S)
        step(stores[0], 0.0)
        assert value(stores[0]) == -30
