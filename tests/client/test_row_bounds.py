"""Bounds of tables: eviction and admission are those of the model, on any number of shards; full tables; options."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.errors import BadArgument, BadHyper, DeadlineExceeded, TableFull
from psstore.types import PARTITION_BITS
from tests.support.bounded_tables import BoundedTables
from tests.support.cluster import Cluster, at_once, clusters
from tests.support.row_model import hash_of

pytestmark = pytest.mark.one_loop

F32 = np.float32


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_come_and_go_as_the_model_has_them(shards: int) -> None:
    with psstore.connect(f"local://?shards={shards}", rank=0, num_workers=1) as store:
        tables = BoundedTables(store)
        for _ in range(5):
            tables.train(store, 12)
            tables.check(store)
        tables.check_counts(store)
        for name, model in tables.models.items():
            assert model.evicted > 100 or not model.spec.evict, name  # the test is of something
            assert model.refused > 100 or name not in ("after", "lot"), name
        assert tables.num_full > 10


def test_contributions_of_several_workers_count_each() -> None:
    with clusters("local") as start:
        workers = start(shards=2, workers=2).workers()
        tables = BoundedTables(workers[0])
        for number in range(12):
            given = tables.push(workers)
            at_once(*[lambda one=one: one.commit({"lr": 1.0}) for one in workers])
            tables.decided(given, num_members=2)
            if number % 4 == 3:
                tables.check(workers[1])


def test_a_snapshot_has_rows_that_were_evicted_since() -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", init="constant(5)", max_rows=64 * 4, evict="lru")
        push(store, range(100))
        with store.snapshot() as view:
            for first in range(100, 2000, 100):
                push(store, range(first, first + 100))
                assert_array_equal(view.keys("t"), np.arange(100, dtype=np.uint64))
                assert_array_equal(view.pull_rows("t", range(120)), np.repeat([[4], [5]], [100, 20], axis=0))
        assert store.keys("t").max() == 1999
        assert not np.isin(np.arange(100), store.keys("t")).any()


# ---- full tables ----------------------------------------------------------------------------------------


def push(store: Store, ids: Any) -> None:
    store.push_rows("t", ids, np.ones((len(ids), 1), F32))
    store.commit({"lr": 1.0})


def test_a_full_table_refuses_what_is_new_and_trains_what_is_there() -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", max_rows=64)
        store.create("w", np.zeros(1, F32), rule="sgd", group=1)
        ids = np.arange(300)
        with pytest.raises(TableFull, match=r"'t' is full: it may have 64 rows, 1 in each .*evict='lru'"):
            store.push_rows("t", ids, np.ones((300, 1), F32))
        store.push("w", np.ones(1, F32))
        store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), [-1])
        assert store.keys("t").size == 0  # nothing of the push that was refused counts
        push(store, [7])
        push(store, [7])
        with pytest.raises(TableFull):
            store.assign_rows("t", ids, np.ones((300, 1), F32))
        assert_array_equal(store.pull_rows("t", [7]), [[-2]])


def test_nothing_of_a_refused_push_counts_where_another_one_was_taken_before() -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", max_rows=64)
        store.create("w", np.zeros(1, F32), rule="sgd", group=1)
        store.push_rows("t", [7], np.ones((1, 1), F32))
        with pytest.raises(TableFull):
            store.push_rows("t", np.arange(40), np.ones((40, 1), F32))
        store.push("w", np.ones(1, F32))
        store.commit({"lr": 1.0})
        assert store.keys("t").size == 0
        push(store, [7])
        assert_array_equal(store.pull_rows("t", [7]), [[-1]])


def ids_of_partitions(count: int) -> list[list[int]]:
    """That many ids of each partition of a table."""
    ids: list[list[int]] = [[] for _ in range(1 << PARTITION_BITS)]
    for one in range(10_000):
        ids[hash_of(one) >> 64 - PARTITION_BITS].append(one)
    return [some[:count] for some in ids]


def test_a_table_is_not_promised_whose_push_some_partitions_have_taken_and_others_refused() -> None:
    """What is pushed in its place would count in the others only."""
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", max_rows=64)
        (first, *_), full, (other, *_), *_ = ids_of_partitions(2)
        with pytest.raises(TableFull):
            store.push_rows("t", [first, *full], np.ones((3, 1), F32))
        with pytest.raises(BadArgument, match=r"last push in this round has failed.* leave it out of present="):
            store.commit({"lr": 1.0}, present=["t"], early=True)
        store.push_rows("t", [other], np.ones((1, 1), F32))
        store.commit({"lr": 1.0}, present=["t"], early=True)
        store.finish()
        assert_array_equal(store.keys("t"), [other])


def test_rows_that_are_pushed_while_an_early_commit_is_on_its_way_are_decided_by_every_partition() -> None:
    """Some shards would know of the decision, which takes what there is room for, and some would refuse the push."""
    full = ids_of_partitions(2)
    with clusters("tcp") as start:
        store = start(shards=2).connect()
        store.create_table("t", dim=1, rule="sgd", max_rows=64)
        store.keys("t")
        ids = np.array(full).ravel()
        committing = store.start_commit({"lr": 1.0}, present=["t"], early=True)
        store.push_rows("t", ids, np.ones((ids.size, 1), F32))
        assert committing.result().round == 1
        store.finish()
        assert_array_equal(store.keys("t"), sorted(map(min, full)))
        assert sum(int(shard["rows_refused"]) for shard in store.stats()) == len(full)


def test_an_early_commit_waits_to_see_what_becomes_of_a_push_that_it_promises() -> None:
    full = ids_of_partitions(2)[0]

    async def train(cluster: Cluster) -> None:
        async with await cluster.connect_async() as store:
            await store.create_table("t", dim=1, rule="sgd", max_rows=64)
            await store.keys("t")
            pushing = asyncio.ensure_future(store.push_rows("t", full, np.ones((2, 1), F32)))
            await asyncio.sleep(0)
            with pytest.raises(BadArgument, match="last push in this round has failed"):
                await store.commit({"lr": 1.0}, present=["t"], early=True)
            with pytest.raises(TableFull):
                await pushing
            pushing = asyncio.ensure_future(store.push_rows("t", full[:1], np.ones((1, 1), F32)))
            await asyncio.sleep(0)
            await store.commit({"lr": 1.0}, present=["t"], early=True)
            assert pushing.done()
            await store.finish()
            assert_array_equal(await store.keys("t"), full[:1])

    with clusters("tcp") as start:
        asyncio.run(train(start(shards=2)))


def test_no_rows_are_pushed_after_an_early_commit_of_which_it_is_not_known_what_became() -> None:
    with clusters("local") as start:
        one, other = start(shards=2, workers=2).workers()
        one.create_table("t", dim=1, rule="sgd", max_rows=64)
        commit = partial(one.commit, {"lr": 1.0}, present=["t"], early=True)
        with pytest.raises(DeadlineExceeded):
            commit(wait_s=0.1)
        with pytest.raises(BadArgument, match="commit again, then push rows"):
            one.push_rows("t", [7], np.ones((1, 1), F32))
        committing = other.start_commit({"lr": 1.0})
        commit()
        one.push_rows("t", [7], np.ones((1, 1), F32))
        one.finish()
        assert committing.result().round == 1
        assert_array_equal(one.pull_rows("t", [7]), [[-0.5]])


def test_an_early_commit_that_was_refused_keeps_no_rows_back() -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", max_rows=64)
        with pytest.raises(BadHyper):
            store.commit({"speed": 1.0}, present=["t"], early=True)
        push(store, [7])
        assert_array_equal(store.keys("t"), [7])


def test_what_several_bring_at_once_beyond_the_bound_is_refused_and_counted() -> None:
    with clusters("local") as start:
        workers = start(shards=1, workers=2).workers()
        for one in workers:
            one.create_table("t", dim=1, rule="sgd", max_rows=64)
        ids = of_one_partition(2)
        for one, number in zip(workers, ids, strict=True):
            one.push_rows("t", [number], np.full((1, 1), 2, F32))
        at_once(*[lambda one=one: one.commit({"lr": 1.0}) for one in workers])
        assert_array_equal(workers[0].keys("t"), [min(ids)])
        assert workers[0].stats()[0]["rows_refused"] == 1
        with pytest.raises(TableFull):
            workers[0].push_rows("t", [max(ids)], np.ones((1, 1), F32))


def of_one_partition(count: int) -> list[int]:
    """Ids that are in one partition."""
    return [one for one in range(10_000) if hash_of(one) >> 58 == 9][:count]


def test_bytes_bound_as_many_rows_as_fit_them() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=4, rule="adagrad", max_bytes=1 << 20, evict="lfu")
        rows = store.describe("t").spec.rows
        assert rows is not None
        assert rows.max_rows == (1 << 20) // (8 + 16 + 16 + 4 + 12)


# ---- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_rows": 63}, "max_rows is 63; expected 64"),
        ({"max_rows": -1}, "max_rows is -1"),
        ({"max_rows": 1 << 40}, "max_rows"),
        ({"max_rows": 1.5}, "expected an integer"),
        ({"max_bytes": 10}, "max_bytes is 10; a row of 't' takes"),
        ({"max_bytes": 1 << 20, "max_rows": 100}, "expected one of them"),
        ({"evict": "lru"}, "needs a bound"),
        ({"evict": "fifo", "max_rows": 100}, "evict is 'fifo'; expected 'lru', 'lfu', 'ttl:N'"),
        ({"evict": "ttl:0"}, "ttl:N"),
        ({"evict": "ttl:"}, "ttl:N"),
        ({"evict": "ttl:9999999999"}, "ttl"),
        ({"evict": 3}, "expected a string"),
        ({"admit": "after:0"}, "after:K"),
        ({"admit": "after:256"}, "at most 255"),
        ({"admit": "sometimes"}, "probability:P"),
        ({"admit": "probability:x"}, "probability:P"),
        ({"admit": "probability:0"}, "more than 0"),
        ({"admit": "probability:nan"}, "more than 0"),
        ({"admit": "probability:1.1"}, "at most 1"),
    ],
    ids=str,
)
def test_bounds_that_can_not_be_are_refused(options: dict[str, Any], match: str) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        with pytest.raises(BadArgument, match=match):
            store.create_table("t", dim=1, rule="sgd", **options)
        assert store.keys() == []


def test_a_table_with_other_bounds_is_another_one() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd", max_rows=100, evict="lru")
        store.create_table("t", dim=1, rule="sgd", max_rows=100, evict="lru")
        for other in ({"max_rows": 200, "evict": "lru"}, {"max_rows": 100}, {}):
            with pytest.raises(BadArgument, match="in the store"):
                store.create_table("t", dim=1, rule="sgd", **other)
