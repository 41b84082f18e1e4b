"""A cache of hot rows: what it gives is what a pull gives, bit for bit, and what has not changed does not travel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client.row_bounds import INDEX_BYTES
from psstore.client.store import Store
from psstore.errors import BadArgument, RuleMismatch, UnknownTensor
from tests.support.bounded_tables import BoundedTables
from tests.support.cluster import TRANSPORTS, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 16
IDS = np.arange(0, 900, 3, dtype=np.uint64)
ENOUGH = 1 << 20
MOST_HEAD_BYTES = 64 * (8 + 4 + 4)
"""What comes of 64 partitions without a row, of at most 32 ids each."""


@pytest.fixture(scope="module")
def server() -> Iterator[psstore.LocalStore]:
    with psstore.LocalStore(shards=2, workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def store(server: psstore.LocalStore) -> Iterator[Store]:
    with server.connect(rank=0) as store:
        yield store


@pytest.fixture
def reader(server: psstore.LocalStore) -> Iterator[Store]:
    """Has no cache."""
    with server.connect(role="client") as reader:
        yield reader


def train(store: Store, name: str, ids: Any, seed: int = 0) -> None:
    gradients = np.random.default_rng(seed).standard_normal((len(ids), DIM), dtype=F32)
    store.push_rows(name, ids, gradients)
    store.commit({"lr": 0.1})


def pulled_bytes(store: Store, call: Any) -> int:
    """Which the shards sent for that."""
    before = sum(int(one["sent_bytes"]) for one in store.stats())
    call()
    return sum(int(one["sent_bytes"]) for one in store.stats()) - before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_rows_that_have_changed_travel_again(transport: str) -> None:
    with clusters(transport) as start:
        store = start(shards=2).connect()
        store.create_table("t", dim=DIM, rule="sgd", init="normal(0, 1)")
        train(store, "t", IDS[::2])
        store.cache_rows("t", ENOUGH)
        row_bytes = 4 * DIM
        whole = pulled_bytes(store, lambda: store.pull_rows("t", IDS))
        assert len(IDS) * row_bytes <= whole <= len(IDS) * row_bytes + MOST_HEAD_BYTES
        assert pulled_bytes(store, lambda: store.pull_rows("t", IDS)) <= MOST_HEAD_BYTES
        train(store, "t", IDS[:40])
        store.assign_rows("t", IDS[-20:], np.ones((20, DIM), F32))
        changed = 60 * row_bytes
        assert changed <= pulled_bytes(store, lambda: store.pull_rows("t", IDS)) <= changed * 1.3 + MOST_HEAD_BYTES
        assert pulled_bytes(store, lambda: store.pull_rows("t", IDS)) <= MOST_HEAD_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", [None, "bf16", "fp16", "int8"])
def test_rows_are_those_of_a_pull_in_any_codec_and_out(
    store: Store, reader: Store, dtype: str, codec: str | None
) -> None:
    name = f"{dtype} {codec}"
    store.create_table(name, dim=DIM, rule="sgd", dtype=dtype, init="normal(0, 1)")
    store.cache_rows(name, ENOUGH, codec=codec)
    random = np.random.default_rng(1)
    for seed in range(6):
        train(store, name, random.choice(IDS, 50, replace=False), seed)
        ids = random.choice(IDS, 400)
        for asked in (codec, None, "int8"):  # the others pass it by
            assert_array_equal(store.pull_rows(name, ids, codec=asked), reader.pull_rows(name, ids, codec=asked))
        out, expected = (torch.empty(len(ids), DIM, dtype=torch.bfloat16) for _ in range(2))
        store.pull_rows(name, ids, codec=codec, out=out)
        assert torch.equal(out, reader.pull_rows(name, ids, codec=codec, out=expected))


@pytest.mark.parametrize("rows", [1, 40, 10_000])
def test_rows_are_right_whatever_has_room(rows: int) -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        tables = BoundedTables(store)
        for name, model in tables.models.items():
            row_bytes = model.spec.dim * (2 if model.is_narrow else 4)
            store.cache_rows(name, rows * (_core.RowCache.record_bytes(row_bytes) + INDEX_BYTES))
        for _ in range(8):
            tables.train(store, 4)
            tables.check(store)
            tables.check(store)


def test_what_it_has_saved_is_counted(store: Store) -> None:
    store.create_table("counted", dim=DIM, rule="sgd")
    store.cache_rows("counted", ENOUGH, codec="bf16")
    assert store.row_cache("counted") == (0, 0, 0, 0)
    assert store.row_cache("counted").hit_rate == 0
    store.pull_rows("counted", IDS[:100], codec="bf16")
    store.pull_rows("counted", np.repeat(IDS[50:150], 2), codec="bf16")
    store.pull_rows("counted", IDS[:100])  # passes it by
    assert store.row_cache("counted") == (150, 200, 50, 50 * 2 * DIM)
    assert store.row_cache("counted").hit_rate == 0.25
    train(store, "counted", IDS)
    store.pull_rows("counted", IDS[:100], codec="bf16")
    assert store.row_cache("counted") == (150, 300, 50, 50 * 2 * DIM)
    store.cache_rows("counted", 2 * ENOUGH, codec="bf16")
    assert store.row_cache("counted") == (0, 0, 0, 0)


def test_many_pulls_at_once_are_each_right() -> None:
    async def pull() -> None:
        async with await psstore.connect_async("local://?shards=2", rank=0, num_workers=1) as store:
            await store.create_table("t", dim=DIM, rule="sgd")
            values = np.random.default_rng(3).standard_normal((900, DIM), dtype=F32)
            await store.assign_rows("t", np.arange(900), values)
            await store.cache_rows("t", 100 * (4 * DIM + 40))
            random = np.random.default_rng(2)
            for _ in range(5):
                asked = [random.choice(IDS, 80) for _ in range(6)]
                found = await asyncio.gather(*(store.pull_rows("t", ids) for ids in asked))
                for ids, rows in zip(asked, found, strict=True):
                    assert_array_equal(rows, values[ids])

    asyncio.run(pull())


def test_a_table_that_is_created_anew_is_another_one(store: Store) -> None:
    for dim in (DIM, 2 * DIM):
        store.create_table("anew", dim=dim, rule="sgd", init=f"constant({dim})")
        store.cache_rows("anew", ENOUGH)
        for _ in range(2):
            assert_array_equal(store.pull_rows("anew", [5]), np.full((1, dim), dim, F32))
        store.drop("anew")
    store.create_table("anew", dim=DIM, rule="sgd", init="constant(7)")
    assert_array_equal(store.pull_rows("anew", [5]), np.full((1, DIM), 7, F32))


def test_nothing_is_kept_of_tables_that_are_gone() -> None:
    with psstore.connect("local://") as store:
        for step in range(3):
            store.create_table("gone", dim=DIM, rule="sgd", exist="overwrite")
            store.create_table(f"gone {step}", dim=DIM, rule="sgd")
            for name in ("gone", f"gone {step}"):
                store.cache_rows(name, ENOUGH)
                store.pull_rows(name, IDS)
            store.drop(f"gone {step}")
        store.drop("gone")
        assert not any("rows" in vars(cache) for cache in store._operations.tables._caches._by_name.values())
        store.create_table("gone", dim=DIM, rule="sgd")
        store.pull_rows("gone", IDS)
        assert store.row_cache("gone").num_rows == len(IDS)


def test_a_snapshot_reads_past_the_cache(store: Store) -> None:
    store.create_table("held", dim=DIM, rule="sgd", init="constant(2)")
    store.cache_rows("held", ENOUGH)
    store.pull_rows("held", IDS)
    with store.snapshot() as view:
        train(store, "held", IDS)
        now = store.pull_rows("held", IDS)
        assert_array_equal(view.pull_rows("held", IDS), np.full((len(IDS), DIM), 2, F32))
        assert_array_equal(store.pull_rows("held", IDS), now)


def test_it_ends_and_begins_anew_as_it_is_told(store: Store) -> None:
    store.create_table("told", dim=DIM, rule="sgd")
    whole = len(IDS) * 4 * DIM
    store.cache_rows("told", ENOUGH)
    store.pull_rows("told", IDS)
    store.cache_rows("told", ENOUGH)
    assert pulled_bytes(store, lambda: store.pull_rows("told", IDS)) < whole / 2, "as before"
    store.cache_rows("told", ENOUGH // 2)
    assert pulled_bytes(store, lambda: store.pull_rows("told", IDS)) >= whole
    store.cache_rows("told", 0)
    assert pulled_bytes(store, lambda: store.pull_rows("told", IDS)) == whole


def test_caches_that_can_not_be_are_refused(store: Store) -> None:
    store.create_table("refused", dim=DIM, rule="sgd")
    store.create("tensor", np.zeros(3, F32), rule="sgd", group=1)
    with pytest.raises(BadArgument, match=r"max_bytes is 99; a row of 'refused' takes 10\d"):
        store.cache_rows("refused", 99)
    with pytest.raises(BadArgument, match="expected an integer"):
        store.cache_rows("refused", 1.5)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="codec is 'sign'"):
        store.cache_rows("refused", ENOUGH, codec="sign")
    with pytest.raises(RuleMismatch):
        store.cache_rows("tensor", ENOUGH)
    with pytest.raises(UnknownTensor):
        store.cache_rows("nothing", ENOUGH)
    with pytest.raises(BadArgument, match=r"no rows of 'refused' are kept here; have them kept by cache_rows"):
        store.row_cache("refused")
    with pytest.raises(RuleMismatch):
        store.row_cache("tensor")
