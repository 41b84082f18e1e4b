"""Checkpoints that have what changed of tables: what is read of one is what a whole one of the same cut has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import psstore
from psstore.checkpoint.place import open_checkpoint
from psstore.checkpoint.url import folder_of
from psstore.client.store import Store
from psstore.errors import RolledBack
from tests.checkpoint.docs_reader import read_rows
from tests.checkpoint.support import read_parts
from tests.support.bounded_tables import BoundedTables
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually, reshard

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


class Places:
    """Where a store writes deltas, and where whole ones of the same decisions."""

    def __init__(self, folder: Path) -> None:
        self.own = str(folder / "own")
        self.whole = str(folder / "whole")
        self.version = 0

    def save(self, store: Store) -> bool:
        """Writes both of what the store is now, and holds the slots and bytes of the one to those of the other, to the
        order of the rows, and what the docs' reader makes of it. Returns whether the first is a delta."""
        self.version = store.checkpoint()
        assert store.checkpoint(self.whole) == self.version
        with (
            open_checkpoint(f"{self.own}@{self.version}") as own,
            open_checkpoint(f"{self.whole}@{self.version}") as whole,
        ):
            assert whole.manifest.base is None
            assert sorted(own.slots()) == sorted(whole.slots())
            parts = read_parts(own, None)
            assert parts == read_parts(whole, None)
            records = {slot.key: parts[slot.key][0] for slot in own.slots() if slot.num_rows}
            rows = read_rows(Path(self.own) / folder_of(self.version))
            assert {key: b"".join(of) for key, of in rows.items()} == records
            return own.manifest.base is not None


def test_a_delta_is_read_as_the_whole_one_of_its_cut(tmp_path: Path) -> None:
    places = Places(tmp_path)
    with (
        StoreProcess("--shards", "2", "--checkpoint", places.own, "--full-every", "3", "--keep", "2") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables = BoundedTables(store)
        for is_delta in (False, True, True, False, True):
            tables.train(store, 5)
            tables.assign(store)
            assert places.save(store) == is_delta
    with (
        StoreProcess("--shards", "3", "--restore", f"{places.own}@{places.version}") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables.check(store)
        tables.train(store, 5)
        tables.check(store)


def test_a_standby_that_leads_knows_what_has_changed_and_other_shards_begin_anew(tmp_path: Path) -> None:
    places = Places(tmp_path)
    flags = ("--shards", "2", "--standbys", "1", "--checkpoint", places.own, "--full-every", "9")
    with StoreProcess(*flags) as served, psstore.connect(served.url, wait_s=PATIENCE_S) as store:
        tables = BoundedTables(store)
        tables.train(store, 5)
        assert not places.save(store)
        for _ in range(2):  # a standby from the first decision on, and one that was filled
            assert eventually(lambda: [one["standbys"] for one in store.stats()] == [1, 1])
            given = tables.push([store])
            os.kill(int(store.stats()[1]["process"]), signal.SIGKILL)
            store.commit({"lr": 1.0})
            tables.decided(given)
            tables.train(store, 3)
            assert places.save(store)
        reshard(served.url, 3, timeout_s=PATIENCE_S).check_returncode()
        with pytest.raises(RolledBack):
            store.keys("lru")
        store.reconnect()
        tables.train(store, 3)
        assert not places.save(store)
        tables.train(store, 3)
        assert places.save(store)
        tables.check(store)


def test_a_delta_is_as_large_as_what_changed(tmp_path: Path) -> None:
    places = Places(tmp_path)
    with (
        StoreProcess("--shards", "2", "--checkpoint", places.own, "--full-every", "2") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        store.create_table("t", dim=64, rule="adagrad")
        for ids in (range(20_000), range(0, 20_000, 50)):
            store.push_rows("t", list(ids), [[1.0] * 64] * len(ids))
            store.commit({"lr": 1.0})
            places.save(store)
        with open_checkpoint(places.own) as delta, open_checkpoint(places.whole) as whole:
            record_bytes = whole.tensors["t"].record_bytes
            beside = delta.manifest.num_bytes - 20_000 * 8 - 400 * record_bytes
            assert whole.manifest.num_bytes > 20_000 * record_bytes
            assert 0 < beside < 400 * record_bytes
