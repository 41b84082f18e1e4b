"""Decisions that shards keep for a reader: all that it reads as of one is of one version, however long it takes, and
nobody's training waits for it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from psstore.protocol.decision_carrier import DecisionCarrier
from psstore.protocol.links import GRACE_S, Links, check_wait
from psstore.wire import messages as m


class Hold(NamedTuple):
    """A decision that every shard keeps for a reader."""

    reader: int
    """The number by which the shards know it."""
    version: int


class Holds:
    """Has shards keep decisions for one client, and let go of them."""

    def __init__(self, client: str, links: Links, carrier: DecisionCarrier) -> None:
        """`client`: its id."""
        self._client = client
        self._links = links
        self._carrier = carrier
        self._num_readers = 0

    async def hold(self, *, state: bool, wait_s: float) -> Hold:
        """Has every shard keep the values, and rule state if `state`, of one decision, which everything that anybody
        was told of is in: nobody's training waits for it. Each shard is asked for its version and keeps what comes
        after it; the latest of them is what all shards have, and settle on."""
        check_wait(wait_s)
        reader, versions = await self.begin(state=state)
        hold = Hold(reader, max(versions))
        try:
            await self._carrier.learn_up_to(hold.version)
            await self.settle(hold, wait_s=wait_s)
        except BaseException:
            self.free(reader)
            raise
        return hold

    async def begin(self, *, state: bool) -> tuple[int, list[int]]:
        """Has every shard keep what it is from now on. Returns the reader's number, and where each shard is."""
        self._num_readers += 1
        digest = hashlib.blake2b(f"{self._client} {self._num_readers}".encode(), digest_size=8).digest()
        reader = int.from_bytes(digest, "little") | 1  # not 0
        try:
            return reader, await self.prolong(reader, state=state)
        except BaseException:
            self.free(reader)
            raise

    async def prolong(self, reader: int, *, state: bool) -> list[int]:
        """Where each shard is. One that holds for that reader already does so for longer."""
        answers = await self._links.ask_all("HOLD", round=int(state), sequence=reader)
        return [answer.version for answer in answers]

    async def settle(self, hold: Hold, *, wait_s: float) -> None:
        """The shards keep that decision, and no other one, and as long again."""
        carry = m.Carry(at_least=hold.version, wait_s=wait_s)
        await self._links.ask_all(
            "PULL", body=carry, timeout_s=wait_s + GRACE_S, round=hold.version, sequence=hold.reader
        )

    def free(self, reader: int) -> None:
        """The shards need not keep anything for it any longer. Nobody waits for their answers."""
        for session in self._links.shards:
            self._links.say(session, "FREE", sequence=reader)
