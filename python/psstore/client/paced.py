"""The short way of a round that was committed early, over links: calls that are started, and go when it is their turn.

For tensors that went like this before, as in lane.py, whose calls go at once. What waits is no task, but a place in the
queues of flow_control.py: whoever takes an answer there sends what it has made room for, and whoever takes a
call's last one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from psstore.client.arrays import Array
from psstore.client.flow_control import Pace
from psstore.client.layout import Layout, Pull, Push
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.started import Part, Started, Unfinished
from psstore.codec.codecs import Codecs
from psstore.protocol.client import Transfer
from psstore.wire import messages as m


class PacedCalls:
    """Methods take what the store's take, and return what those return; or None: it can't be done this way, or not now,
    and nothing was done. Any thread may call them."""

    def __init__(self, operations: Operations, thread: LoopThread) -> None:
        self._context = operations.context
        self._writing = operations.writing
        self._reading = operations.reading
        self._client = operations.client
        self._thread = thread

    def start_push_many(
        self,
        items: object,
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> Started[None] | None:
        pace, client = self._context.turns, self._client
        if pace is None or codec is not None or not isinstance(items, Mapping):
            return None
        asked = Push(tuple(items), list(items.values()), op)
        habit = self._context.layouts.habit(asked.manner)
        if habit is None or habit.op != "PUSH" or not client.may_push or self._context.coded.has_pending:
            return None
        transfers = habit.layout.transfers_of(asked.values)
        return self._push(pace, habit.layout, transfers) if transfers else None

    def start_pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
    ) -> Started[list[Array]] | None:
        pace = self._context.turns
        if pace is None or codec is not None or if_newer_than is not None:
            return None
        habit = self._context.layouts.habit(Pull(tuple(names), out, dtype=dtype).manner)
        patience_s = self._context.patience(wait_s)
        if habit is None or not 0.0 <= patience_s <= m.MAX_WAIT_S:
            return None
        if not self._client.may_pull(habit.layout.ways, trained=habit.layout.is_trained):
            return None
        results = habit.layout.fresh() if out is None else list(out)
        transfers = habit.layout.transfers_of(results)
        return self._pull(pace, habit.layout, transfers, results, patience_s) if transfers else None

    # ---- how ----

    def _push(self, pace: Pace, layout: Layout, transfers: Sequence[Transfer]) -> Started[None]:
        client, writing = self._client, self._writing
        whole = Started[None](self._thread, writing.push_ended)

        async def conclude(parts: Sequence[Part]) -> None:
            writing.push_ended(whole)
            await self._context.answers(layout, parts)
            writing.sent("PUSH", layout)

        def go() -> bool:
            if not whole.cancelled():
                pace.flight.queue(client.ask_to_stage, transfers, futures)
            return not whole.cancelled()

        def begin() -> None:
            writing.under_way.add(whole)
            pace.queue(layout.tensors, go)

        futures = self._parts(whole, transfers, conclude)
        self._thread.at_once(begin)
        return whole

    def _pull(
        self, pace: Pace, layout: Layout, transfers: Sequence[Transfer], results: list[Array], wait_s: float
    ) -> Started[list[Array]]:
        ids = frozenset[int]()
        whole = Started[list[Array]](self._thread, lambda _: pace.end_read(ids))

        async def conclude(parts: Sequence[Part]) -> list[Array]:
            pace.end_read(ids)
            self._reading.received(layout, await self._context.answers(layout, parts))
            return results

        def go() -> None:
            if not whole.cancelled():
                self._client.ask_to_read(transfers, futures, wait_s=wait_s)

        def begin() -> None:
            nonlocal ids
            ids = pace.begin_read(layout.ids, go)

        futures = self._parts(whole, transfers, conclude)
        self._thread.at_once(begin)
        return whole

    @staticmethod
    def _parts(
        whole: Started[Any],
        transfers: Sequence[Transfer],
        conclude: Callable[[Sequence[Part]], Coroutine[Any, Any, Any]],
    ) -> Sequence[Part]:
        return Unfinished(whole, [None] * len(transfers), conclude).parts
