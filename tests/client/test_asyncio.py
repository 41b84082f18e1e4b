"""The awaited store: the same calls, several of them under way, cancelled at will."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.loop_thread import LoopThread
from psstore.client.store import AsyncStore, Store
from psstore.errors import BadArgument, StoreClosed
from psstore.types import TensorSpec
from tests.support.cluster import TO_SHARDS, Cluster, clusters

F32 = np.float32


def test_both_faces_have_the_same_calls_and_docstrings() -> None:
    def calls(face: type) -> dict[str, str]:
        return {
            name: f"{inspect.signature(member)}\n{member.__doc__}".replace("AsyncIterator", "Iterator").replace(
                "AsyncSnapshot", "Snapshot"
            )
            for name, member in vars(face).items()
            if inspect.isfunction(member) and not name.startswith(("_", "start_"))  # what is awaited needs no start
        }

    assert calls(Store) == {**calls(AsyncStore), "close": calls(Store)["close"]}
    assert all(not text.endswith("None") for text in calls(Store).values()), "every call has a docstring"


def test_async_store_trains(cluster: Cluster) -> None:
    async def train() -> None:
        async with await cluster.connect_async() as store:
            await store.create("w", [1.0, 2.0], rule="sgd", exist="overwrite")
            await store.push("w", [1.0, 1.0])
            await store.commit({"lr": 1.0})
            assert_array_equal(await store.pull("w"), np.array([0, 1], F32))
        with pytest.raises(StoreClosed):
            await store.keys()

    asyncio.run(train())


def test_async_calls_run_side_by_side(cluster: Cluster) -> None:
    async def add() -> None:
        async with await cluster.connect_async(role="client") as store:
            await store.create("sum", shape=(1000,), rule="add", exist="overwrite")
            await asyncio.gather(*[store.push("sum", np.full(1000, i, F32)) for i in range(100)])
            assert_array_equal(await store.pull("sum"), np.full(1000, sum(range(100)), F32))

    asyncio.run(add())


def test_commit_waits_for_no_push_under_way_but_says_so() -> None:
    with clusters("tcp") as start:
        cluster = start()
        shards = cluster.process
        assert shards is not None

        async def hurry() -> None:
            async with await cluster.connect_async() as store:
                await store.create("w", shape=(1000,), rule="sgd")
                with shards.stopped():
                    pushing = asyncio.create_task(store.push("w", np.ones(1000, F32)))
                    await asyncio.sleep(0)
                    with pytest.raises(BadArgument, match="await them first"):
                        await store.commit()
                await pushing
                await store.commit()

        asyncio.run(hurry())


def test_small_calls_that_were_done_before_are_awaited_without_a_task(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add() -> None:
        async with await cluster.connect_async(role="client") as store:
            await store.create("sum", shape=(8,), rule="add", exist="overwrite")
            one = np.ones(8, F32)
            for _ in range(2):  # the second time its deadline is noted
                await store.push("sum", one)
                await store.pull_many(["sum"])
            with monkeypatch.context() as patched:
                patched.setattr(LoopThread, "submit", None)
                await asyncio.gather(*[store.push("sum", one) for _ in range(20)])
                await asyncio.gather(*[store.push_many({"sum": one}) for _ in range(20)])
                assert_array_equal((await store.pull_many(["sum"]))[0], np.full(8, 42, F32))

    asyncio.run(add())


def test_cancelled_call_leaves_the_store_usable(cluster: Cluster) -> None:
    async def wait_in_vain() -> None:
        async with await cluster.connect_async(role="client") as store:
            spec = TensorSpec(name="never", shape=(1,), zeros=False)
            await store.create_many([spec], offer=False, exist="overwrite")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(store.pull("never"), 0.05)
            await store.create("a", [1.0], exist="overwrite")
            assert_array_equal(await store.pull("a"), np.array([1], F32))
            await store.drop("never")

    asyncio.run(wait_in_vain())


@pytest.mark.parametrize("transport", TO_SHARDS)
def test_nothing_comes_into_the_arrays_of_a_pull_that_was_cancelled(transport: str) -> None:
    """Of several frames, all of which were asked for."""

    async def pull_in_vain(cluster: Cluster) -> None:
        async with await cluster.connect_async(role="client") as store:
            value, out = np.ones(4_000_000, F32), np.zeros(4_000_000, F32)
            await store.create("a", value)
            assert cluster.process is not None
            with cluster.process.stopped(), pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(store.pull("a", out=out), 0.05)
            assert_array_equal(await store.pull("a"), value)
            assert not out.any()

    with clusters(transport) as start:
        asyncio.run(pull_in_vain(start()))


def test_what_was_held_for_a_snapshot_that_is_cancelled_on_its_way_is_let_go_of(cluster: Cluster) -> None:
    async def take(store: AsyncStore) -> None:
        async with store.snapshot():
            pass

    async def give_up() -> None:
        async with await cluster.connect_async(role="client") as store:
            for number in range(100):
                taking = asyncio.create_task(take(store))
                await asyncio.sleep(number * 2e-5)
                taking.cancel()
                await asyncio.wait([taking])
            assert [counters["holds"] for counters in await store.stats()] == [0, 0]

    asyncio.run(give_up())


def test_closing_ends_a_call_under_way(cluster: Cluster) -> None:
    async def wait_in_vain() -> None:
        store = await cluster.connect_async(role="client")
        spec = TensorSpec(name="never", shape=(1,), zeros=False)
        await store.create_many([spec], offer=False, exist="overwrite")
        waiting = asyncio.create_task(store.pull("never"))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises((StoreClosed, asyncio.CancelledError)):
            await waiting

    asyncio.run(wait_in_vain())
