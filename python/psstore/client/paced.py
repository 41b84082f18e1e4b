"""Started calls of a round that was committed early, over links: they go when it is their turn.

For tensors that went like this before, as in direct.py, whose calls go at once. What waits is no task, but a place in
the queues of flow_control.py: whoever takes an answer there sends what it has made room for, and whoever takes a call's
last one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

from psstore.client.arrays import Array
from psstore.client.flow_control import Pace
from psstore.client.layout import Layout, Pull, Push
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.started import Started
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
        self._reads_consistently = operations.one_version.is_default

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
        plan = self._context.layouts.plan(asked.cache_key)
        if plan is None or plan.op != "PUSH" or not client.worker.may_push or self._context.coded.has_pending:
            return None
        transfers = plan.layout.transfers_of(asked.values)
        return self._push(pace, plan.layout, transfers) if transfers else None

    def start_pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
        consistent: bool | None = None,
    ) -> Started[list[Array]] | None:
        """Pulls that are to be of one version are none of these: whether they are is for the loop to see."""
        pace = self._context.turns
        if consistent is None:
            consistent = self._reads_consistently
        if pace is None or codec is not None or if_newer_than is not None or consistent:
            return None
        plan = self._context.layouts.plan(Pull(tuple(names), out, dtype=dtype).cache_key)
        patience_s = self._context.patience(wait_s)
        if plan is None or not 0.0 <= patience_s <= m.MAX_WAIT_S:
            return None
        if not self._client.may_pull(plan.layout.ways, trained=plan.layout.is_trained):
            return None
        results = plan.layout.fresh() if out is None else list(out)
        transfers = plan.layout.transfers_of(results)
        return self._pull(pace, plan.layout, transfers, results, patience_s) if transfers else None

    # ---- how ----

    def _push(self, pace: Pace, layout: Layout, transfers: Sequence[Transfer]) -> Started[None]:
        client, writing = self._client, self._writing
        whole = Started[None](self._thread, writing.push_forgotten)

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
        return PartedCall(whole, len(transfers), conclude).parts


class PartedCall:
    """A call whose requests go one by one: it ends with the last of them."""

    def __init__(
        self,
        whole: Started[Any],
        num_parts: int,
        conclude: Callable[[Sequence[Part]], Coroutine[Any, Any, Any]],
    ) -> None:
        """`conclude`: what the call comes to, of parts that have all ended; runs with the loop held."""
        self.whole = whole
        self.parts = [Part(self) for _ in range(num_parts)]
        self._left = num_parts
        self._conclude = conclude

    def part_ended(self) -> None:
        self._left -= 1
        if self._left or self.whole.done():
            return
        try:
            self._conclude(self.parts).send(None)
        except StopIteration as stop:
            self.whole.succeed(stop.value)
        except Exception as error:
            self.whole.fail(error)


class Part:
    """What one of the call's requests came to."""

    __slots__ = ("_call", "_error", "_over", "_result")

    def __init__(self, call: PartedCall) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = False

    @property
    def result(self) -> Any:
        """None: there is none, or it failed."""
        return self._result

    def done(self) -> bool:
        return self._over or self.cancelled()

    def set_result(self, result: Any, /) -> None:
        self._result, self._over = result, True
        self._call.part_ended()

    def set_exception(self, error: BaseException, /) -> None:
        self._error, self._over = error, True
        self._call.part_ended()

    def cancel(self) -> None:
        """Does nothing: it is the whole that is cancelled."""

    def cancelled(self) -> bool:
        return self._call.whole.cancelled()

    def __await__(self) -> Generator[Any, Any, Any]:
        """REQUIRES: it is done."""
        yield from ()
        if self._error is not None:
            raise self._error
        return self._result
