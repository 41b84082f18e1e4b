"""Clipping by the global norm of the reduced gradient, over every transport."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from psstore.client.store import Store
from psstore.errors import BadArgument
from tests.support.cluster import Cluster, at_once, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
SIZES = {"large": 600_000, "small": 3, "single": 1, "none": 0}


def gradients(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(size, dtype=F32) for name, size in SIZES.items()}


def create(store: Store) -> None:
    for name, size in SIZES.items():
        store.create(name, np.zeros(size, F32), rule="sgd")


def norm_of(arrays: dict[str, np.ndarray[Any, Any]]) -> float:
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values()))


def test_the_norm_is_that_of_all_tensors_and_the_step_is_clipped_to_it(store: Store) -> None:
    create(store)
    pushed = gradients(1)
    store.push_many(pushed)
    store.commit({"lr": 1.0}, max_norm=2.0)
    norm = store.global_norm()
    # float64 sums of the same squares in another order: a few units in the last place of 2^20 terms
    assert_allclose(norm, norm_of(pushed), rtol=1e-12)
    factor = F32(2.0 / (norm + 1e-6))
    for name, gradient in pushed.items():
        assert_array_equal(store.pull(name), -(gradient * factor))


def test_a_norm_below_the_limit_changes_no_bit(store: Store) -> None:
    create(store)
    pushed = gradients(2)
    store.push_many(pushed)
    store.commit({"lr": 1.0}, max_norm=1e9)
    store.global_norm()
    for name, gradient in pushed.items():
        assert_array_equal(store.pull(name), -gradient)


def test_a_pull_asks_for_the_norm_if_nobody_did(store: Store) -> None:
    create(store)
    pushed = gradients(3)
    store.push_many(pushed)
    store.commit({"lr": 1.0}, max_norm=1.0)
    factor = F32(1.0 / (norm_of(pushed) + 1e-6))
    assert_allclose(store.pull("small"), -(pushed["small"] * factor), rtol=1e-6)


def test_a_commit_asks_for_the_norm_of_the_round_before(store: Store) -> None:
    create(store)
    for _ in range(2):
        store.push("single", np.array([3.0], F32))
        store.commit({"lr": 1.0}, max_norm=1.0)
    store.commit({"lr": 1.0})
    assert_allclose(store.pull("single"), [-2.0], rtol=1e-6)


def test_a_norm_that_is_not_finite_skips_the_round(store: Store) -> None:
    create(store)
    store.push_many({**gradients(4), "single": np.array([np.inf], F32)})
    store.commit({"lr": 1.0}, max_norm=1.0)
    assert math.isinf(store.global_norm())
    for name, size in SIZES.items():
        assert_array_equal(store.pull(name), np.zeros(size, F32))


def test_what_was_not_pushed_is_not_in_the_norm(store: Store) -> None:
    create(store)
    store.push("single", np.array([3.0], F32))
    store.commit({"lr": 1.0}, max_norm=1.0)
    assert store.global_norm() == 3.0


def test_there_is_no_norm_without_a_commit_that_clips(store: Store) -> None:
    create(store)
    store.push("single", np.array([3.0], F32))
    store.commit({"lr": 1.0})
    with pytest.raises(BadArgument, match="commit with max_norm= first"):
        store.global_norm()


def test_workers_find_the_same_bits_whatever_the_number_of_shards() -> None:
    found = set()
    for shards in (1, 3):
        with clusters("local") as start:
            found |= set(_norms(start(shards=shards, workers=2)))
    assert len(found) == 1


def _norms(cluster: Cluster) -> list[float]:
    def norm(store: Store) -> float:
        create(store)
        assert store.rank is not None
        store.push_many(gradients(store.rank))
        store.commit({"lr": 1.0}, max_norm=1.0)
        return store.global_norm()

    return at_once(*[partial(norm, store) for store in cluster.workers()])
