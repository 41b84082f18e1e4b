"""Clients and shards that are asked to wait without sleeping, for a while: what they do stays the same."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from functools import partial

import pytest

import psstore
from psstore.client.loop_thread import LoopThread
from psstore.config import worker_environment
from psstore.errors import BadArgument
from tests.support.cluster import at_once
from tests.support.server_process import StoreProcess

WAITS = 20


@pytest.fixture(scope="module")
def busy_url(loop_name: str) -> Iterator[str]:
    with StoreProcess("--workers", "2", "--busy-poll-us", "500") as store:
        yield store.url


def num_sleeps(driver: LoopThread) -> int:
    """Of the calling thread, while it waits for something that comes late."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(WAITS):
        driver.run(asyncio.wait({driver.loop.create_task(asyncio.sleep(0.002))}))
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


def test_who_is_busy_waits_without_sleeping() -> None:
    idle, busy = LoopThread(), LoopThread(busy_s=1.0)
    try:
        assert num_sleeps(idle) > WAITS / 2  # most: where the machine is busy, some have come before it would sleep
        assert num_sleeps(busy) < WAITS / 2  # a few: for the GIL
    finally:
        idle.stop()
        busy.stop()


@pytest.mark.sockets
def test_calls_and_rounds_of_busy_clients_and_shards_are_as_ever(busy_url: str) -> None:
    workers = [psstore.connect(busy_url, rank=rank, transport="tcp", busy_poll_us=200) for rank in (0, 1)]
    workers[0].create("w", [0.0], rule="sgd")
    workers[0].create("plain", [0.0])
    for count in (1, 2, 3):
        workers[0].push("plain", [count])
        assert workers[1].pull("plain")[0] == count
        for worker in workers:
            worker.push("w", [1.0])
        at_once(*[partial(worker.commit, {"lr": 1.0}) for worker in workers])
        assert workers[0].pull("w")[0] == -count
    for worker in workers:
        worker.close()


def test_busy_polling_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_environment({"PSSTORE_BUSY_POLL_US": "50"}).busy_poll_us == 50
    monkeypatch.setenv("PSSTORE_BUSY_POLL_US", "much")
    with pytest.raises(BadArgument, match="PSSTORE_BUSY_POLL_US is 'much'; expected microseconds from 0 to 10000"):
        psstore.connect("ps://127.0.0.1:1")
    monkeypatch.delenv("PSSTORE_BUSY_POLL_US")
    with pytest.raises(BadArgument, match="busy_poll_us is -1; expected microseconds"):
        psstore.connect("ps://127.0.0.1:1", busy_poll_us=-1)
