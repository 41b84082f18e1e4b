"""Who waits for other workers says for whom, again and again, and no more once the wait is over."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from psstore import LocalStore
from psstore.client import wait_notices
from psstore.client.store import Store
from psstore.client.wait_notices import WaitNotices
from tests.support.cluster import PATIENCE_S, clusters
from tests.support.server_process import eventually

NOTICE = re.compile(r"rank 0 has waited (\d+) s so far for (.*)")
FIRST_S = 0.05


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notices, "FIRST_NOTICE_S", FIRST_S)


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """For whom, each time."""
    return [found[2] for one in caplog.messages if (found := NOTICE.fullmatch(one))]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_notices_come_until_the_wait_is_over(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with clusters(transport) as start, ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        cluster = start(workers=2)
        store = cluster.connect(rank=0)
        waiting: Future[Any] = pool.submit(store.commit)
        assert eventually(lambda: len(notices(caplog)) >= 2)
        assert set(notices(caplog)) == {"rank 1 (has not joined)"}
        with cluster.connect(rank=1) as other:
            other.commit()
            waiting.result(PATIENCE_S)
            caplog.clear()
            time.sleep(4 * FIRST_S)  # nobody waits
            assert notices(caplog) == []
            waiting = pool.submit(store.barrier, "end")
            assert eventually(lambda: bool(notices(caplog)))
            assert notices(caplog)[0].startswith("rank 1 (in round 2, last seen ")
            other.barrier("end")
            waiting.result(PATIENCE_S)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_who_is_at_a_barrier_hears_who_is_missing_there(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """And not for whom another waits who has ended a round, or is at another barrier: that is itself."""
    with (
        ThreadPoolExecutor(3) as pool,
        LocalStore(workers=3, mode=mode, staleness=1) as local,
        caplog.at_level(logging.WARNING),
    ):
        store, ahead, third = (local.connect(rank=rank) for rank in range(3))

        def get_ahead() -> None:
            for _ in range(2):
                ahead.commit()

        waits = partial(third.barrier, "another"), get_ahead, partial(store.barrier, "end")
        calls = [pool.submit(wait) for wait in waits]
        assert eventually(lambda: len(notices(caplog)) >= 2)
        missing = r"rank 1 \(in round \d, last seen .+ s ago\), rank 2 \(in round 1, last seen .+ s ago\)"
        assert all(re.fullmatch(missing, one) for one in notices(caplog)), notices(caplog)
        local.close()
        assert all(call.exception(PATIENCE_S) is not None for call in calls)


class JumpingLoop:
    """Its time is that of the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told_at: list[float] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, look: Callable[[], None]) -> object:
        self.timers.append((self.now + delay_s, look))
        return object()

    def create_task(self, telling: Coroutine[Any, Any, None]) -> None:
        telling.close()
        self.told_at.append(self.now)

    def jump(self) -> None:
        self.now, look = self.timers.pop()
        look()


def test_a_wait_is_told_of_when_it_is_so_long_whenever_it_began() -> None:
    client, loop = MagicMock(), JumpingLoop()
    WaitNotices(client, loop)  # type: ignore[arg-type]
    client.worker.on_wait()  # a wait that is over soon
    client.worker.waits_since = 0.75 * FIRST_S
    while len(loop.told_at) < 3:
        loop.jump()
    assert loop.told_at == pytest.approx([client.worker.waits_since + FIRST_S * times for times in (1, 2, 4)])


def begins_to_wait(store: Store, work: Callable[[], object], pool: ThreadPoolExecutor) -> tuple[str, Future[object]]:
    """For whom, as shard 0 tells anybody, and what is under way."""
    waiting = pool.submit(work)
    told: list[str] = []

    def is_told() -> bool:
        told[:] = [str(store.stats()[0]["waited_for"])]
        return told != [""]

    assert eventually(is_told)
    return told[0], waiting


@pytest.mark.parametrize(("mode", "steps_ahead"), [("sync", 0), ("ssp", 1)])
def test_a_store_tells_whom_commits_wait_for(mode: str, steps_ahead: int) -> None:
    with LocalStore(2, workers=2, mode=mode, staleness=1) as local, ThreadPoolExecutor(1) as pool:
        first, second, looker = local.connect(rank=0), local.connect(rank=1), local.connect(role="client")
        for _ in range(steps_ahead):
            first.commit()
        assert looker.stats()[0]["waited_for"] == ""
        who, waiting = begins_to_wait(looker, first.commit, pool)
        assert who.startswith("rank 1 (in round 1, last seen ")
        second.commit()
        waiting.result(PATIENCE_S)
        assert looker.stats()[0]["waited_for"] == ""


def test_a_store_tells_whose_promised_pushes_are_waited_for() -> None:
    with LocalStore(1, workers=2) as local, ThreadPoolExecutor(2) as pool:
        workers = [local.connect(rank=rank) for rank in range(2)]
        workers[0].create("w", np.zeros(3, np.float32), rule="sgd")
        commits = [pool.submit(one.commit, {"lr": 1.0}, early=True, present=["w"]) for one in workers]
        for commit in commits:
            commit.result(PATIENCE_S)
        workers[0].push("w", np.ones(3, np.float32))
        who, waiting = begins_to_wait(workers[1], workers[0].finish, pool)
        assert who.startswith("rank 1 (in round 2, last seen ")
        workers[1].push("w", np.ones(3, np.float32))
        workers[1].finish()
        waiting.result(PATIENCE_S)
