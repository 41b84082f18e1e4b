"""The short way of a blocking call: one call of the extension sends, waits and receives, without the event loop.

For tensors that were pushed or pulled like this before, while nobody else has anything under way. Whatever else
happens meanwhile, the loop goes on where it stopped: requests without an answer are their sessions' then.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

from psstore import _core
from psstore.client.arrays import Array
from psstore.client.layout import Habit, Layout, Reply
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.started import Started
from psstore.codec.codecs import Codecs
from psstore.net.client import SocketDriver
from psstore.protocol.client import GRACE_S
from psstore.protocol.session import NUMBERED, OPS, Answer, Future, Request
from psstore.wire import messages as m

T = TypeVar("T")


class NotNow(Enum):
    """A call that has to go the long way. It has done nothing yet."""

    NOT_NOW = "not now"


NOT_NOW: Final = NotNow.NOT_NOW


class Lane:
    """The methods are those of Operations, as far as they can be had at once. Any thread may call them."""

    def __init__(self, operations: Operations, driver: SocketDriver, thread: LoopThread) -> None:
        self._means = operations.means
        self._writing = operations.writing
        self._reading = operations.reading
        self._client = client = operations.client
        self._facts = client.shards[0].facts
        self._driver = driver
        self._thread = thread
        who = client.identity
        self._sender = _core.Sender(
            [session.line for session in client.sessions],
            request=Request,
            rank=who.rank,
            incarnation=who.incarnation,
            checksum=who.features != 0,
        )
        self._plain = {op: _core.Terms(OPS[op], timeout_s=client.timeout_s) for op in NUMBERED}
        self._carrying: dict[str, tuple[tuple[float, ...], _core.Terms]] = {}
        """By operation: the last terms that brought no news, and what they depend on."""
        self._futures: list[Future] = []
        """For requests that are not answered at once."""

    def push(
        self,
        name: str,
        value: Array,
        *,
        op: str | None = None,
        codec: str | None = None,
        loss_scale: float | None = None,
    ) -> NotNow | None:
        return NOT_NOW if codec is not None else self._send((name,), (value,), op)

    def push_many(
        self,
        items: object,
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> NotNow | None:
        if codec is not None or not isinstance(items, Mapping):
            return NOT_NOW
        return self._send(tuple(items), list(items.values()), op)

    def pull(
        self,
        name: str,
        *,
        out: Array | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: str | None = None,
        wait_s: float | None = None,
    ) -> Array:
        if codec is not None or if_newer_than is not None:
            return NOT_NOW
        results = self._receive((name,), None if out is None else (out,), dtype, wait_s)
        return results if results is NOT_NOW else results[0]

    def pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
    ) -> list[Array] | NotNow:
        if codec is not None or if_newer_than is not None:
            return NOT_NOW
        results = self._receive(tuple(names), out, dtype, wait_s)
        return results if results is NOT_NOW else list(results)

    def start_push_many(
        self,
        items: object,
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> Started[None] | NotNow:
        if codec is not None or not isinstance(items, Mapping):
            return NOT_NOW
        known = self._writing_of(tuple(items), op)
        if known is None:
            return NOT_NOW
        (wire_op, layout), terms = known

        async def conclude(requests: Sequence[Future]) -> None:
            await self._answers(layout, requests)
            self._writing.sent(wire_op, layout)

        return self._start(layout, list(items.values()), terms, conclude, pushes=wire_op == "PUSH")

    def start_pull_many(
        self,
        names: Sequence[str],
        *,
        out: Sequence[Array] | None = None,
        if_newer_than: int | None = None,
        dtype: str | None = None,
        codec: Codecs | None = None,
        wait_s: float | None = None,
    ) -> Started[list[Array]] | NotNow:
        if codec is not None or if_newer_than is not None:
            return NOT_NOW
        known = self._reading_of(tuple(names), dtype, wait_s, fresh=out is None)
        if known is None:
            return NOT_NOW
        layout, terms = known
        results = layout.fresh() if out is None else list(out)

        async def conclude(requests: Sequence[Future]) -> list[Array]:
            self._reading.received(layout, await self._answers(layout, requests))
            return results

        return self._start(layout, results, terms, conclude, pushes=False)

    # ---- what is said ----

    def _writing_of(self, names: tuple[str, ...], op: str | None) -> tuple[Habit, _core.Terms] | None:
        """None: something has to be said or done before, or it was not done lately."""
        habit = self._means.layouts.habit(("push", names, op))
        if habit is None:
            return None
        if habit.op != "PUSH":
            return habit, self._plain[habit.op]
        if not self._client.may_push or self._means.coded.has_pending:
            return None
        return habit, self._carry("PUSH", round=self._client.round, timeout_s=self._client.timeout_s)

    def _reading_of(
        self, names: tuple[str, ...], dtype: str | None, wait_s: float | None, *, fresh: bool
    ) -> tuple[Layout, _core.Terms] | None:
        habit = self._means.layouts.habit(("pull", names, dtype, fresh))
        if habit is None:
            return None
        layout, client = habit.layout, self._client
        patience_s = self._means.patience(wait_s)
        if not client.may_pull(layout.ways) or not 0.0 <= patience_s <= m.MAX_WAIT_S:
            return None
        return layout, self._carry("PULL", at_least=client.decision, wait_s=patience_s, timeout_s=patience_s + GRACE_S)

    def _carry(
        self, op: str, *, round: int = 0, at_least: int = 0, wait_s: float = 0.0, timeout_s: float
    ) -> _core.Terms:
        """Of requests that bring the shards what they were not told yet."""
        facts = self._facts
        last, scale = facts.last, facts.scale
        news = scale is not None or not self._sender.has_told(last)
        key = (last, round, at_least, wait_s)
        known = self._carrying.get(op)
        if known is not None and known[0] == key and not news:
            return known[1]
        body = m.Carry(at_least=at_least, wait_s=wait_s)
        said = [session.completed(body) for session in self._client.sessions] if news else [body]
        terms = _core.Terms(
            OPS[op],
            timeout_s=timeout_s,
            round=round,
            body=body,
            bodies=[m.encode_body(one) for one in said],
            told=last,
            scaled=0 if scale is None else scale.decision,
        )
        if not news:
            self._carrying[op] = key, terms
        return terms

    # ---- how ----

    def _send(self, names: tuple[str, ...], values: Sequence[Array], op: str | None) -> NotNow | None:
        known = self._writing_of(names, op)
        if known is None:
            return NOT_NOW
        habit, terms = known
        if self._ask(habit.layout, values, terms) is NOT_NOW:
            return NOT_NOW
        self._writing.sent(habit.op, habit.layout)
        return None

    def _receive(
        self, names: tuple[str, ...], out: Sequence[Array] | None, dtype: str | None, wait_s: float | None
    ) -> Sequence[Array] | NotNow:
        known = self._reading_of(names, dtype, wait_s, fresh=out is None)
        if known is None:
            return NOT_NOW
        layout, terms = known
        results = layout.fresh() if out is None else out
        replies = self._ask(layout, results, terms)
        if replies is NOT_NOW:
            return NOT_NOW
        self._reading.received(layout, replies)
        return results

    def _start(
        self,
        layout: Layout,
        arrays: Sequence[Array],
        terms: _core.Terms,
        conclude: Callable[[Sequence[Future]], Coroutine[Any, Any, T]],
        *,
        pushes: bool,
    ) -> Started[T] | NotNow:
        if not layout.frames or self._means.turns is not None:
            return NOT_NOW
        started = Started(len(layout.frames), conclude=conclude, ended=self._writing.push_ended, thread=self._thread)
        under_way = self._writing.under_way if pushes else None
        sent = self._thread.lane.start(
            self._sender, layout.plan, arrays, terms, list(started.parts), under_way, started
        )
        if sent is None:
            return NOT_NOW
        self._driver.look_after(
            [self._client.sessions[way] for way in layout.ways], self._driver.now() + terms.timeout_s, unsent=not sent
        )
        return started

    def _ask(self, layout: Layout, arrays: Sequence[Array], terms: _core.Terms) -> Sequence[Reply] | NotNow:
        """Raises what the first slice or request raises that failed."""
        while len(self._futures) < len(layout.frames):
            self._futures.append(self._driver.future())
        outcome = self._thread.lane.call(self._sender, layout.plan, arrays, terms, self._futures)
        if outcome is None:
            return NOT_NOW
        succeeded, results = outcome
        return results if succeeded else self._thread.run(self._conclude(layout, results))

    async def _conclude(self, layout: Layout, results: Sequence[_core.Frame | Request]) -> list[Answer]:
        """Waits for the rest, on the loop, and says what failed."""
        futures = []
        for frame, result in zip(layout.frames, results, strict=True):
            if isinstance(result, Request):
                futures.append(result.future)
            else:
                answer = self._driver.future()
                answer.set_result(Answer(result.table, result.sequence))
                futures.append(answer)
            self._driver.resume(self._client.sessions[frame.way])  # answered or not: more may have come behind it
        return await self._answers(layout, futures)

    async def _answers(self, layout: Layout, requests: Sequence[Future]) -> list[Answer]:
        with self._means.forgetting_unknown(layout.tensors):
            return await self._client.answers(requests)
