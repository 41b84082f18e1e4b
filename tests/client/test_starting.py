"""Calls that are started and waited for later, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial
from threading import Barrier

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.layout import Push
from psstore.client.loop_thread import LoopThread
from psstore.client.paced import Part, PartedCall
from psstore.client.started import Started
from psstore.client.store import Store
from psstore.errors import BadArgument, UnknownKey, UnknownTensor
from psstore.protocol.requests import Future
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import eventually

F32 = np.float32
ELEMS = 600_000


def test_pushes_that_were_started_count_in_the_round(store: Store) -> None:
    names = ["a", "b", "c"]
    for name in names:
        store.create(name, np.zeros(ELEMS, F32), rule="sgd")
    values = {name: np.full(ELEMS, i, F32) for i, name in enumerate(names)}
    started = [store.start_push_many({name: value}) for name, value in values.items()]
    wait(started, PATIENCE_S)
    store.commit({"lr": 1.0})
    for name, value in values.items():
        assert_array_equal(store.pull(name), -value)


def test_of_two_pushes_started_one_after_the_other_the_later_counts(store: Store) -> None:
    store.create("w", np.zeros(ELEMS, F32), rule="sgd")
    first, second = np.full(ELEMS, 1, F32), np.full(ELEMS, 2, F32)
    started = [store.start_push_many({"w": first}), store.start_push_many({"w": second})]
    wait(started, PATIENCE_S)
    store.commit({"lr": 1.0})
    assert_array_equal(store.pull("w"), -second)


def test_settle_waits_for_every_push_that_was_started(store: Store) -> None:
    store.create("w", np.zeros(ELEMS, F32), rule="sgd")
    started = [store.start_push_many({"w": np.full(ELEMS, i, F32)}) for i in range(5)]
    store.settle()
    assert all(future.done() for future in started)


def test_settle_and_commit_wait_for_a_push_whose_tensors_are_looked_up(store: Store) -> None:
    """As that of a tensor without elements is each time: no shard would say that it was dropped."""
    store.create("w", np.zeros(4, F32), rule="sgd")
    store.create("nothing", np.zeros((0, 3), F32), rule="sgd")
    gradients = {"w": np.ones(4, F32), "nothing": np.zeros((0, 3), F32)}
    began = store.round
    started = store.start_push_many(gradients)
    store.settle()
    assert started.done()
    store.commit({"lr": 1.0})
    commit = partial(store.commit, {"lr": 1.0}, present=["w", "nothing"])
    refused = ""

    def is_under_way() -> bool:
        """Whether a push was not over when its round was committed."""
        nonlocal refused
        started = store.start_push_many(gradients)
        try:
            commit()
        except BadArgument as error:
            refused = error.message
            started.result(PATIENCE_S)
            commit()
        return bool(refused)

    assert eventually(is_under_way)
    assert "commit while 1 pushes are under way" in refused
    assert_array_equal(store.pull("w"), np.full(4, began - store.round, F32))


def test_a_call_that_was_started_tells_its_error_when_it_is_asked(store: Store) -> None:
    started = store.start_push_many({"unheard": np.ones(1, F32)})
    with pytest.raises(UnknownTensor, match="'unheard'"):
        started.result(PATIENCE_S)


def test_small_calls_that_were_done_before_are_started_without_a_task(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("w", np.zeros(8, F32), rule="sgd")
    store.push_many({"w": np.zeros(8, F32)})
    store.pull_many(["w"])
    store.start_push_many({"w": np.zeros(8, F32)}).result(PATIENCE_S)  # its deadline has been noted
    store.start_pull_many(["w"]).result(PATIENCE_S)
    with monkeypatch.context() as patched:
        patched.setattr(LoopThread, "submit", None)
        started = [store.start_push_many({"w": np.full(8, i, F32)}) for i in range(20)]
        wait(started, PATIENCE_S)
    assert not store._operations.writing.under_way
    store.commit({"lr": 1.0})
    assert_array_equal(store.start_pull_many(["w"]).result()[0], np.full(8, -19, F32))


def test_large_calls_are_started_without_a_task_though_the_kernel_is_full(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.shares_memory:
        pytest.skip("nothing is sent but a word")
    names = [f"w{i}" for i in range(8)]
    values = {name: np.full(ELEMS, i, F32) for i, name in enumerate(names)}
    out = [np.empty(ELEMS, F32) for _ in names]
    for name in names:
        store.create(name, np.zeros(ELEMS, F32), rule="sgd")
    for round in range(1, 4):
        with monkeypatch.context() as patched:
            store.commit({"lr": 1.0}, present=names, early=True)
            if round > 1:  # before that nothing went like this
                patched.setattr(LoopThread, "submit", None)
            started = [
                future
                for name, place in zip(names, out, strict=True)
                for future in (
                    store.start_pull_many([name], out=[place]),
                    store.start_push_many({name: values[name]}),
                )
            ]
            for future in started:
                future.result(PATIENCE_S)
        store.finish()
        for i, place in enumerate(out):
            assert_array_equal(place, np.full(ELEMS, -i * round, F32))


def test_frames_are_short_in_early_rounds_over_sockets(store: Store) -> None:
    store.create("w", np.zeros(8 * ELEMS, F32), rule="sgd")
    layouts = store._operations.context.layouts

    def num_frames() -> int:
        store.push("w", np.zeros(8 * ELEMS, F32))
        plan = layouts.plan(Push(("w",), ()).cache_key)
        assert plan is not None
        return len(plan.layout.frames)

    late = num_frames()
    store.commit({"lr": 1.0})
    store.commit({"lr": 1.0}, present=["w"], early=True)
    early = num_frames()
    store.finish()
    assert num_frames() == late
    over_sockets = store._operations.context.sends_all
    assert early > 8 * late if over_sockets else early == late


def test_a_small_call_that_fails_names_what_failed(store: Store) -> None:
    store.create("w", np.zeros(8, F32))
    for _ in range(2):
        store.start_push_many({"w": np.zeros(8, F32)}).result(PATIENCE_S)
    operations = store._operations
    store._backend.thread.run(operations.client.tensors.drop(["w"]))  # behind the back of what knows its definition
    with pytest.raises(UnknownKey, match="'w'"):
        store.start_push_many({"w": np.zeros(8, F32)}).result()
    with pytest.raises(UnknownTensor):
        store.start_push_many({"w": np.zeros(8, F32)}).result(PATIENCE_S)


def started_call(thread: LoopThread, forgotten: list[object]) -> PartedCall:
    async def conclude(parts: Sequence[Part]) -> list[int]:
        return [await part for part in parts]

    return PartedCall(Started[list[int]](thread, forgotten.append), 2, conclude)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.stop()


def test_a_started_call_ends_with_the_last_of_its_requests(thread: LoopThread) -> None:
    call = started_call(thread, [])
    first, second = call.parts
    second.set_result(2)
    assert not call.whole.done()
    first.set_result(1)
    assert call.whole.result() == [1, 2]


def test_a_started_call_has_the_error_of_its_first_request_that_failed(thread: LoopThread) -> None:
    call = started_call(thread, [])
    first, second = call.parts
    second.set_exception(UnknownTensor("second"))
    first.set_exception(UnknownTensor("first"))
    with pytest.raises(UnknownTensor, match="first"):
        call.whole.result()


def test_whoever_waits_for_a_started_call_drives_the_loop(thread: LoopThread) -> None:
    call = started_call(thread, [])

    def answer(part: Future) -> None:
        assert asyncio._get_running_loop() is thread.loop
        part.set_result(0)

    for part in call.parts:
        thread.loop.call_soon_threadsafe(answer, part)
    assert call.whole.result() == [0, 0]


def test_a_cancelled_call_ends_at_once_and_only_once(thread: LoopThread) -> None:
    forgotten: list[object] = []
    call = started_call(thread, forgotten)
    assert call.whole.cancel()
    assert all(part.done() for part in call.parts), "what still comes is not taken"
    done, _ = wait([call.whole], PATIENCE_S)
    assert done == {call.whole}
    assert call.whole.cancel()
    with pytest.raises(CancelledError):
        call.whole.result()

    async def turn() -> None:
        for part in call.parts:
            part.set_result(0)

    thread.run(turn())
    assert call.whole.cancelled()
    assert forgotten == [call.whole]


def succeeded(thread: LoopThread) -> Started[int]:
    call = Started[int](thread, lambda call: None)
    call.succeed(1)
    return call


def failed(thread: LoopThread) -> Started[int]:
    call = Started[int](thread, lambda call: None)
    call.fail(UnknownTensor("w"))
    return call


def test_a_started_call_is_a_future_before_it_is_over_and_after(thread: LoopThread) -> None:
    for make in (succeeded, failed):
        over = make(thread)
        seen: list[object] = []
        over.add_done_callback(seen.append)
        assert seen == [over]
        assert wait([over], 0.0).done == {over}
        waiting = Started[int](thread, lambda call: None)
        assert not waiting.done()
        waiting.add_done_callback(seen.append)
        with ThreadPoolExecutor(2) as others:
            ended = others.submit(wait, [waiting], PATIENCE_S)
            error = others.submit(waiting.exception, PATIENCE_S)
            waiting.fail(UnknownTensor("w")) if over.exception() else waiting.succeed(1)
            assert ended.result().done == {waiting}
            assert type(error.result()) is type(over.exception())
        assert seen == [over, waiting]
        assert not waiting.cancel()
        if over.exception() is None:
            assert waiting.result() == over.result() == 1
        else:
            with pytest.raises(UnknownTensor):
                waiting.result()


@pytest.mark.parametrize("end", ["succeed", "cancel"])
def test_all_who_come_while_a_started_call_ends_are_told_of_it(thread: LoopThread, end: str) -> None:
    together = Barrier(3)

    def at_once(do: Callable[[], object]) -> object:
        together.wait(PATIENCE_S)
        return do()

    with ThreadPoolExecutor(3) as threads:
        for _ in range(200):
            call = Started[int](thread, lambda call: None)
            seen: list[object] = []
            ending = call.cancel if end == "cancel" else partial(call.succeed, 1)
            does = (partial(wait, [call], PATIENCE_S), partial(call.add_done_callback, seen.append), ending)
            waited, *others = [threads.submit(at_once, do) for do in does]
            assert waited.result() == ({call}, set())
            assert wait(others, PATIENCE_S).not_done == set()
            assert seen == [call]


def test_a_started_call_is_awaited_in_any_event_loop(thread: LoopThread) -> None:
    async def awaited() -> int:
        call = Started[int](thread, lambda call: None)
        thread.loop.call_soon_threadsafe(call.succeed, 1)
        return await asyncio.wrap_future(call)

    assert asyncio.run(awaited()) == 1
