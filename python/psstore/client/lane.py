"""The short way: calls that go as such a call went before, without the event loop, in the extension.

For tensors that were pushed or pulled like this before; a blocking call while nobody else has anything under way. What
the extension does by itself is looking up what the call comes to, sending, waiting and receiving; here is what it asks
for. Whatever else happens meanwhile, the loop goes on where it stopped: requests without an answer are their sessions'
then.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from psstore import _core
from psstore.client.arrays import Array
from psstore.client.layout import Layout, Reply
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.started import Part, Started
from psstore.codec.codecs import Codecs
from psstore.net.client import SocketDriver
from psstore.protocol.client import GRACE_S
from psstore.protocol.session import NUMBERED, OPS, Answer, Future, Request
from psstore.wire import messages as m

T = TypeVar("T")


class Lane:
    """What starts a call returns None if it has to go the long way: nothing is done then. Any thread may call it."""

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
        self._carrying: dict[str, tuple[Hashable, _core.Terms]] = {}
        """By operation: the last terms that brought no news, and what they depend on."""

    def short_calls(self) -> _core.ShortCalls:
        """The blocking ones."""
        return _core.ShortCalls(
            self._thread.lane,
            self._sender,
            habits=self._means.layouts.habits,
            terms=self._thread.terms,
            renew=self._terms,
            future=self._driver.future,
            sent=self._writing.sent,
            received=self._reading.received,
            conclude=self._conclude,
        )

    def start_push_many(
        self,
        items: object,
        *,
        op: str | None = None,
        codec: Codecs | None = None,
        loss_scale: float | None = None,
    ) -> Started[None] | None:
        if codec is not None or not isinstance(items, Mapping):
            return None
        habit = self._means.layouts.habit(("push", tuple(items), op))
        if habit is None:
            return None
        wire_op, layout = habit.op, habit.layout

        async def conclude(parts: Sequence[Part]) -> None:
            await self._taken(layout, parts)
            self._writing.sent(wire_op, layout)

        return self._start(wire_op, layout, list(items.values()), None, conclude)

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
        if codec is not None or if_newer_than is not None:
            return None
        habit = self._means.layouts.habit(("pull", tuple(names), dtype, out is None))
        if habit is None:
            return None
        layout = habit.layout
        results = layout.fresh() if out is None else list(out)

        async def conclude(parts: Sequence[Part]) -> list[Array]:
            self._reading.received(layout, await self._taken(layout, parts))
            return results

        return self._start("PULL", layout, results, wait_s, conclude)

    # ---- what is said ----

    def _terms(self, op: str, layout: Layout, wait_s: float | None) -> _core.Terms | None:
        """What the frames say besides their slices. None: something has to be said or done before.

        What holds for all such calls is remembered until somebody has the loop, as all of it changes there."""
        (known,) = self._thread.terms  # another one, if somebody has it meanwhile
        client = self._client
        if op == "PULL":
            patience_s = self._means.patience(wait_s)
            if not client.may_pull(layout.ways) or not 0.0 <= patience_s <= m.MAX_WAIT_S:
                return None
            terms, news = self._carry(op, at_least=client.decision, wait_s=patience_s, timeout_s=patience_s + GRACE_S)
            common = wait_s is None and client.may_pull(frozenset())
        elif op == "PUSH":
            if not client.may_push or self._means.coded.has_pending:
                return None
            terms, news = self._carry(op, round=client.round, timeout_s=client.timeout_s)
            common = True
        else:
            terms, news, common = self._plain[op], False, True
        if common and not news:
            known[op] = terms
        return terms

    def _carry(
        self, op: str, *, round: int = 0, at_least: int = 0, wait_s: float = 0.0, timeout_s: float
    ) -> tuple[_core.Terms, bool]:
        """Of requests that bring the shards what they were not told yet. Also: whether that is anything."""
        facts = self._facts
        last, scale = facts.last, facts.scale
        news = scale is not None or not self._sender.has_told(last)
        key = (last, round, at_least, wait_s)
        before = self._carrying.get(op)
        if before is not None and before[0] == key and not news:
            return before[1], news
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
        return terms, news

    # ---- how ----

    def _start(
        self,
        op: str,
        layout: Layout,
        arrays: Sequence[Array],
        wait_s: float | None,
        conclude: Callable[[Sequence[Part]], Coroutine[Any, Any, T]],
    ) -> Started[T] | None:
        if not layout.frames or self._means.turns is not None:
            return None
        known = self._thread.terms[0].get(op) if wait_s is None else None
        terms = known or self._terms(op, layout, wait_s)
        if terms is None:
            return None
        ended = self._writing.push_ended
        started = Started(len(layout.frames), conclude=conclude, ended=ended, thread=self._thread)
        under_way = self._writing.under_way if op == "PUSH" else None
        sent = self._thread.lane.start(
            self._sender, layout.plan, arrays, terms, list(started.parts), under_way, started
        )
        if sent is None:
            return None
        self._driver.look_after(
            [self._client.sessions[way] for way in layout.ways], self._driver.now() + terms.timeout_s, unsent=not sent
        )
        return started

    def _conclude(self, layout: Layout, results: Sequence[_core.Frame | Request]) -> Sequence[Reply]:
        """Waits for the rest of a blocking call, and raises what the first slice or request raises that failed."""
        return self._thread.run(self._rest(layout, results))

    async def _rest(self, layout: Layout, results: Sequence[_core.Frame | Request]) -> list[Answer]:
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

    async def _taken(self, layout: Layout, parts: Sequence[Part]) -> Sequence[Answer]:
        """What a call came to that was started."""
        for part in parts:
            if part.result is None or part.result.table.first_failure() is not None:
                return await self._answers(layout, parts)
        return [part.result for part in parts]

    async def _answers(self, layout: Layout, requests: Sequence[Future]) -> list[Answer]:
        with self._means.forgetting_unknown(layout.tensors):
            return await self._client.answers(requests)
