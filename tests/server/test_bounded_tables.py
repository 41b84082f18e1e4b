"""Bounded tables that outlive processes: eviction and admission go on as the model has them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import psstore
from psstore.errors import RolledBack
from tests.support.bounded_tables import BoundedTables
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually, reshard

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def test_a_checkpoint_in_another_number_of_shards_evicts_and_admits_the_same(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with (
        StoreProcess("--shards", "2") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables = BoundedTables(store)
        tables.train(store, 24)
        store.checkpoint(url)
    with (
        StoreProcess("--shards", "3", "--restore", url) as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables.check(store)
        tables.train(store, 24)
        tables.check(store)


def test_a_standby_that_leads_evicts_and_admits_the_same() -> None:
    with (
        StoreProcess("--shards", "1", "--standbys", "1") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables = BoundedTables(store)
        for _ in range(2):  # a standby from the first decision on, and one that was filled
            tables.train(store, 12)
            assert eventually(lambda: store.stats()[0]["standbys"] == 1)
            given = tables.push([store])
            os.kill(int(store.stats()[0]["process"]), signal.SIGKILL)
            store.commit({"lr": 1.0})
            tables.decided(given)
            tables.train(store, 6)
            tables.check(store)


def test_a_store_that_is_resharded_evicts_and_admits_the_same() -> None:
    with (
        StoreProcess("--shards", "3") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables = BoundedTables(store)
        tables.train(store, 12)
        reshard(served.url, 2, timeout_s=PATIENCE_S).check_returncode()
        with pytest.raises(RolledBack):
            store.keys("lru")
        store.reconnect()
        tables.check(store)
        tables.train(store, 12)
        tables.check(store)
