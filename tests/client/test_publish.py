"""Weights that are made elsewhere: published as one version, which readers and followers have whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import LocalStore
from psstore.errors import BadArgument, NonFinite, NotAWorker, PsstoreError, RuleMismatch, ShapeMismatch, UnknownTensor
from tests.support.cluster import TRANSPORTS, Cluster, at_once, clusters

F32 = np.float32
ELEMS = 150_000
"""Three slices, on both shards."""

pytestmark = pytest.mark.one_loop


@pytest.fixture(params=[*TRANSPORTS, pytest.param("shm", marks=pytest.mark.sockets)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two shards and two workers."""
    with clusters(request.param) as start:
        yield start(shards=2, workers=2)


def test_what_all_workers_publish_is_one_version_for_who_follows(cluster: Cluster) -> None:
    """Each has a tensor of its own, and both have the same in all elements of a version."""
    workers = cluster.workers()
    names = ["a", "b"]

    def publish(rank: int, numbers: range) -> None:
        for number in numbers:
            assert workers[rank].publish({names[rank]: np.full(ELEMS, number, F32)}) == number

    def follow() -> None:
        with psstore.FollowingReader(cluster.connect(role="client"), names, None) as reader:
            while reader.version != 20:
                version = reader.next()
                assert {float(one) for value in version.values.values() for one in np.unique(value)} == {version.number}
            reader.verify()

    at_once(*(partial(publish, rank, range(1, 2)) for rank in range(2)))
    at_once(*(partial(publish, rank, range(2, 21)) for rank in range(2)), follow)


def test_bits_arrive_as_they_were_and_what_is_left_out_stays() -> None:
    special = np.array([-0.0, 1e-42, np.inf, -np.inf, np.nan, 3.5], F32)
    with LocalStore(2) as local, local.connect(rank=0) as store, local.connect(role="client") as reader:
        assert store.publish({"a": special, "b": np.arange(6.0).reshape(2, 3)}) == 1
        assert reader.pull("a").tobytes() == special.tobytes()
        assert store.publish([("a", special[::-1].copy())]) == 2
        assert reader.pull("a").tobytes() == special[::-1].tobytes()
        assert_array_equal(reader.pull("b"), np.arange(6.0).reshape(2, 3))
        assert reader.pull("b").dtype == np.float64
        assert store.publish({}) == 3


def test_what_can_not_be_published_changes_nothing() -> None:
    with LocalStore(2) as local, local.connect(rank=0) as store, local.connect(role="client") as reader:
        with pytest.raises(NotAWorker, match="publish needs a worker"):
            reader.publish({"new": np.ones(2, F32)})
        with pytest.raises(UnknownTensor):
            reader.pull("new")
        store.create("trained", np.zeros(2, F32), rule="sgd")
        store.publish({"a": np.ones(3, F32)})
        for name, error in (("trained", RuleMismatch), ("a", ShapeMismatch)):
            with pytest.raises(error, match=name):
                store.publish({"b": np.ones(4, F32), name: np.ones(2, F32)})
        assert sorted(store.keys()) == ["a", "trained"]
        assert store.version == 1


def numbered(number: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, number, F32)}


def test_who_comes_too_late_for_a_round_publishes_in_the_next_one() -> None:
    with (
        LocalStore(1, workers=2, mode="backup") as local,
        local.connect(rank=0) as quick,
        local.connect(rank=1) as slow,
    ):
        assert [quick.publish(numbered(number)) for number in (1, 2)] == [1, 2]
        assert slow.publish(numbered(3)) == 3
        assert_array_equal(quick.pull("a"), numbered(3)["a"])


def test_the_number_is_that_of_the_own_version_though_others_are_there_by_then() -> None:
    with (
        LocalStore(1, workers=2, mode="ssp", staleness=1) as local,
        local.connect(rank=0) as ahead,
        local.connect(rank=1) as behind,
    ):
        published: list[int] = []

        def publish_twice() -> None:  # the second time it waits for the other worker
            published.extend(ahead.publish(numbered(number)) for number in (1, 2))

        def publish_last() -> None:
            while behind.stats()[0]["decisions"] != 2:
                pass
            published.append(behind.publish(numbered(3)))

        at_once(publish_twice, publish_last)
        assert sorted(published) == [1, 2, 3]


def test_what_the_store_takes_no_values_of_is_no_version() -> None:
    with (
        LocalStore(1, workers=2, refuse_norm=3.0) as local,
        local.connect(rank=0) as one,
        local.connect(rank=1) as other,
    ):
        for number in range(1, 11):
            at_once(partial(one.publish, numbered(1)), partial(other.publish, {"b": np.full(3, number, F32)}))

        def refused(error: type[PsstoreError], told: str, number: float) -> None:
            with pytest.raises(error, match=told):
                one.publish(numbered(number))

        at_once(partial(refused, BadArgument, "rank 0 was refused: its norm is", 100), partial(other.publish, {}))
        at_once(partial(refused, NonFinite, "another worker's", 2), partial(other.commit, non_finite=True))
        assert_array_equal(one.pull("a"), numbered(1)["a"])
        one.stop(everyone=True)
        assert one.publish(numbered(2)) == one.version
        assert_array_equal(one.pull("a"), numbered(1)["a"])


def test_it_is_awaited_too(cluster: Cluster) -> None:
    async def publish() -> list[int]:
        async with await cluster.connect_async() as one, await cluster.connect_async() as other:
            return list(await asyncio.gather(one.publish({"a": np.ones(3, F32)}), other.publish({})))

    assert asyncio.run(publish()) == [1, 1]
