"""How decisions come from the coordinator to the other shards: a client learns them, and tells each shard what it may
lack.

Requests for data carry decisions along; here is what is done so that a shard hears of them that is asked for nothing,
and so that a client hears of those that others brought about.
"""

from __future__ import annotations

from collections.abc import Sequence

from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.links import GRACE_S, Links, check_wait, collect
from psstore.protocol.requests import Future
from psstore.protocol.session import Session
from psstore.wire import messages as m


class DecisionCarrier:
    """What one client knows of decisions, and which of its shards may lack them."""

    def __init__(self, links: Links, known: DecisionCache) -> None:
        self.known = known
        self._links = links

    @property
    def version(self) -> int:
        """Number of the last decision that this client knows, or that every shard has told it of."""
        sessions, num_shards = self._links.sessions, len(self._links.shards)
        heard = [max(one.version for one in sessions[shard::num_shards]) for shard in range(num_shards)]
        return max(self.known.last, min(heard))

    async def learn_last(self) -> int:
        """The last decision that anybody was told of, known here from now on. The coordinator's own shard is at it, and
        says so in any answer; that and all before it are asked for only if another shard may lack it."""
        first = self._links.shards[0]
        await self._links.request(first, "PULL", body=m.Carry())
        await self.learn_up_to(first.version)
        return self.version

    async def learn_up_to(self, version: int) -> None:
        """Asks for the decisions up to that one, if another shard may lack one of them."""
        if self.version < version:
            asked = m.Decisions(since=self.known.last)
            decided = await self._links.ask_coordinator("DECISIONS", asked, m.Decided)
            self.known.learn(decided.last, decided.decisions)
            self.forget_applied()

    def forget_applied(self) -> None:
        """Drops the decisions that every shard has said to be at."""
        for session in self._links.sessions:
            self.known.heard(session.shard, session.core.version)

    async def reach(self, version: int, *, wait_s: float) -> None:
        """Returns when that decision was made. Raises DeadlineExceeded."""
        check_wait(wait_s)
        carry = m.Carry(at_least=version, wait_s=wait_s)
        await self._links.request(self._links.shards[0], "PULL", body=carry, timeout_s=wait_s + GRACE_S)

    def behind(self) -> list[Session]:
        """The sessions whose shard may lack the last decision, or its scale."""
        scaled = self.known.scale.decision if self.known.scale is not None else 0
        last, told, shards = self.known.carried.last, set[int](), self._links.shards
        for session in self._links.sessions:
            if session.core.version >= last and session.core.scaled >= scaled:
                told.add(session.shard)
        return [] if len(told) == len(shards) else [s for s in shards if s.shard not in told]

    def tell(self, sessions: Sequence[Session], *, timeout_s: float | None = None) -> list[Future]:
        """Sends each shard a PULL of nothing, which carries the decisions that the shard may lack."""
        return [self._links.request(s, "PULL", body=m.Carry(), timeout_s=timeout_s) for s in sessions]

    async def tell_scale(self) -> None:
        """Tells the shards the last decision's scale. Each has to have it before the next round is committed: with the
        next decision comes the scale of that, and nobody would bring the old one any more."""
        await collect(self.tell(self.behind()))
