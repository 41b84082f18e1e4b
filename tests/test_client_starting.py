"""Calls that are started and waited for later, over every transport."""

from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest
from cluster import PATIENCE_S
from numpy.testing import assert_array_equal

from psstore.client.store import Store
from psstore.errors import UnknownTensor

F32 = np.float32
ELEMS = 600_000


def test_pushes_that_were_started_count_in_the_round(store: Store) -> None:
    names = ["a", "b", "c"]
    for name in names:
        store.create(name, np.zeros(ELEMS, F32), rule="sgd")
    values = {name: np.full(ELEMS, i, F32) for i, name in enumerate(names)}
    started = [store.start_push_many({name: value}) for name, value in values.items()]
    wait(started, PATIENCE_S)
    store.commit({"lr": 1.0})
    for name, value in values.items():
        assert_array_equal(store.pull(name), -value)


def test_of_two_pushes_started_one_after_the_other_the_later_counts(store: Store) -> None:
    store.create("w", np.zeros(ELEMS, F32), rule="sgd")
    first, second = np.full(ELEMS, 1, F32), np.full(ELEMS, 2, F32)
    started = [store.start_push_many({"w": first}), store.start_push_many({"w": second})]
    wait(started, PATIENCE_S)
    store.commit({"lr": 1.0})
    assert_array_equal(store.pull("w"), -second)


def test_settle_waits_for_every_push_that_was_started(store: Store) -> None:
    store.create("w", np.zeros(ELEMS, F32), rule="sgd")
    started = [store.start_push_many({"w": np.full(ELEMS, i, F32)}) for i in range(5)]
    store.settle()
    assert all(future.done() for future in started)


def test_a_call_that_was_started_tells_its_error_when_it_is_asked(store: Store) -> None:
    started = store.start_push_many({"unheard": np.ones(1, F32)})
    with pytest.raises(UnknownTensor, match="'unheard'"):
        started.result(PATIENCE_S)
