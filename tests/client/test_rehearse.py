"""Rehearsals: a read and a write that go all the way, and change nothing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.local import LocalStore
from psstore.errors import NotInitialised, OutOfMemory, UnknownTensor
from psstore.types import TensorSpec

F32 = np.float32
SIZE = 100_000
"""Elements: two slices, of which each shard has one."""


def test_rehearse_writes_all_of_a_tensor_and_changes_nothing() -> None:
    with psstore.connect("local://?shards=2") as store:
        value = np.arange(SIZE, dtype=F32)
        store.create("w", value, rule="sgd")
        store.push("w", np.ones(SIZE, F32))
        store.commit({"lr": 1.0})
        store.push("w", np.ones(SIZE, F32))
        before = store.stats()
        store.rehearse("w")
        after = store.stats()
        for figure, grows_by in (("duplicates", 2), ("received_bytes", 4 * SIZE), ("sent_bytes", 4 * SIZE)):
            assert sum(int(one[figure]) for one in after) - sum(int(one[figure]) for one in before) == grows_by
        same = ("memory_bytes", "staged_bytes", "version", "writes", "pushes", "initialised")
        assert [[one[figure] for figure in same] for one in after] == [
            [one[figure] for figure in same] for one in before
        ]
        assert store.version_of("w") == 1
        assert_array_equal(store.pull("w"), value - 1)
        store.commit({"lr": 1.0})  # of what was pushed before
        assert_array_equal(store.pull("w"), value - 2)


def test_rehearse_of_a_tensor_whose_first_value_is_awaited_does_not_send_one() -> None:
    with psstore.connect("local://", wait_s=0.1) as store:
        spec = TensorSpec(name="w", shape=(4,), rule="sgd", zeros=False)
        store.create_many([spec], offer=False)
        with pytest.raises(NotInitialised):
            store.rehearse("w")
        store.create_many([spec], [np.ones(4, F32)])
        assert_array_equal(store.pull("w"), np.ones(4, F32))
        store.drop("w")
        with pytest.raises(UnknownTensor):
            store.rehearse("w")


def test_rehearse_comes_through_with_values_that_may_not_be_written() -> None:
    with LocalStore(refuse_non_finite=True) as local, local.connect() as store:
        store.create("w", np.full(4, 3e38, F32), rule="sgd")
        store.push("w", np.full(4, -3e38, F32))
        store.commit({"lr": 10.0})
        assert not np.isfinite(store.pull("w")).any()
        store.rehearse("w")


def test_rehearse_fails_where_a_push_has_no_room() -> None:
    with psstore.connect("local://?max_memory=4MiB") as store:
        store.create("w", np.zeros(SIZE, F32), rule="sgd")
        for i in range(11):
            with contextlib.suppress(OutOfMemory):
                store.create(f"w{i}", np.zeros(SIZE, F32), rule="sgd")
        store.pull("w")
        with pytest.raises(OutOfMemory):
            store.rehearse("w")
