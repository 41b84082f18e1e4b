"""Direct calls: pushes and pulls that go as such a call went before, made and answered in the extension.

For tensors that were pushed or pulled like this before; a blocking call while nobody else has anything under way. What
the extension does by itself is looking up what the call comes to, sending, waiting and receiving; here is what it asks
for. The requests are their sessions' like any other: whatever else happens meanwhile, the loop goes on with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Protocol

from psstore import _core
from psstore.client.arrays import Array
from psstore.client.layout import Layout, Reply
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.client.paced import PacedCalls
from psstore.client.started import Started
from psstore.protocol.links import GRACE_S
from psstore.protocol.requests import OPS, Future
from psstore.protocol.session import Session
from psstore.wire import messages as m


class DirectDriver(Protocol):
    """What drives a store's sessions, as far as direct calls ask it for anything."""

    def future(self) -> Future: ...

    def resume(self, session: Session) -> None:
        """A call has sent and received for it without the loop, and left the rest to it."""

    def look_after(self, sessions: Collection[Session]) -> None:
        """A call that is over, or not waited for, has left them something to do. Any thread may call it."""


PLAIN_WRITES = ("ASSIGN", "ADD")


class Direct:
    """The direct calls of one store. Any thread may make them."""

    def __init__(self, operations: Operations, driver: DirectDriver, thread: LoopThread) -> None:
        self._context = operations.context
        self._writing = operations.writing
        self._reading = operations.reading
        self._client = client = operations.client
        self._reads_consistently = operations.one_version.is_default
        self._driver = driver
        self._thread = thread
        self.paced = PacedCalls(operations, thread)
        self._plain = {op: _core.CallTerms(OPS[op], client.links.timeout_s) for op in PLAIN_WRITES}

    def calls(self) -> _core.DirectCalls:
        return _core.DirectCalls(
            self._thread.calls,
            [session.core for session in self._client.sessions],
            plans=self._context.layouts.plans,
            terms=self._thread.terms,
            whose=self,
            renew=self._terms,
            sent=self._writing.sent,
            received=self._reading.received,
            newer=self._newer,
            conclude=self._conclude,
            reads_consistently=self._reads_consistently,
            starting=_core.StartingParts(
                make=partial(Started, self._thread, self._writing.push_forgotten),
                ended=self._ended,
                look_after=self._look_after,
                catch_up=self._thread.catch_up,
                paced=lambda: self._context.turns is not None,
                under_way=self._writing.under_way,
            ),
        )

    # ---- what is said ----

    def _terms(self, op: str, layout: Layout, wait_s: float | None) -> _core.CallTerms | None:
        """What the frames say besides their slices. None: something has to be said or done before.

        What holds for all such calls is remembered until somebody has the loop, as all of it changes there."""
        known = self._thread.terms[0].setdefault(self, {})  # another one, if somebody has it meanwhile
        client = self._client
        if op == "PULL":
            patience_s = self._context.patience(wait_s)
            if not client.may_pull(layout.ways, trained=layout.is_trained) or not 0.0 <= patience_s <= m.MAX_WAIT_S:
                return None
            terms = _core.CallTerms(OPS[op], patience_s + GRACE_S, 0, True, client.worker.decision, patience_s)
            if wait_s is not None or client.owes_decisions or not (layout.is_trained or client.worker.is_current):
                return terms
        elif op == "PUSH":
            if not client.worker.may_push or self._context.coded.has_pending:
                return None
            terms = _core.CallTerms(OPS[op], client.links.timeout_s, client.worker.round, True)
        else:
            terms = self._plain[op]
        known[op] = terms
        return terms

    # ---- what becomes of a blocking call ----

    def _conclude(self, layout: Layout, call: _core.Call) -> Sequence[Reply]:
        """Waits for what is missing of a blocking call, and raises what the first slice or request raises that
        failed."""
        if not call.over:
            self._thread.run(self._rest(layout, call))
        return self._context.checked(layout, call.answers(), call.take_error())

    async def _rest(self, layout: Layout, call: _core.Call) -> None:
        over = self._driver.future()
        call.wait(over)
        for way in layout.ways:
            self._driver.resume(self._client.sessions[way])  # answered or not: more may have come behind it
        try:
            if not call.over:
                await over
        finally:
            if not call.over:  # interrupted
                call.forget()

    def _newer(self, layout: Layout, answers: Sequence[Reply], arrays: Sequence[Array]) -> list[Array]:
        """The results of a blocking pull of what is newer, which was answered."""
        results, torn = self._reading.received_newer(layout, answers, arrays)
        if torn:
            self._thread.run(self._reading.pull_again(layout, torn, arrays, wait_s=None))
        return results

    # ---- what becomes of a call that was started ----

    def _ended(
        self,
        whole: Started[Any],
        op: str,
        layout: Layout,
        answers: Sequence[_core.Frame],
        error: BaseException | None,
        results: Any,
    ) -> None:
        """All its requests have ended. `answers`: none of a write that went well."""
        self._writing.push_ended(whole)
        if whole.done():  # cancelled
            return
        try:
            if answers or error is not None:
                self._context.checked(layout, answers, error)
            if op == "PULL":
                self._reading.received(layout, answers)
            else:
                self._writing.sent(op, layout)
        except Exception as failure:
            whole.fail(failure)
        except BaseException as interruption:  # of a signal's handler
            whole.fail(interruption)
            raise
        else:
            whole.succeed(results)

    def _look_after(self, layout: Layout) -> None:
        self._driver.look_after([self._client.sessions[way] for way in layout.ways])
