"""How a client leads the writing of a checkpoint: has the shards hold one decision and write it, and the coordinator
make a checkpoint of what they wrote. saving.py is the shards' side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from psstore.errors import DeadlineExceeded, PsstoreError, VersionGone
from psstore.protocol.decision_carrier import DecisionCarrier
from psstore.protocol.holds import Hold, Holds
from psstore.protocol.links import Links, check_wait, collect, expect
from psstore.protocol.session import Session
from psstore.wire import messages as m

LOOK_S = 0.02
"""How often whoever leads the writing of a checkpoint asks whether it is written."""

CHECKPOINT_ATTEMPTS = 3
"""How often one is begun: what shards hold goes where one of them is led by its standby from then on."""


class CheckpointLeader:
    """Leads the writing of checkpoints for one client."""

    def __init__(self, links: Links, carrier: DecisionCarrier, holds: Holds) -> None:
        self._links = links
        self._carrier = carrier
        self._holds = holds

    async def write(
        self,
        url: str | None,
        *,
        gather_s: float,
        pause: Callable[[float], Awaitable[object]],
        wait_s: float,
        whole: bool = False,
    ) -> int:
        """Leads the writing of a checkpoint to `url`, or where the store writes its own, and returns its version: the
        last decision when every shard kept what comes after, or the next one if workers hand in, which they may take
        `gather_s` to do. Shards write beside training. `pause` waits for so many seconds by the driver's clock.
        `whole`: not without what workers hand in.

        Raises StorageError, VersionGone, BadArgument, DeadlineExceeded."""
        check_wait(wait_s)
        until = self._links.driver.now() + wait_s
        again = self._until(until, pause, f"no checkpoint was written within {wait_s:g} s; is its storage slow?")
        for _ in range(CHECKPOINT_ATTEMPTS - 1):
            try:
                return await self._write(url, gather_s, whole, again)
            except VersionGone:
                await again()
        return await self._write(url, gather_s, whole, again)

    async def write_at_standstill(
        self, url: str | None, *, gather_s: float, pause: Callable[[float], Awaitable[object]], wait_s: float
    ) -> int:
        """As `write`, but nothing happens in the store any more, as its supervisor has allowed it: whatever anybody was
        told is in it."""
        check_wait(wait_s)
        until = self._links.driver.now() + wait_s
        again = self._until(until, pause, f"the store did not come to stand still within {wait_s:g} s")
        while not (await self._begin(m.Begin(url=url))).ready:  # before anybody has to wait
            await again()
        first, *others = self._links.shards
        await self._freeze(first, gather_s, again)
        await self._carrier.learn_last()
        for session in others:
            await collect(self._carrier.tell([session]))
            await self._freeze(session, 0.0, again)
        return await self.write(url, gather_s=0.0, pause=pause, wait_s=until - self._links.driver.now())

    async def _write(self, url: str | None, gather_s: float, whole: bool, again: Callable[[], Awaitable[None]]) -> int:
        saved: tuple[m.Signed | None, ...] = (None,)
        why = ""
        while None in saved:
            while not (await self._begin(m.Begin(url=url))).ready:
                await again()
            reader, _ = await self._holds.begin(state=True)
            try:
                begin = m.Begin(url=url, reader=reader, gather_s=gather_s, whole=whole)
                while (begun := await self._begin(begin)).gathering:
                    await self._keep_holding(reader, begun.version)
                    await again()
                if begun.save is None or begun.version is None:
                    continue  # somebody else was first
                body, hold = m.Save(fact=begun.save, decisions=begun.decisions), Hold(reader, begun.version)
                while None in saved:
                    replies = await self._links.ask_all("SAVE", body=body)
                    saved = tuple(expect(m.Saved, reply).saved for reply in replies)
                    if None in saved:
                        await again()
                        # It stays for those who are heard of.
                        await self._holds.settle(hold, wait_s=self._links.timeout_s)
            except PsstoreError as error:
                why = error.message
                raise
            finally:
                self._holds.free(reader)
                if None in saved:
                    self._let_go(reader, why)
        keep = m.Keep(saved=tuple(one for one in saved if one is not None))
        while not (await self._links.ask_coordinator("KEEP", keep, m.Kept)).done:
            await again()
        assert begun.version is not None, "it is written"
        return begun.version

    async def _begin(self, body: m.Begin) -> m.Begun:
        return await self._links.ask_coordinator("BEGIN", body, m.Begun)

    async def _keep_holding(self, reader: int, version: int | None) -> None:
        """While workers hand in, until the decision is made as of which they do, the shards keep whatever comes; from
        then on, that decision."""
        if version is None:
            await self._holds.prolong(reader, state=True)
        else:
            await self._carrier.learn_up_to(version)
            await self._holds.settle(Hold(reader, version), wait_s=self._links.timeout_s)

    def _let_go(self, reader: int, why: str) -> None:
        """Makes room for the next one, which comes of itself, but later. Nobody waits for the answer."""
        body = m.Begin(reader=reader, give_up=True, why=why[: m.MAX_WHY_CHARS])
        self._links.say(self._links.shards[0], "BEGIN", body=body)

    async def _freeze(self, session: Session, gather_s: float, again: Callable[[], Awaitable[None]]) -> None:
        body = m.Freeze(gather_s=gather_s)
        while not expect(m.Frozen, await self._links.request(session, "FREEZE", body=body)).done:
            await again()

    def _until(
        self, deadline: float, pause: Callable[[float], Awaitable[object]], why: str
    ) -> Callable[[], Awaitable[None]]:
        """What to await before something is asked again: a pause, or DeadlineExceeded that says why."""

        async def again() -> None:
            if self._links.driver.now() > deadline:
                raise DeadlineExceeded(why)
            await pause(LOOK_S)

        return again
