"""Which rows a table has: its ids as of one decision, sorted, however many pages they come in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.errors import BadArgument, RuleMismatch, UnknownTensor
from tests.support.cluster import TRANSPORTS, StartCluster, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as starts:
        yield starts


def push(store: Store, ids: object, *, dim: int = 1) -> None:
    given = np.asarray(ids, np.uint64)
    store.push_rows("t", given, np.ones((len(given), dim), F32))
    store.commit({"lr": 1.0})


def test_keys_are_the_rows_that_decisions_have_made_sorted(start: StartCluster) -> None:
    cluster = start(shards=3)
    worker, reader = cluster.connect(), cluster.connect(role="client")
    worker.create_table("t", dim=1, rule="sgd")
    assert reader.keys("t").shape == (0,)
    reader.pull_rows("t", [5, 6])  # reading makes none
    push(worker, [2**64 - 1, 7, 0, 7])
    worker.push_rows("t", [8], np.ones((1, 1), F32))  # and no commit
    keys = reader.keys("t")
    assert keys.dtype == np.uint64
    assert_array_equal(keys, np.array([0, 7, 2**64 - 1], np.uint64))
    assert worker.keys() == ["t"]


def test_keys_of_a_snapshot_are_those_of_its_version() -> None:
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd")
        push(store, range(100))
        with store.snapshot() as view:
            push(store, range(50, 300))
            assert_array_equal(view.keys("t"), np.arange(100, dtype=np.uint64))
        assert_array_equal(store.keys("t"), np.arange(300, dtype=np.uint64))


def test_keys_of_many_pages_are_all_there() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd")
        ids = np.random.default_rng(1).integers(0, 2**63, 1_200_000, np.uint64)  # of 4 MiB: 524,288
        push(store, ids)
        assert_array_equal(store.keys("t"), np.unique(ids))


def test_keys_of_what_is_no_table_are_refused() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create("w", np.zeros(3, F32), rule="sgd")
        with pytest.raises(UnknownTensor):
            store.keys("t")
        with pytest.raises(RuleMismatch, match="no table"):
            store.keys("w")
        with pytest.raises(BadArgument, match="table"):
            store.keys(3)  # type: ignore[call-overload]
