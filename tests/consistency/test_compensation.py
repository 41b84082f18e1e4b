"""Tensors whose gradients are made up for the steps that others took, from what each worker was sent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from psstore.client.local import LocalStore
from psstore.client.store import Store
from psstore.types import UNBOUNDED

Array = npt.NDArray[np.float32]

F32 = np.float32
SHAPE = (300, 300)
"""Several slices, so that each shard has one."""

STRENGTH = 0.25
PLAIN = {"lr": 0.5}


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    with LocalStore(3, workers=2, mode="async") as local:
        yield workers_of(local)


def workers_of(local: LocalStore) -> list[Store]:
    stores = [local.connect(rank=rank) for rank in range(2)]
    stores[0].create("w", np.ones(SHAPE, F32), rule="sgd", compensation=STRENGTH)
    return stores


def gradient(*numbers: int) -> Array:
    drawn: Array = np.random.default_rng(numbers).standard_normal(SHAPE, F32)
    return drawn


def step(store: Store, pushed: Array) -> None:
    store.push("w", pushed)
    store.commit(PLAIN)


def stepped(value: Array, pushed: Array, base: Array) -> npt.NDArray[np.float64]:
    """In float64, from the paper."""
    wide = pushed.astype(np.float64)
    found: npt.NDArray[np.float64] = value - 0.5 * (wide + STRENGTH * wide**2 * (value.astype(np.float64) - base))
    return found


def assert_close(found: Array, expected: npt.NDArray[np.float64]) -> None:
    """Seven roundings of numbers below 16, each of half an ulp at most."""
    assert np.abs(expected).max() < 16
    assert_allclose(found, expected, rtol=0, atol=7 * 2.0**-21)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_steps_are_those_of_the_paper_whatever_the_shards(mode: str) -> None:
    results = []
    for shards in (1, 3):
        with LocalStore(shards, workers=2, mode=mode, staleness=4 if mode == "ssp" else UNBOUNDED) as local:
            stores, reader = workers_of(local), local.connect(role="client")
            base = [store.pull("w") for store in stores]
            for number, rank in enumerate((0, 1, 1, 0, 1, 0, 0, 1)):
                value, pushed = reader.pull("w"), gradient(number, rank)
                step(stores[rank], pushed)
                assert_close(reader.pull("w"), stepped(value, pushed, base[rank]))
                if number % 3:
                    base[rank] = stores[rank].pull("w")
            results.append(np.asarray(reader.pull("w")).tobytes())
    assert results[0] == results[1]


def test_what_a_reader_or_a_snapshot_is_sent_is_no_base(stores: list[Store]) -> None:
    first, second = stores
    base = first.pull("w")
    step(second, gradient(1))
    with first.snapshot() as view:
        value = view.pull("w")
    step(first, gradient(2))
    assert_close(second.pull("w"), stepped(value, gradient(2), base))


def test_a_worker_that_was_sent_nothing_is_taken_as_it_is(stores: list[Store]) -> None:
    first, second = stores
    second.pull("w")
    step(second, gradient(1))
    before = second.pull("w")
    step(first, gradient(2))
    assert_array_equal(second.pull("w"), before - F32(0.5) * gradient(2))


def test_alone_a_worker_has_the_bits_of_one_that_is_not_compensated(stores: list[Store]) -> None:
    stores[0].create("plain", np.ones(SHAPE, F32), rule="sgd")
    for number in range(3):
        stores[0].pull("w")
        stores[0].push_many({"w": gradient(number), "plain": gradient(number)})
        stores[0].commit(PLAIN)
    assert_array_equal(stores[0].pull("w"), stores[0].pull("plain"))


def test_the_store_tells_what_bases_take(stores: list[Store]) -> None:
    def base_bytes() -> int:
        return sum(int(shard["base_bytes"]) for shard in stores[0].stats())

    num_bytes = 4 * SHAPE[0] * SHAPE[1]
    for store in stores:
        store.pull("w")
    assert base_bytes() == 0, "a base that is the value costs nothing"
    step(stores[1], gradient(1))
    stores[1].pull("w")
    assert base_bytes() == num_bytes
