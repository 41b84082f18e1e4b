"""Calls that are started in a round that was committed early, over links: without a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.flow_control import Pace
from psstore.client.loop_thread import LoopThread
from psstore.client.store import Store
from psstore.errors import StoreClosed, UnknownKey
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, at_once, clusters

ELEMS = 100_000
"""Two slices."""

NAMES = [f"t{index}" for index in range(12)]

pytestmark = pytest.mark.sockets


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    """Of two workers, as if their connections were links."""
    with clusters("tcp") as start:
        found = start(shards=2, workers=2).workers()
        for store in found:
            store._operations.context.pace = Pace(store._backend.thread.loop, store.num_shards)
        yield found


def early_round(store: Store, out: np.ndarray[Any, Any]) -> None:
    assert store.rank is not None
    gradient = np.full(ELEMS, store.rank + 1.0, np.float32)
    store.start_commit({"lr": 1.0}, present=NAMES, early=True).result()
    pushes, pulls = [], []
    for index in range(0, len(NAMES), 2):
        names = NAMES[index : index + 2]
        pushes.append(store.start_push_many(dict.fromkeys(names, gradient)))
        pulls.append(store.start_pull_many(names, out=list(out[index : index + 2])))
    for pull in pulls:
        pull.result()
    store.settle()
    assert all(push.done() for push in pushes)
    store.finish()


def create(store: Store) -> None:
    store.create_many([TensorSpec(name=name, shape=(ELEMS,), rule="sgd") for name in NAMES])


def test_rounds_like_the_one_before_need_no_task(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[object] = []
    submit = LoopThread.submit

    def noted(thread: LoopThread, work: Any) -> Any:
        tasks.append(work.__qualname__)
        return submit(thread, work)

    monkeypatch.setattr(LoopThread, "submit", noted)

    def work(store: Store) -> np.ndarray[Any, Any]:
        out = np.empty((len(NAMES), ELEMS), np.float32)
        create(store)
        for _ in range(3):
            tasks.clear()
            early_round(store, out)
            store.barrier()
        return out

    for out in at_once(*[lambda store=store: work(store) for store in stores]):
        assert_array_equal(out, np.full_like(out, -4.5))
    assert set(tasks) == {"Committing.commit"}


def test_what_is_done_at_once_is_done_with_the_loop_held_wherever_it_is_asked_for() -> None:
    thread = LoopThread()
    held: list[bool] = []

    def work() -> None:
        held.append(asyncio._get_running_loop() is thread.loop)

    async def on_the_loop() -> None:
        thread.at_once(work)
        assert len(held) == 2

    async def on_another() -> None:
        thread.at_once(work)

    async def turn() -> None:
        return

    thread.at_once(work)
    assert len(held) == 1
    thread.run(on_the_loop())
    asyncio.run(on_another())
    thread.run(turn())
    assert held == [True, True, True]
    thread.stop()
    for asked in (partial(thread.at_once, work), partial(asyncio.run, on_another())):
        with pytest.raises(StoreClosed):
            asked()


def test_a_call_that_is_given_up_while_it_waits_holds_up_nothing(stores: list[Store]) -> None:
    def work(store: Store) -> None:
        out = np.empty((len(NAMES), ELEMS), np.float32)
        create(store)
        early_round(store, out)
        gradient = np.ones(ELEMS, np.float32)
        store.start_commit({"lr": 1.0}, present=NAMES, early=True).result()
        given_up = store.start_pull_many(NAMES[:2], out=list(out[:2]))
        assert given_up.cancel()
        with pytest.raises(CancelledError):
            given_up.result()
        pulls = []
        for index in range(0, len(NAMES), 2):
            names = NAMES[index : index + 2]
            store.start_push_many(dict.fromkeys(names, gradient)).cancel()
            store.start_push_many(dict.fromkeys(names, gradient))
            pulls.append(store.start_pull_many(names, out=list(out[index : index + 2])))
        for pull in pulls:
            pull.result(PATIENCE_S)
        store.settle()
        store.finish()
        assert_array_equal(out, np.full_like(out, -2.5))

    at_once(*[lambda store=store: work(store) for store in stores])


def test_a_call_that_fails_names_what_failed(stores: list[Store]) -> None:
    def work(store: Store) -> None:
        create(store)
        early_round(store, np.empty((len(NAMES), ELEMS), np.float32))

    at_once(*[lambda store=store: work(store) for store in stores])
    first = stores[0]
    first._operations.context.pace.begin(first.round)  # type: ignore[union-attr]
    first._backend.thread.run(first._operations.client.tensors.drop(NAMES[:2]))  # behind the back of what knows them
    with pytest.raises(UnknownKey, match="'t0'"):
        first.start_push_many(dict.fromkeys(NAMES[:2], np.ones(ELEMS, np.float32))).result()


def test_closing_the_store_ends_what_waits(stores: list[Store]) -> None:
    """Nobody else pushes: the values that it reads never come, and the pushes behind them never have their turn."""

    def work(store: Store) -> None:
        create(store)
        early_round(store, np.empty((len(NAMES), ELEMS), np.float32))

    at_once(*[lambda store=store: work(store) for store in stores])
    first, second = stores
    commits = [store.start_commit({"lr": 1.0}, present=NAMES, early=True) for store in stores]
    for commit in commits:
        commit.result()
    calls: list[Future[Any]] = []
    for index in range(0, len(NAMES), 2):
        names = NAMES[index : index + 2]
        calls.append(first.start_push_many(dict.fromkeys(names, np.ones(ELEMS, np.float32))))
        calls.append(first.start_pull_many(names))
    first.end(leave=False)
    _, left = wait(calls, PATIENCE_S)
    assert not left
    assert isinstance(calls[-1].exception(), StoreClosed)
    second.end(leave=False)
