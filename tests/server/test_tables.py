"""Tables of rows that outlive processes: checkpoints into other numbers of shards, and standbys."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import LocalStore
from psstore.checkpoint.exchange.exporting import export_checkpoint
from psstore.checkpoint.exchange.safetensors_file import read_safetensors
from psstore.checkpoint.place import open_place
from psstore.checkpoint.reader import verify
from psstore.client.store import Store
from psstore.config import Transport
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually

F32 = np.float32
DIM = 24
ALL = np.arange(6000)
TABLES = {name: (name, "float32") for name in ("sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl")}
TABLES["narrow"] = "adagrad", "bfloat16"
"""Name -> its rule, and what its rows are kept in."""

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@contextlib.contextmanager
def training(*flags: str, shards: int = 1) -> Iterator[Store]:
    """A worker of a store of processes, with the tables."""
    with (
        StoreProcess("--shards", str(shards), *flags) as served,
        psstore.connect(served.url, wait_s=PATIENCE_S) as store,
    ):
        create(store)
        yield store


def create(store: Store) -> None:
    for group, (name, (rule, dtype)) in enumerate(TABLES.items()):
        store.create_table(name, dim=DIM, rule=rule, dtype=dtype, init="normal(0, 1)", seed=5, group=group)
    store.create("w", np.zeros(100, F32), rule="sgd", group=9)


def step(store: Store, number: int) -> None:
    draw = np.random.default_rng(number)
    for name in TABLES:
        ids = draw.choice(ALL, 700)
        store.push_rows(name, ids, draw.standard_normal((700, DIM), dtype=F32))
    store.push("w", np.ones(100, F32))
    store.commit({"lr": 0.1})


def rows(store: Store) -> list[Any]:
    return [store.pull_rows(name, ALL) for name in TABLES] + [store.pull("w")]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_array_equal(one, other)


def test_a_checkpoint_goes_on_with_the_same_bytes_in_any_number_of_shards(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with training(shards=2) as store:
        for number in range(1, 5):
            step(store, number)
        store.checkpoint(url)
        there = rows(store)
        for number in range(5, 8):  # what comes later is not in it
            step(store, number)
        expected = rows(store)
    manifest = verify(open_place(url).place.storage, 4)
    assert manifest.version == 4
    for shards in (1, 2, 5):
        with training("--restore", url, shards=shards) as store:
            assert_same(rows(store), there)
            for number in range(5, 8):
                step(store, number)
            assert_same(rows(store), expected)


def test_a_checkpoint_that_is_written_beside_training_is_of_one_decision(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    seen: dict[int, list[Any]] = {}
    with training(shards=3) as store:
        step(store, 1)
        seen[1] = rows(store)
        with ThreadPoolExecutor(1) as beside:
            written = beside.submit(store.checkpoint, url)
            for number in range(2, 200):
                step(store, number)
                seen[number] = rows(store)
                if written.done() and number > 4:
                    break
            version = written.result()
    with training("--restore", url, shards=2) as store:
        assert_same(rows(store), seen[version])


def test_tables_of_a_checkpoint_are_exported_as_a_store_exports_them(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with training(shards=2) as store:
        for number in range(1, 4):
            step(store, number)
        store.checkpoint(url)
        keys = {name: store.keys(name) for name in TABLES}
        pulled = {name: store.pull_rows(name, keys[name]) for name in TABLES}
        for name in TABLES:
            store.export_table(name, tmp_path / f"{name}.safetensors")
    with open_place(url).place.open(3) as checkpoint:
        model, tables = export_checkpoint(checkpoint, tmp_path / "out", form="safetensors")
    assert set(read_safetensors(model)) == {"w"}
    exported = read_safetensors(tables)
    for table in TABLES:
        assert_array_equal(exported[f"ids/{table}"], keys[table])
        assert_array_equal(exported[f"rows/{table}"], pulled[table])
        for name, array in read_safetensors(tmp_path / f"{table}.safetensors").items():
            assert_array_equal(exported.pop(name), array)
    assert not exported


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_shard_that_dies_is_led_by_its_standby_with_all_rows(transport: Transport) -> None:
    with LocalStore(shards=2, workers=1) as server, server.connect() as store:
        create(store)
        for number in range(1, 9):
            step(store, number)
        expected = rows(store)
    with (
        StoreProcess("--shards", "2", "--standbys", "1") as served,
        psstore.connect(served.url, transport=transport, wait_s=PATIENCE_S) as store,
    ):
        create(store)
        for number in range(1, 9):
            if number % 3 == 0:  # filled with rows, and with what is staged
                assert eventually(lambda: [one["standbys"] for one in store.stats()] == [1, 1])
                store.push_rows("sgd", [1], np.ones((1, DIM), F32))
                os.kill(int(store.stats()[number // 3 % 2]["process"]), signal.SIGKILL)
            step(store, number)
        assert_same(rows(store), expected)
