"""A client's sessions with its store's shards, and how a request is made over them.

A request is under way as soon as it is made; awaiting only collects. All that is awaited are the driver's futures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from psstore.errors import BadArgument, BadBody, PsstoreError
from psstore.protocol.requests import IGNORED, Future
from psstore.protocol.session import Session
from psstore.wire import messages as m

T = TypeVar("T")

GRACE_S = 5.0
"""A client waits so much longer than it told the store to wait: the store's error says more."""


class Driver(Protocol):
    """What the client needs from the world."""

    def now(self) -> float: ...
    def future(self) -> Future: ...
    def flush(self, session: Session) -> None:
        """The session may have output."""

    def await_answer(self, session: Session) -> None:
        """The session has a request, and its caller waits for nothing else: the answer may be there on return."""


class Links:
    """The sessions of one client. Not thread-safe."""

    def __init__(self, sessions: Sequence[Session], *, driver: Driver, timeout_s: float) -> None:
        """`sessions`: with each shard, then as many again for every further channel."""
        self.sessions = sessions
        self.shards = sessions[: sum(session.channel == 0 for session in sessions)]
        """The session with each shard for all that is no data: the one on channel 0. The first is the coordinator's."""
        self.driver = driver
        self.timeout_s = timeout_s
        """How long a request may take, when the caller names no time."""

    def request(self, session: Session, op: str, *, timeout_s: float | None = None, **parts: Any) -> Future:
        """Sends a request."""
        future = self.ask(session, op, self.driver.future(), timeout_s=timeout_s, **parts)
        self.driver.flush(session)
        return future

    def ask(self, session: Session, op: str, future: Future, *, timeout_s: float | None = None, **parts: Any) -> Future:
        """Makes a request that goes with the next flush."""
        chosen = self.timeout_s if timeout_s is None else timeout_s
        session.request(op, future, now=self.driver.now(), timeout_s=chosen, **parts)
        return future

    def say(self, session: Session, op: str, **parts: Any) -> None:
        """Sends a request of which nobody waits for the answer."""
        if session.failure is None:
            self.ask(session, op, IGNORED, **parts)
            self.driver.flush(session)

    def flush(self) -> None:
        """Sends what was asked over any session."""
        for session in self.sessions:
            self.driver.flush(session)

    async def ask_all(self, op: str, **parts: Any) -> list[Any]:
        """Asks every shard, and returns their answers in their order."""
        return await collect([self.request(session, op, **parts) for session in self.shards])

    async def ask_coordinator(self, op: str, body: m.Message, kind: type[T]) -> T:
        """Asks the coordinator, whose answer is of that kind."""
        return expect(kind, await self.request(self.shards[0], op, body=body))


def check_wait(wait_s: float) -> None:
    """Raises BadArgument if the store would not wait for so long."""
    if not 0.0 <= wait_s <= m.MAX_WAIT_S:
        raise BadArgument(f"wait_s is {wait_s}; it must be from 0 to {m.MAX_WAIT_S:g} seconds")


def expect(kind: type[T], reply: object) -> T:
    """The reply, which is of that kind. Raises BadBody."""
    if not isinstance(reply, kind):
        raise BadBody(f"the coordinator answered with {type(reply).__name__}, not {kind.__name__}")
    return reply


async def collect(futures: Sequence[Future]) -> list[Any]:
    """All results, in order. If some fail, waits for the rest, then raises the first failure."""
    results, first = await ended(futures)
    if first is not None:
        raise first
    return results


async def ended(futures: Sequence[Future]) -> tuple[list[Any], PsstoreError | None]:
    """All results, in order, and the first failure; waits for all of them. If it is interrupted, what still comes goes
    nowhere."""
    results = []
    first: PsstoreError | None = None
    try:
        for future in futures:
            try:
                results.append(await future)
            except PsstoreError as error:
                first = first or error
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return results, first
