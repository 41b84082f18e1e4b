"""Writes that are cancelled or interrupted: what was pushed is what counts, whatever becomes of their arrays."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.flow_control import Pace
from psstore.client.store import AsyncStore
from tests.support.cluster import TO_SHARDS, Cluster, clusters

F32 = np.float32
NUM_ELEMS = 4_000_000
"""Several frames: more than sockets hold."""

OVERWRITTEN = -7.0

pytestmark = pytest.mark.sockets


class Struck(BaseException):
    """What the handler raises."""


@pytest.fixture(params=TO_SHARDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clusters(request.param) as start:
        yield start()


@pytest.fixture
def strike() -> Iterator[Callable[[], None]]:
    """Has a signal come a moment later, whose handler raises."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Struck

    before = signal.signal(signal.SIGTERM, handle)
    yield lambda: threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
    signal.signal(signal.SIGTERM, before)


async def push_in_vain(
    cluster: Cluster, cancelled: Callable[[AsyncStore, np.ndarray[Any, Any]], Awaitable[None]]
) -> None:
    """What is pushed has to come, whatever its array is once it is `cancelled`."""
    async with await cluster.connect_async(role="client") as store:
        await store.create("a", np.zeros(NUM_ELEMS, F32))
        assert cluster.process is not None
        for value in (1.0, 2.0):  # the second one is a direct call
            pushed = np.full(NUM_ELEMS, value, F32)
            with cluster.process.stopped():
                await cancelled(store, pushed)
                pushed[:] = OVERWRITTEN
            assert_array_equal(await store.pull("a"), np.full(NUM_ELEMS, value, F32))


def test_a_push_that_is_cancelled_sends_what_was_pushed(cluster: Cluster) -> None:
    async def cancelled(store: AsyncStore, pushed: np.ndarray[Any, Any]) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.push("a", pushed), 0.05)

    asyncio.run(push_in_vain(cluster, cancelled))


def test_a_push_that_is_cancelled_twice_sends_what_was_pushed(cluster: Cluster) -> None:
    """As by a time limit, and then by whoever ends the program."""

    async def cancelled(store: AsyncStore, pushed: np.ndarray[Any, Any]) -> None:
        push = asyncio.ensure_future(store.push("a", pushed))
        await asyncio.sleep(0.05)
        store._backend.thread.loop.call_soon_threadsafe(time.sleep, 0.2)  # it is busy just then
        push.cancel()
        await asyncio.sleep(0.01)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push

    asyncio.run(push_in_vain(cluster, cancelled))


def test_a_push_that_is_interrupted_sends_what_was_pushed(cluster: Cluster, strike: Callable[[], None]) -> None:
    store = cluster.connect(role="client")
    store.create("a", np.zeros(NUM_ELEMS, F32))
    assert cluster.process is not None
    for value in (1.0, 2.0):
        pushed = np.full(NUM_ELEMS, value, F32)
        with cluster.process.stopped():
            strike()
            with pytest.raises(Struck):
                store.push("a", pushed)
            pushed[:] = OVERWRITTEN
        assert_array_equal(store.pull("a"), np.full(NUM_ELEMS, value, F32))


def test_a_started_push_that_is_cancelled_sends_what_was_pushed(cluster: Cluster) -> None:
    store = cluster.connect(role="client")
    store.create("a", np.zeros(NUM_ELEMS, F32))
    assert cluster.process is not None
    for value in (1.0, 2.0):  # the second one is a direct call
        pushed = np.full(NUM_ELEMS, value, F32)
        with cluster.process.stopped():
            push = store.start_push_many({"a": pushed})
            store._backend.thread.catch_up()  # the first one is under way
            push.cancel()
            pushed[:] = OVERWRITTEN
        with pytest.raises(CancelledError):
            push.result()
        assert_array_equal(store.pull("a"), np.full(NUM_ELEMS, value, F32))


@pytest.mark.parametrize("started", [False, True])
def test_a_push_of_an_early_round_that_is_given_up_sends_what_was_pushed(
    strike: Callable[[], None], started: bool
) -> None:
    with clusters("tcp") as start:
        cluster = start()
        store = cluster.connect()
        store._operations.context.pace = Pace(store._backend.thread.loop, store.num_shards)  # as over a link
        store.create("a", np.zeros(NUM_ELEMS, F32), rule="sgd")
        gradient = np.ones(NUM_ELEMS, F32)
        assert cluster.process is not None
        for given_up in (False, True):
            store.start_commit({"lr": 1.0}, present=["a"], early=True).result()
            if given_up:
                pushed = gradient.copy()
                with cluster.process.stopped():
                    if started:
                        store.start_push_many({"a": pushed}).cancel()
                    else:
                        strike()
                        with pytest.raises(Struck):
                            store.push("a", pushed)
                    pushed[:] = OVERWRITTEN
            store.push("a", gradient)  # what was sent of it before counts
            store.finish()
        assert_array_equal(store.pull("a"), np.full(NUM_ELEMS, -2.0, F32))
