"""Checkpoints that have what changed of tables: what is read of one is what a whole one has that is of the same cut."""

from __future__ import annotations

from pathlib import Path

import pytest

import psstore
from psstore.checkpoint.manifest import Manifest
from psstore.checkpoint.place import open_checkpoint, open_place
from tests.checkpoint.support import read_parts
from tests.support.bounded_tables import BoundedTables
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def manifests(place: Path) -> dict[int, Manifest]:
    """What is at a place, by version."""
    return {found.version: found.manifest for found in open_place(str(place)).place.list() if found.manifest}


def check_same(delta: str, whole: str) -> None:
    """Slots and bytes, to the order of the rows."""
    with open_checkpoint(delta) as first, open_checkpoint(whole) as second:
        assert sorted(first.slots()) == sorted(second.slots())
        assert read_parts(first, None) == read_parts(second, None)


def test_a_delta_is_read_as_the_whole_one_of_its_cut(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with (
        StoreProcess("--shards", "2", "--checkpoint", str(own), "--full-every", "4", "--keep", "2") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables = BoundedTables(store)
        for number in range(6):
            tables.train(store, 9)
            version = store.checkpoint()
            assert store.checkpoint(str(tmp_path / "whole")) == version
            bases = {one: found.base.version for one, found in manifests(own).items() if found.base}
            assert (version in bases) == (number not in (0, 4))
            check_same(f"{own}@{version}", f"{tmp_path / 'whole'}@{version}")
    with (
        StoreProcess("--shards", "3", "--restore", f"{own}@{version}") as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        tables.check(store)
