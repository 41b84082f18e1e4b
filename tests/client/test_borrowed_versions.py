"""Borrowed values of one version, from however many frames they come, while workers train."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, at_once, clusters

NAMES = ["a", "b"]
NUM_ELEMS = 2_500_000
"""Three frames from each of two shards, which are seldom of one decision."""
NUM_LOANS = 40
"""Of so many, whose tensors were each as it was, five were torn in mode sync, and fourteen in async."""

pytestmark = [pytest.mark.one_loop, pytest.mark.sockets]


def seen(values: Mapping[str, np.ndarray[Any, Any]]) -> set[float]:
    return {float(end) for value in values.values() for end in (value.min(), value.max())}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_loan_is_torn_while_workers_train_and_none_changes(mode: str) -> None:
    """Every worker adds the same to all elements: of one version all are equal."""
    with clusters("shm") as start:
        cluster = start(shards=2, workers=2, mode=mode)
        workers = cluster.workers()
        workers[0].create_many([TensorSpec(name=name, shape=(NUM_ELEMS,), rule="sgd") for name in NAMES])
        reader = cluster.connect(role="client")
        over = threading.Event()

        def train(rank: int) -> None:
            while not over.is_set():
                workers[rank].push_many({name: np.ones(NUM_ELEMS, np.float32) for name in NAMES})
                workers[rank].commit({"lr": 1.0})
            workers[rank].leave()

        def read() -> None:
            began, versions, num_loans = time.monotonic(), set[float](), 0
            try:
                while num_loans < NUM_LOANS or len(versions) <= NUM_LOANS / 10:
                    with reader.borrow(NAMES) as borrowed:
                        at_first = seen(borrowed)
                        assert len(at_first) == 1
                        assert seen(borrowed) == at_first
                        versions |= at_first
                    num_loans += 1
                    assert time.monotonic() - began < PATIENCE_S
            finally:
                over.set()

        at_once(*[lambda rank=rank: train(rank) for rank in range(2)], read)
