"""Pushes of tensors whose first values are still on their way from whoever created them: they wait, as pulls do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.store import Store
from psstore.errors import BadArgument, NotInitialised
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, TRANSPORTS, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
SIZE = 200_000
"""Elements of each: some slices, on both shards."""

GRADIENT = np.full(SIZE, 2.0, F32)


def started(store: Store, name: str, **how: Any) -> None:
    store.start_push_many({name: GRADIENT}, **how).result(PATIENCE_S)


PUSHES: dict[str, Callable[[Store, str], object]] = {
    "one": lambda store, name: store.push(name, GRADIENT),
    "many": lambda store, name: store.push_many({name: GRADIENT}),
    "started": started,
    "in half precision": lambda store, name: store.push(name, GRADIENT.astype(np.float16)),
    "encoded": partial(Store.push, value=GRADIENT, codec="bf16"),
    "encoded with feedback": lambda store, name: store.push(name, GRADIENT, codec="int8"),
    "encoded and started": partial(started, codec="bf16"),
}


def pending(name: str, rule: str) -> TensorSpec:
    """Somebody will send its value."""
    return TensorSpec(name=name, shape=(SIZE,), rule=rule, zeros=False)


def while_it_waits(push: Callable[[], object], value: Callable[[], object]) -> None:
    """The push ends when the value is there, and no sooner."""
    with ThreadPoolExecutor(1) as pool:
        pushing: Future[object] = pool.submit(push)
        time.sleep(0.2)  # it has nothing to wait for that a test could see: what is tested is that it does not end
        assert not pushing.done()
        value()
        pushing.result(PATIENCE_S)


@pytest.mark.parametrize("push", PUSHES)
@pytest.mark.parametrize(
    ("transport", "rule"),
    [("local", "add"), *(pytest.param(one, "sgd", marks=pytest.mark.sockets) for one in ("tcp", "shm"))],
)
def test_push_waits_for_the_first_value(transport: str, rule: str, push: str) -> None:
    with clusters(transport) as start:
        cluster = start(shards=2)
        worker, creator = cluster.connect(), cluster.connect(role="client")
        worker.create_many([pending("w", rule)], offer=False)
        while_it_waits(
            partial(PUSHES[push], worker, "w"),
            lambda: creator.create_many([pending("w", rule)], [np.ones(SIZE, F32)]),
        )
        if rule == "sgd":
            worker.commit({"lr": 1.0})
        assert_array_equal(worker.pull("w"), np.full(SIZE, 3.0 if rule == "add" else -1.0, F32))


@pytest.mark.sockets
def test_push_that_is_awaited_waits_for_the_first_value() -> None:
    with clusters("tcp") as start:
        cluster = start(shards=2)
        creator = cluster.connect(role="client")

        async def push() -> None:
            async with await cluster.connect_async(role="client") as store:
                await store.create_many([pending("sum", "add")], offer=False)
                pushing = asyncio.create_task(store.push("sum", GRADIENT))
                await store.keys()  # it has asked, and was told
                assert not pushing.done()
                await asyncio.to_thread(creator.create_many, [pending("sum", "add")], [np.ones(SIZE, F32)])
                await asyncio.wait_for(pushing, PATIENCE_S)

        asyncio.run(push())
        assert_array_equal(creator.pull("sum"), np.full(SIZE, 3.0, F32))


@pytest.mark.parametrize("push", PUSHES)
def test_push_for_which_no_value_comes_says_so(push: str) -> None:
    with clusters("local") as start:
        store = start().connect(wait_s=0.1)
        store.create_many([pending("w", "sgd")], offer=False)
        for _ in range(2):
            with pytest.raises(NotInitialised, match="tensor 'w': it has no value yet"):
                PUSHES[push](store, "w")


def test_push_that_waits_for_a_value_is_under_way() -> None:
    with clusters("local") as start:
        cluster = start(shards=2)
        worker, creator = cluster.connect(), cluster.connect(role="client")
        worker.create_many([pending("w", "sgd")], offer=False)
        pushing = worker.start_push_many({"w": GRADIENT})
        with pytest.raises(BadArgument, match="commit while 1 pushes are under way"):
            worker.commit({"lr": 1.0})
        creator.create_many([pending("w", "sgd")], [np.ones(SIZE, F32)])
        pushing.result(PATIENCE_S)
        worker.commit({"lr": 1.0})
        assert_array_equal(worker.pull("w"), np.full(SIZE, -1.0, F32))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("has_value", [True, False])
def test_push_that_was_promised_waits_for_the_value_and_not_for_its_own_step(has_value: bool, transport: str) -> None:
    """The decision holds the slices until they have what is pushed here."""
    with clusters(transport) as start:
        cluster = start(shards=2)
        worker, creator = cluster.connect(), cluster.connect(role="client")
        create = partial(creator.create_many, [pending("w", "sgd")], [np.ones(SIZE, F32)])
        if has_value:
            create()
        worker.create_many([pending("w", "sgd")], offer=False)
        worker.commit({"lr": 1.0}, early=True, present=["w"])
        if has_value:
            worker.push("w", GRADIENT)
        else:
            while_it_waits(lambda: worker.push("w", GRADIENT), create)
        worker.finish()
        assert_array_equal(worker.pull("w"), np.full(SIZE, -1.0, F32))
