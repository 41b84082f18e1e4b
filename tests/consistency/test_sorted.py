"""Tensors that are reduced by a median or a trimmed mean over the workers: numpy's bits, in each mode with rounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from numpy.testing import assert_array_equal

from psstore.client.local import LocalStore
from psstore.client.store import Store
from psstore.types import TensorSpec
from tests.support.cluster import at_once

Array = npt.NDArray[np.float32]

F32 = np.float32
SHAPE = (300, 300)
"""Several slices, so that each shard has one."""

WORKERS = 5
SORTED = {"median": 0, "trimmed_mean": 1}
PLAIN = {"lr": 1.0}


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    with LocalStore(3, workers=WORKERS) as local:
        yield workers_of(local)


def workers_of(local: LocalStore, count: int = WORKERS) -> list[Store]:
    return [local.connect(rank=rank) for rank in range(count)]


def gradient(rank: int, round_: int) -> Array:
    drawn: Array = np.random.default_rng((rank, round_)).standard_normal(SHAPE, F32)
    return drawn


def reduced(gradients: Sequence[Array], reduction: str) -> Array:
    """As numpy has it: the mean of those that are left, in ascending order."""
    ordered = np.sort(np.stack(gradients), axis=0)
    dropped = (len(ordered) - 1) // 2 if reduction == "median" else min(SORTED[reduction], (len(ordered) - 1) // 2)
    total, *more = ordered[dropped : len(ordered) - dropped]
    for row in more:
        total = total + row
    mean: Array = total / F32(1 + len(more))
    return mean


def commit(stores: Sequence[Store], values: Sequence[Array], **how: float | bool) -> None:
    """A round of all: each pushes its value to each tensor that there is, and commits."""

    def one(store: Store, value: Array) -> None:
        store.push_many(dict.fromkeys(store.keys(), value))
        store.commit(PLAIN, **how)  # type: ignore[arg-type]

    at_once(*[lambda s=s, v=v: one(s, v) for s, v in zip(stores, values, strict=True)])


def create(store: Store, **fields: object) -> None:
    specs = [
        TensorSpec(name=reduction, shape=SHAPE, rule="sgd", reduction=reduction, trim=trim, **fields)  # type: ignore[arg-type]
        for reduction, trim in SORTED.items()
    ]
    store.create_many(specs)


def test_a_step_is_that_of_numpy_whatever_the_shards_and_who_is_who() -> None:
    results: list[bytes] = []
    for shards, order in itertools.product((1, 3), ((0, 1, 2, 3, 4), (3, 1, 4, 0, 2))):
        with LocalStore(shards, workers=WORKERS) as local:
            stores = workers_of(local)
            create(stores[0])
            commit(stores, [gradient(rank, 1) for rank in order])
            found = stores[0].pull_many(list(SORTED))
            for name, value in zip(SORTED, found, strict=True):
                assert_array_equal(value, -reduced([gradient(rank, 1) for rank in range(WORKERS)], name))
            results.append(b"".join(np.asarray(value).tobytes() for value in found))
    assert len(set(results)) == 1


def test_one_worker_that_sends_anything_moves_no_element_beyond_the_others(stores: list[Store]) -> None:
    create(stores[0])
    for number, wrong in enumerate((1e30, -np.inf, np.nan), 1):
        honest = [gradient(rank, number) for rank in range(WORKERS - 1)]
        before = stores[0].pull_many(list(SORTED))
        commit(stores, [*honest, np.full(SHAPE, wrong, F32)])
        for was, now in zip(before, stores[0].pull_many(list(SORTED)), strict=True):
            step = np.asarray(was) - np.asarray(now)
            slack = 1e-5  # of the subtraction from what was there
            assert (np.min(honest, axis=0) - slack <= step).all()
            assert (step <= np.max(honest, axis=0) + slack).all()


def test_weights_do_not_count_and_loss_scales_are_taken_out(stores: list[Store]) -> None:
    stores[0].create("w", shape=(1,), rule="sgd", reduction="median")

    def one(store: Store) -> None:
        rank = store.rank or 0
        scale = 2.0**rank
        store.push("w", np.array([rank * scale], F32))
        store.commit(PLAIN, weight=1.0 + 9 * rank, loss_scale=scale)

    at_once(*[lambda s=s: one(s) for s in stores])
    assert stores[0].pull("w") == -2


def test_a_sum_is_the_median_times_the_workers(stores: list[Store]) -> None:
    stores[0].create("w", shape=(1,), rule="sgd", reduction="median")
    commit(stores, [np.array([rank], F32) for rank in range(WORKERS)], average=False)
    assert stores[0].pull("w") == -2 * WORKERS


def test_the_norm_and_what_is_clipped_are_of_what_is_left(stores: list[Store]) -> None:
    stores[0].create("w", shape=(2,), rule="sgd", reduction="median")
    values = [np.array([6, 8], F32)] * 3 + [np.array([1e6, -1e6], F32)] * 2

    def one(store: Store, value: Array) -> float:
        store.push("w", value)
        store.commit(PLAIN, max_norm=5.0)
        return store.global_norm()

    norms = at_once(*[lambda s=s, v=v: one(s, v) for s, v in zip(stores, values, strict=True)])
    assert norms == [10.0] * WORKERS
    assert_array_equal(stores[0].pull("w"), -np.array([6, 8], F32) * F32(5.0 / (10.0 + 1e-6)))


def test_a_skipped_round_leaves_all_as_it_was(stores: list[Store]) -> None:
    create(stores[0])
    commit(stores, [gradient(rank, 1) for rank in range(WORKERS)], non_finite=True)
    assert not np.any(stores[0].pull("median"))


@pytest.mark.parametrize(("backups", "values"), [(1, (1, 2, 1e6)), (2, (1, 3))])
def test_of_a_quorum_those_who_are_in_the_round_are_sorted(backups: int, values: Sequence[float]) -> None:
    """Of three, and of two, whom a trim of one would leave nobody of: their median is their mean."""
    with LocalStore(2, workers=4, mode="backup", backups=backups) as local:
        stores = workers_of(local, 4)
        stores[0].create("w", shape=(1,), rule="sgd", reduction="trimmed_mean", trim=1)
        commit(stores[: len(values)], [np.array([value], F32) for value in values])
        assert stores[0].pull("w") == -2


def test_who_has_no_gradient_of_a_tensor_counts_as_zeros(stores: list[Store]) -> None:
    stores[0].create("w", shape=(1,), rule="sgd", reduction="median")

    def one(store: Store) -> None:
        if store.rank == 4:
            store.push("w", np.array([1e6], F32))
        store.commit(PLAIN)

    at_once(*[lambda s=s: one(s) for s in stores])
    assert stores[0].pull("w") == 0
    assert stores[0].version == 1


def test_codecs_and_early_rounds_are_sorted_as_well(stores: list[Store]) -> None:
    stores[0].create("w", shape=(512,), rule="sgd", reduction="median")

    def one(store: Store) -> None:
        store.commit(PLAIN, present=["w"], early=True)
        store.push("w", np.full(512, 127.0 * (store.rank or 0), F32), codec="int8")
        store.finish()

    at_once(*[lambda s=s: one(s) for s in stores])
    assert (np.asarray(stores[0].pull("w")) == -254).all()
