"""Several connections to each shard, side by side: the same results, over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.config import worker_environment
from psstore.errors import BadArgument
from psstore.types import TensorSpec
from tests.support.cluster import Cluster, at_once, clusters

pytestmark = pytest.mark.sockets

F32 = np.float32
CONNECTIONS = 3
SHAPES = {"large": (1_500_000,), "w": (1000, 300), "b": (7,), "empty": (0,)}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with clusters("tcp") as start:
        yield start(shards=2, workers=2)


def connect(cluster: Cluster, rank: int) -> psstore.Store:
    return psstore.connect(cluster.url, rank=rank, transport="tcp", connections=CONNECTIONS)


def num_connections(cluster: Cluster) -> list[int | float | str]:
    with psstore.connect(cluster.url, role="client", transport="tcp") as store:
        return [counters["connections"] for counters in store.stats()]


def test_rounds_over_several_connections_mean_the_same(cluster: Cluster) -> None:
    one, other = at_once(lambda: connect(cluster, 0), lambda: connect(cluster, 1))
    assert num_connections(cluster) == [2 * (CONNECTIONS + 1) + 1, 2 * CONNECTIONS + 1]  # each beats on one of its own
    specs = [TensorSpec(name=name, shape=shape, rule="sgd") for name, shape in SHAPES.items()]
    chance = np.random.default_rng(0)
    values = {name: np.zeros(shape, F32) for name, shape in SHAPES.items()}

    def train(store: psstore.Store, gradients: dict[str, np.ndarray]) -> list[np.ndarray]:
        store.push_many(gradients)
        store.commit({"lr": 1.0})
        return list(store.pull_many(list(SHAPES)))

    at_once(lambda: one.create_many(specs), lambda: other.create_many(specs))
    for _ in range(3):
        gradients = [{n: chance.standard_normal(s, F32) for n, s in SHAPES.items()} for _ in (one, other)]
        found = at_once(partial(train, one, gradients[0]), partial(train, other, gradients[1]))
        for name in SHAPES:
            values[name] -= (gradients[0][name] + gradients[1][name]) / F32(2)
        for pulled in found:
            for name, value in zip(SHAPES, pulled, strict=True):
                assert_array_equal(value, values[name])
    one.close()
    other.close()


def test_writes_of_one_tensor_keep_their_order(cluster: Cluster) -> None:
    with psstore.connect(cluster.url, role="client", transport="tcp", connections=CONNECTIONS) as store:
        names = [f"t{index}" for index in range(2 * CONNECTIONS)]
        for name in names:
            store.create(name, shape=(300_000,), rule="assign")
        for count in range(10):
            started = [store.start_push_many({name: np.full(300_000, count, F32)}) for name in names]
            assert [value[-1] for value in store.pull_many(names)] == [count] * len(names)
            for one in started:
                one.result()


def test_what_stays_on_this_machine_has_one_connection(cluster: Cluster) -> None:
    with psstore.connect(cluster.url, role="client", connections=CONNECTIONS) as store:
        assert [counters["connections"] for counters in store.stats()] == [1, 1]


def test_number_of_connections_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_environment({"PSSTORE_CONNECTIONS": "4"}).connections == 4
    monkeypatch.setenv("PSSTORE_CONNECTIONS", "0")
    with pytest.raises(BadArgument, match="PSSTORE_CONNECTIONS is '0'; expected 1 to 64"):
        psstore.connect("ps://127.0.0.1:1")
    monkeypatch.delenv("PSSTORE_CONNECTIONS")
    with pytest.raises(BadArgument, match=r"^connections is 65; expected 1 to 64"):
        psstore.connect("ps://127.0.0.1:1", connections=65)


def test_a_launcher_says_how_long_workers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_environment({}).wait_s == 300.0
    assert worker_environment({"PSSTORE_WAIT_S": "660"}).wait_s == 660.0
    monkeypatch.setenv("PSSTORE_WAIT_S", "-1")
    with pytest.raises(BadArgument, match="PSSTORE_WAIT_S is '-1'; expected a positive number of seconds"):
        psstore.connect("local://")
