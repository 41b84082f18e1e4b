"""Rows that are set: at once, exactly once, whether they were there or not, with state that starts anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.errors import BadArgument, DTypeMismatch, RuleMismatch, ShapeMismatch, UnknownTensor, VersionGone
from tests.support.cluster import TRANSPORTS, StartCluster, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 3


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as starts:
        yield starts


def drawn(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).standard_normal((count, DIM), dtype=F32)


def test_what_is_assigned_is_read_by_everybody_at_once(start: StartCluster) -> None:
    cluster = start(shards=3)
    worker, other = cluster.connect(), cluster.connect(role="client")
    worker.create_table("t", dim=DIM, rule="sgd", init="normal(0, 1)")
    worker.push_rows("t", [1, 2], drawn(1, 2))
    worker.commit({"lr": 1.0})
    ids, rows = np.array([2**64 - 1, 2, 500], np.uint64), drawn(2, 3)
    before = worker.pull_rows("t", [1])
    other.assign_rows("t", ids, rows)
    assert_array_equal(worker.pull_rows("t", ids), rows)
    assert_array_equal(worker.pull_rows("t", [1]), before)
    assert_array_equal(worker.keys("t"), np.array([1, 2, 500, 2**64 - 1], np.uint64))


def test_a_step_goes_on_from_what_was_assigned_and_waits_for_none(start: StartCluster) -> None:
    store = start(shards=2).connect()
    store.create_table("t", dim=DIM, rule="sgd")
    gradients = drawn(3, 2)
    store.push_rows("t", [1, 2], gradients)
    store.assign_rows("t", [1], np.full((1, DIM), 5, F32))
    store.commit({"lr": 1.0})  # of what was pushed before the assignment
    assert_array_equal(store.pull_rows("t", [1, 2]), np.array([[5], [0]], F32) - gradients)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "momentum", "ftrl"])
def test_state_starts_anew_as_that_of_a_new_row(rule: str) -> None:
    """Adam is left out: its steps are counted per table, and go on."""
    has_sums = rule not in ("sgd", "momentum")
    hypers = {"lr": 0.1, **({"initial_accumulator_value": 0.5} if has_sums else {})}
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule=rule, init="normal(0, 1)")
        ids = np.arange(40)
        first = store.pull_rows("t", ids)
        gradients = drawn(4, 40)
        store.push_rows("t", ids, gradients)
        store.commit(hypers)
        stepped_once = store.pull_rows("t", ids)
        store.push_rows("t", ids, drawn(5, 40))
        store.commit(hypers)
        store.assign_rows("t", ids[::-1], first[::-1])
        store.push_rows("t", ids, gradients)
        store.commit(hypers)
        assert_array_equal(store.pull_rows("t", ids), stepped_once)


def test_adam_begins_with_zeros() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="adam")
        for ids in ([1], [1], [1, 2]):
            if ids == [1, 2]:
                store.assign_rows("t", [1], np.zeros((1, DIM), F32))
            store.push_rows("t", ids, np.ones((len(ids), DIM), F32))
            store.commit({"lr": 0.1})
        assert_array_equal(*store.pull_rows("t", [1, 2]))


def test_a_snapshot_says_that_its_rows_are_gone() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        store.push_rows("t", [1], drawn(6, 1))
        store.commit({"lr": 1.0})
        with store.snapshot() as view:
            store.assign_rows("t", [1], drawn(7, 1))
            with pytest.raises(VersionGone):
                view.pull_rows("t", [1])
        with store.snapshot() as view:
            assert_array_equal(view.pull_rows("t", [1]), drawn(7, 1))


def test_an_assignment_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        store.create("w", np.zeros(3, F32), rule="sgd", group=1)
        with pytest.raises(ShapeMismatch, match=r"expected shape \(2, 3\)"):
            store.assign_rows("t", [1, 2], np.zeros((2, 4), F32))
        with pytest.raises(DTypeMismatch, match="float32"):
            store.assign_rows("t", [1], np.zeros((1, DIM), np.float64))
        with pytest.raises(BadArgument, match="id 7 comes twice"):
            store.assign_rows("t", [7, 1, 7], drawn(8, 3))
        for ids in ([1.0], [-1]):
            with pytest.raises((BadArgument, DTypeMismatch), match=r"\[0, 2\^64\)"):
                store.assign_rows("t", ids, drawn(8, 1))
        with pytest.raises(RuleMismatch, match="no table"):
            store.assign_rows("w", [1], drawn(8, 1))
        with pytest.raises(UnknownTensor):
            store.assign_rows("nowhere", [1], drawn(8, 1))
        store.assign_rows("t", [], np.zeros((0, DIM), F32))
        assert store.keys("t").size == 0
