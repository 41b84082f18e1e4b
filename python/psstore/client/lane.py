"""The short way of a blocking call: one call of the extension sends, waits and receives, without the event loop.

For tensors that were pushed or pulled like this before, while nobody else has anything under way. Whatever else
happens meanwhile, the loop goes on where it stopped: requests without an answer are their sessions' then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final

from psstore import _core
from psstore.client.arrays import Array
from psstore.client.layout import Layout
from psstore.client.loop_thread import LoopThread
from psstore.client.operations import Operations
from psstore.codec.codecs import Codecs
from psstore.net.client import SocketDriver
from psstore.protocol.client import GRACE_S
from psstore.protocol.session import NUMBERED, OPS, Answer, Request
from psstore.wire import messages as m


class NotNow(Enum):
    """A call that has to go the long way. It has done nothing yet."""

    NOT_NOW = "not now"


NOT_NOW: Final = NotNow.NOT_NOW


class Lane:
    """The methods are those of Operations, as far as they can be had at once. Any thread may call them."""

    def __init__(self, operations: Operations, driver: SocketDriver, thread: LoopThread) -> None:
        self._operations = operations
        self._client = operations.client
        self._lines = [session.line for session in operations.client.sessions]
        self._driver = driver
        self._thread = thread

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

    # ---- how ----

    def _send(self, names: tuple[str, ...], values: Sequence[Array], op: str | None) -> NotNow | None:
        habit = self._operations.habit("push", op, names)
        if habit is None:
            return NOT_NOW
        if habit.op == "PUSH":
            if not self._client.may_push or self._operations.holds_back:
                return NOT_NOW
            body, round = m.Carry(), self._client.round
        else:
            body, round = None, 0
        answers = self._ask(habit.op, habit.layout, values, body, round, self._client.timeout_s)
        if answers is NOT_NOW:
            return NOT_NOW
        self._operations.sent(habit.op, habit.layout)
        return None

    def _receive(
        self, names: tuple[str, ...], out: Sequence[Array] | None, dtype: str | None, wait_s: float | None
    ) -> Sequence[Array] | NotNow:
        habit = self._operations.habit("pull", (dtype, out is None), names)
        if habit is None:
            return NOT_NOW
        layout, client = habit.layout, self._client
        patience_s = self._operations.patience(wait_s)
        if not client.may_pull(layout.shards) or not 0.0 <= patience_s <= m.MAX_WAIT_S:
            return NOT_NOW
        results = layout.fresh() if out is None else out
        carry = m.Carry(at_least=client.decision, wait_s=patience_s)
        answers = self._ask("PULL", layout, results, carry, 0, patience_s + GRACE_S)
        if answers is NOT_NOW:
            return NOT_NOW
        self._operations.received(layout, answers)
        return results

    def _ask(
        self,
        op: str,
        layout: Layout,
        arrays: Sequence[Array],
        body: m.Carry | None,
        round: int,
        timeout_s: float,
    ) -> list[Answer] | NotNow:
        """Raises what the first slice or request raises that failed."""
        sessions, identity, facts = self._client.sessions, self._client.identity, self._client.sessions[0].facts
        number, now, told = OPS[op], self._driver.now(), facts.last
        scaled = 0 if body is None or facts.scale is None else facts.scale.decision
        outcome = self._thread.lane.call(
            layout.plan,
            arrays,
            self._lines,
            [
                Request(
                    id=0,
                    op=number,
                    future=self._driver.future(),
                    deadline=now + timeout_s,
                    started=now,
                    table=frame.table,
                    body=body,
                    round=round,
                    scaled=scaled,
                )
                for frame in layout.frames
            ],
            number,
            op != "PULL",
            op in NUMBERED,
            round,
            identity.rank,
            identity.incarnation,
            identity.features != 0,
            0 if body is None else told,
            [] if body is None else self._bodies(body, told),
        )
        if outcome is None:
            return NOT_NOW
        succeeded, results = outcome
        if succeeded:
            return [
                sessions[frame.shard].answered(result, now, scaled=scaled)
                for frame, result in zip(layout.frames, results, strict=True)
            ]
        return self._thread.run(self._conclude(layout, results, scaled))

    def _bodies(self, body: m.Carry, told: int) -> list[bytes]:
        """What goes to each shard."""
        return [
            _encoded(body)
            if session.line.told >= told and session.facts.scale is None
            else m.encode_body(session.completed(body))
            for session in self._client.sessions
        ]

    async def _conclude(self, layout: Layout, results: Sequence[_core.Frame | Request], scaled: int) -> list[Answer]:
        """Waits for the rest, on the loop, and says what failed."""
        futures = []
        for frame, result in zip(layout.frames, results, strict=True):
            session = self._client.sessions[frame.shard]
            if isinstance(result, Request):
                futures.append(result.future)
            else:
                answer = self._driver.future()
                answer.set_result(session.answered(result, self._driver.now(), scaled=scaled))
                futures.append(answer)
            self._driver.resume(session)  # an answered one, too: another frame may have come behind it
        with self._operations.forgetting_unknown(layout.tensors):
            return await self._client.answers(futures)


@lru_cache(maxsize=16)
def _encoded(body: m.Carry) -> bytes:
    return m.encode_body(body)
