"""The short way: calls that go as such a call went before, without the event loop, in the extension.

For tensors that were pushed or pulled like this before; a blocking call while nobody else has anything under way. What
the extension does by itself is looking up what the call comes to, sending, waiting and receiving; here is what it asks
for. Whatever else happens meanwhile, the loop goes on where it stopped: requests without an answer are their sessions'
then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from psstore import _core
from psstore.client.arrays import Array
from psstore.client.layout import Layout, Reply
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.paced import PacedCalls
from psstore.client.started import Part, Started, Unfinished
from psstore.net.client import SocketDriver
from psstore.protocol.client import GRACE_S
from psstore.protocol.requests import NUMBERED, OPS, Answer, Request
from psstore.wire import messages as m


class Lane:
    """Any thread may call it."""

    def __init__(self, operations: Operations, driver: SocketDriver, thread: LoopThread) -> None:
        self._context = operations.context
        self._writing = operations.writing
        self._reading = operations.reading
        self._client = client = operations.client
        self._decisions = client.shards[0].decisions
        self._driver = driver
        self._thread = thread
        who = client.identity
        self._sender = _core.Sender(
            [session.line for session in client.sessions],
            request=Request,
            rank=who.rank,
            incarnation=who.incarnation,
            checksum=who.features != 0,
            keeps_releases=client.sessions[0].keeps_releases,
        )
        self.paced = PacedCalls(operations, thread)
        self._plain = {op: _core.Terms(OPS[op], timeout_s=client.timeout_s) for op in NUMBERED}
        self._carrying: dict[str, tuple[Hashable, _core.Terms]] = {}
        """By operation: the last terms that brought no news, and what they depend on."""

    def short_calls(self) -> _core.ShortCalls:
        return _core.ShortCalls(
            self._thread.lane,
            self._sender,
            habits=self._context.layouts.habits,
            terms=self._thread.terms,
            renew=self._terms,
            future=self._driver.future,
            sent=self._writing.sent,
            received=self._reading.received,
            newer=self._newer,
            conclude=self._conclude,
            starting=self._starting(),
        )

    def _starting(self) -> _core.StartingParts:
        """The others."""
        return _core.StartingParts(
            make=partial(Started, self._thread, self._writing.push_ended),
            ended=self._ended,
            unfinished=self._unfinished,
            look_after=self._look_after,
            catch_up=self._thread.catch_up,
            paced=lambda: self._context.turns is not None,
            under_way=self._writing.under_way,
        )

    # ---- what is said ----

    def _terms(self, op: str, layout: Layout, wait_s: float | None) -> _core.Terms | None:
        """What the frames say besides their slices. None: something has to be said or done before.

        What holds for all such calls is remembered until somebody has the loop, as all of it changes there."""
        (known,) = self._thread.terms  # another one, if somebody has it meanwhile
        client = self._client
        if op == "PULL":
            patience_s = self._context.patience(wait_s)
            if not client.may_pull(layout.ways, trained=layout.is_trained) or not 0.0 <= patience_s <= m.MAX_WAIT_S:
                return None
            terms, news = self._carry(op, at_least=client.decision, wait_s=patience_s, timeout_s=patience_s + GRACE_S)
            common = wait_s is None and client.may_pull(frozenset(), trained=True)
        elif op == "PUSH":
            if not client.may_push or self._context.coded.has_pending:
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
        decisions = self._decisions
        last, scale = decisions.last, decisions.scale
        news = scale is not None or not self._sender.has_told(last)
        key = (last, round, at_least, wait_s)
        before = self._carrying.get(op)
        if before is not None and before[0] == key and not news:
            return before[1], news
        body = m.Carry(at_least=at_least, wait_s=wait_s)
        said = [session.completed(body) for session in self._client.sessions] if news else [body]
        bodies = [m.encode_body(one) for one in said]
        scaled = 0 if scale is None else scale.decision
        # By position, as each round has terms of its own: keywords would take as long as all else here.
        terms = _core.Terms(OPS[op], timeout_s, round, body, bodies, last, scaled)
        if not news:
            self._carrying[op] = key, terms
        return terms, news

    # ---- how ----

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
        return await self._context.answers(layout, futures)

    def _newer(self, layout: Layout, answers: Sequence[Reply], arrays: Sequence[Array]) -> list[Array]:
        """The results of a blocking pull of what is newer, which was answered."""
        results, torn = self._reading.received_newer(layout, answers, arrays)
        if torn:
            self._thread.run(self._reading.pull_again(layout, torn, arrays, wait_s=None))
        return results

    # ---- what becomes of a call that was started ----

    def _ended(
        self, whole: Started[Any], op: str, layout: Layout, answers: Sequence[_core.Frame], results: Any
    ) -> None:
        """It was answered, and well."""
        self._writing.push_ended(whole)
        if whole.done():  # cancelled
            return
        try:
            self._note(op, layout, answers)
        except BaseException as error:  # of a signal's handler
            whole.fail(error)
            raise
        whole.succeed(results)

    def _note(self, op: str, layout: Layout, answers: Sequence[Reply]) -> None:
        if op == "PULL":
            self._reading.received(layout, answers)
        else:
            self._writing.sent(op, layout)

    def _unfinished(
        self, whole: Started[Any], op: str, layout: Layout, answers: Sequence[_core.Frame | None], results: Any
    ) -> list[Part]:
        """Its sessions have what is left of it: futures for the answers that have not come, in order."""

        async def conclude(parts: Sequence[Part]) -> Any:
            self._writing.push_ended(whole)
            self._note(op, layout, await self._context.answers(layout, parts))
            return results

        came = [None if answer is None else Answer(answer.table, answer.sequence) for answer in answers]
        parts = Unfinished(whole, came, conclude).parts
        return [part for part, answer in zip(parts, came, strict=True) if answer is None]

    def _look_after(self, layout: Layout) -> None:
        self._driver.look_after([self._client.sessions[way] for way in layout.ways])
