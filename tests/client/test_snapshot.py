"""Snapshots: all tensors at one version, in every mode, over every transport, while others train."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import LocalStore
from psstore.client.layout import OneVersion
from psstore.client.reading import Reading
from psstore.client.rule_state import Restored
from psstore.client.store import Store
from psstore.errors import BadArgument, DeadlineExceeded, StoreClosed, VersionGone
from psstore.protocol.holds import Holds
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, Cluster, at_once, clusters
from tests.support.server_process import eventually

F32 = np.float32
NAMES = ("a", "b", "c")
ELEMS = 150_000
"""Three slices: they lie on three shards, and on two of any number."""

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def create(store: Store, rule: str = "sgd") -> None:
    store.create_many([TensorSpec(name=name, shape=(ELEMS,), rule=rule) for name in NAMES])


def step(store: Store, *, hypers: dict[str, float] | None = None) -> None:
    store.push_many({name: np.ones(ELEMS, F32) for name in NAMES})
    store.commit(hypers or {"lr": 1.0})


@pytest.fixture(params=["local", "tcp", "unix", "shm"])
def store(request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """Makes a store of one worker; called again: another client of it."""
    if request.param == "local":
        with LocalStore(shards=3) as local:
            yield lambda **options: local.connect(**(options or {"rank": 0}))
        return
    with clusters(request.param) as start:
        cluster = start(shards=3)
        yield lambda **options: cluster.connect(**(options or {"rank": 0}))


def test_a_snapshot_stays_what_it_was(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker)
    step(worker)
    with reader.snapshot() as view:
        for _ in range(3):
            step(worker)
        assert view.version == 1
        for name in NAMES:
            assert_array_equal(view[name], np.full(ELEMS, -1, F32))
        out = [np.empty(ELEMS, F32) for _ in NAMES]
        assert view.pull_many(NAMES, out=out)[0] is out[0]
        assert_array_equal(out[2], np.full(ELEMS, -1, F32))
        assert_array_equal(view.pull("a", dtype="float16"), np.full(ELEMS, -1, np.float16))
    assert_array_equal(reader.pull("a"), np.full(ELEMS, -4, F32))
    for counters in reader.stats():
        assert (counters["holds"], counters["kept_bytes"]) == (0, 0)


def test_rule_state_is_as_of_the_version_if_it_was_asked_for(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker, rule="adam")
    step(worker, hypers={"lr": 0.1})
    before = worker.pull_state(NAMES)
    values = worker.pull_many(list(NAMES))
    with reader.snapshot(state=True) as view:
        step(worker, hypers={"lr": 0.1})
        for found, expected in zip(view.pull_state(NAMES), before, strict=True):
            assert found.steps == expected.steps == 1
            assert found.buffers.keys() == expected.buffers.keys()
            for name, buffer in found.buffers.items():
                assert_array_equal(buffer, expected.buffers[name])
        assert_array_equal(view["b"], values[1])
    assert worker.pull_state(["a"])[0].steps == 2


def test_a_worker_takes_snapshots_too_in_the_middle_of_its_round(store: Callable[..., Store]) -> None:
    worker = store()
    create(worker)
    step(worker)
    worker.push_many({name: np.ones(ELEMS, F32) for name in NAMES})
    with worker.snapshot() as view:
        worker.commit({"lr": 1.0})
        assert_array_equal(view["c"], np.full(ELEMS, -1, F32))
    assert_array_equal(worker.pull("c"), np.full(ELEMS, -2, F32))


def test_what_has_no_decisions_is_read_as_it_is(store: Callable[..., Store]) -> None:
    worker = store()
    worker.create("note", np.zeros(8, F32))
    with worker.snapshot() as view:
        worker.push("note", np.ones(8, F32))
        assert_array_equal(view["note"], np.ones(8, F32))


def test_one_call_reads_one_version(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker)
    step(worker)
    for value in reader.pull_many(list(NAMES), consistent=True):
        assert_array_equal(value, np.full(ELEMS, -1, F32))
    assert all(counters["holds"] == 0 for counters in reader.stats())
    with pytest.raises(BadArgument, match="consistent"):
        reader.pull_many(list(NAMES), consistent=True, if_newer_than=1)


def test_one_version_costs_nothing_where_nobody_trains(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker)
    step(worker)
    with mock.patch.object(Holds, "hold", side_effect=AssertionError("not needed")):
        for value in (*reader.pull_many(list(NAMES)), reader.pull("b")):
            assert_array_equal(value, np.full(ELEMS, -1, F32))


def test_a_client_of_one_shard_compares_what_its_connections_brought() -> None:
    """No decision need be learned from anybody then: its pulls could go without the loop, where nobody looks."""
    with clusters("tcp") as start:
        cluster = start()
        worker = cluster.connect(rank=0)
        create(worker)
        step(worker)
        with psstore.connect(cluster.url, role="client", transport="tcp", connections=3) as reader:
            looked = mock.Mock(side_effect=OneVersion.__bool__)
            with mock.patch.object(OneVersion, "__bool__", lambda self: looked(self)):
                for _ in range(3):
                    reader.pull_many(NAMES)
                assert looked.call_count == 3
                reader.pull_many(NAMES, consistent=False)
                assert looked.call_count == 3


def test_one_frame_is_of_one_version_by_itself() -> None:
    with clusters("tcp") as start:
        cluster = start()
        worker, reader = cluster.connect(rank=0), cluster.connect(role="client")
        create(worker)
        step(worker)
        reader.pull("a")

        def goes_without_the_loop(consistent: bool | None) -> bool:
            """Unless the loop is just at work on something else of the store's."""
            with mock.patch.object(Reading, "pull", autospec=True, side_effect=Reading.pull) as by_the_loop:
                assert_array_equal(reader.pull("a", consistent=consistent), np.full(ELEMS, -1, F32))
            return not by_the_loop.called

        for consistent in (None, True, False):
            assert eventually(partial(goes_without_the_loop, consistent))


def test_pulls_are_started_of_one_version(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker)
    step(worker)
    for who in (worker, reader):
        for consistent in (None, True, False):
            for value in who.start_pull_many(NAMES, consistent=consistent).result(PATIENCE_S):
                assert_array_equal(value, np.full(ELEMS, -1, F32))


def test_what_was_restored_is_read_whole(store: Callable[..., Store]) -> None:
    """It is of no decision of its own: shards say so, until the next one."""
    worker, reader = store(), store(role="client")
    create(worker)
    step(worker)
    worker.restore({"a": Restored(np.full(ELEMS, 5, F32))})
    with mock.patch.object(Holds, "hold", autospec=True, side_effect=Holds.hold) as held:
        assert_array_equal(reader.pull("a"), np.full(ELEMS, 5, F32))
        assert held.called
        step(worker)
        held.reset_mock()
        assert_array_equal(reader.pull("a"), np.full(ELEMS, 4, F32))
        assert not held.called


def test_followers_get_whole_versions_and_hear_what_they_skipped(store: Callable[..., Store]) -> None:
    worker, reader = store(), store(role="client")
    create(worker)
    versions = reader.follow(NAMES, wait_s=0.2)
    assert next(versions).number == 0
    step(worker)
    first = next(versions)
    assert (first.number, first.skipped) == (1, 0)
    for _ in range(3):
        step(worker)
    second = next(versions)
    assert (second.number, second.skipped) == (4, 2)
    assert_array_equal(second.values["b"], np.full(ELEMS, -4, F32))
    with pytest.raises(DeadlineExceeded):
        next(versions)
    step(worker)
    assert (next(versions).number, second.values["b"][0]) == (5, -4)


def test_snapshots_are_awaited() -> None:
    async def read(url: str, worker: Store) -> None:
        async with await psstore.connect_async(url, role="client") as reader:
            async with reader.snapshot(state=True) as view:
                await asyncio.to_thread(step, worker)
                assert view.version == 1
                assert_array_equal((await view.pull_many(NAMES))[1], np.full(ELEMS, -1, F32))
                assert_array_equal(await view.pull("a"), np.full(ELEMS, -1, F32))
                assert (await view.pull_state(["a"]))[0].steps == 1
            versions = reader.follow(NAMES, wait_s=0.2)
            assert (await anext(versions)).number == 2
            with pytest.raises(DeadlineExceeded):
                await anext(versions)
            await asyncio.to_thread(step, worker)
            async for version in versions:
                assert version.number == 3
                break

    with clusters("tcp") as start:
        cluster = start(shards=2)
        worker = cluster.connect(rank=0)
        create(worker)
        step(worker)
        asyncio.run(read(cluster.url, worker))


def test_a_snapshot_that_is_over_reads_nothing(store: Callable[..., Store]) -> None:
    worker = store()
    create(worker)
    with worker.snapshot() as view:
        step(worker)
    assert eventually(lambda: worker.stats()[0]["holds"] == 0)
    with pytest.raises(VersionGone, match="version 0"):
        view.pull("a")


def test_what_takes_too_much_memory_is_gone_and_training_goes_on() -> None:
    with clusters("tcp") as start:
        cluster = start("--snapshot-memory", "1MiB", shards=2)
        worker, reader = cluster.connect(rank=0), cluster.connect(role="client")
        create(worker)
        with reader.snapshot() as view:
            step(worker)
            worker.pull_many(list(NAMES))
            with pytest.raises(VersionGone):
                view.pull_many(NAMES)
            assert eventually(lambda: all(counters["kept_bytes"] == 0 for counters in reader.stats()))
        step(worker)
        assert_array_equal(worker.pull("a"), np.full(ELEMS, -2, F32))
        with reader.snapshot() as view:
            assert_array_equal(view["a"], np.full(ELEMS, -2, F32))


def test_a_reader_that_dies_holds_nothing() -> None:
    with clusters("tcp") as start:
        cluster = start(shards=2)
        worker, reader = cluster.connect(rank=0), cluster.connect(role="client")
        create(worker)
        with reader.snapshot() as view:
            step(worker)
            reader.close()
            with pytest.raises(StoreClosed):
                view.pull("a")
        assert eventually(lambda: all(counters["holds"] == 0 for counters in worker.stats()))


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
@pytest.mark.parametrize(("mode", "shards"), [("sync", 4), ("backup", 2), ("ssp", 3), ("async", 8)])
def test_no_snapshot_is_torn_while_workers_train(
    mode: str, shards: int, transport: Literal["tcp", "unix", "shm"]
) -> None:
    """Every worker adds the same to all elements of all tensors: in a whole version all of them are equal, and the
    number of the version says how many steps were taken."""
    with clusters(transport) as start:
        cluster = start(shards=shards, workers=2, mode=mode)
        torn, versions = read_while_training(cluster, seconds=1.5)
        assert torn == 0
        assert versions >= 10


def read_while_training(cluster: Cluster, *, seconds: float) -> tuple[int, int]:
    """How many snapshots, and pulls of a client, were torn, and how many there were."""
    workers = cluster.workers()
    create(workers[0])
    over = threading.Event()
    torn = taken = 0

    def train(rank: int) -> None:
        while not over.is_set():
            step(workers[rank])
            workers[rank].pull_many(list(NAMES))
        workers[rank].leave()

    def read() -> None:
        nonlocal torn, taken
        reader = cluster.connect(role="client")
        end = time.monotonic() + max(seconds, PATIENCE_S)
        began = time.monotonic()
        while time.monotonic() < end and (time.monotonic() - began < seconds or taken < 10):
            if taken % 3 == 0:
                with reader.snapshot() as view:
                    values = view.pull_many(NAMES)
            else:
                values = reader.pull_many(NAMES) if taken % 3 == 1 else [reader.pull("a")]
            found = {float(one) for value in values for one in np.unique(value)}
            torn += len(found) != 1
            taken += 1
        over.set()

    at_once(*[lambda rank=rank: train(rank) for rank in range(len(workers))], read)
    return torn, taken


def test_what_a_snapshot_says_it_is() -> None:
    with LocalStore() as local:
        store: Any = local.connect(rank=0)
        with store.snapshot() as view:
            assert repr(view) == "<Snapshot of version 0>"
