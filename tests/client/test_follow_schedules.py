"""Readers that follow have the bits of a whole pull of their version: whatever they missed, and while workers train."""

from __future__ import annotations

import threading
import time
from typing import Literal

import numpy as np
import pytest

from psstore import FollowingReader
from psstore.types import TensorSpec
from tests.client.follow_schedules import NAMES, run
from tests.support.cluster import PATIENCE_S, at_once, clusters

NUM_SCHEDULES = 200

pytestmark = pytest.mark.one_loop


def test_whatever_readers_miss_they_have_the_bits_of_a_whole_pull() -> None:
    found = run(range(NUM_SCHEDULES))
    assert found.by_changes > NUM_SCHEDULES / 10
    assert found.wholes > NUM_SCHEDULES / 10


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(("mode", "shards"), [("sync", 3), ("async", 2)])
def test_no_version_is_torn_while_workers_train(mode: str, shards: int, transport: Literal["tcp", "shm"]) -> None:
    """Every worker adds the same to all elements: in a whole version all are equal, and the number of the version says
    how many steps were taken. Frames are of 4 MiB: two from each shard, which are seldom of one decision."""
    shape = (2_500_000,)
    with clusters(transport) as start:
        cluster = start(shards=shards, workers=2, mode=mode)
        workers = cluster.workers()
        workers[0].create_many([TensorSpec(name=name, shape=shape, rule="sgd") for name in NAMES[:2]])
        over = threading.Event()

        def train(rank: int) -> None:
            while not over.is_set():
                workers[rank].push_many({name: np.ones(shape, np.float32) for name in NAMES[:2]})
                workers[rank].commit({"lr": 1.0}, average=False)
            workers[rank].leave()

        def read() -> list[tuple[int, set[float]]]:
            found: list[tuple[int, set[float]]] = []
            try:
                with FollowingReader(cluster.connect(role="client"), NAMES[:2], None) as reader:
                    began = time.monotonic()
                    while len(found) < 5 and time.monotonic() - began < PATIENCE_S:
                        version = reader.next()
                        values = np.concatenate([np.unique(value) for value in version.values.values()])
                        found.append((version.number, set(values.tolist())))
                    reader.verify()
            finally:
                over.set()
            return found

        versions = at_once(*[lambda rank=rank: train(rank) for rank in range(2)], read)[-1]
        assert versions is not None
        assert len(versions) == 5
        steps_of_a_round = 2 if mode == "sync" else 1
        for number, values in versions:
            assert values == {-float(number * steps_of_a_round)}
