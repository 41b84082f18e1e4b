"""Reads that are of one version of the store, on however many shards.

Shards that are read while nothing changes answer as of one decision by themselves, which costs nothing: so a read is
tried as it is, and again as of a version that the shards hold, if what they answered is not of one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from psstore.client.arguments import several
from psstore.client.arrays import Array
from psstore.client.context import Context
from psstore.client.layout import OneVersion, Pull
from psstore.client.norms import Norm
from psstore.client.reading import Reading
from psstore.client.zero_copy import Borrowed, Borrowing, Debt
from psstore.errors import BadArgument
from psstore.protocol.holds import Hold

T = TypeVar("T")


class OneVersionReading:
    """Reads of one store. Used on the store's loop only."""

    def __init__(self, context: Context, norm: Norm, reading: Reading, borrowing: Borrowing) -> None:
        self.is_default = context.client.identity.role == "client"
        """Whether pulls that do not say are to be of one version."""
        self._borrowing = borrowing
        self._client = context.client
        self._context = context
        self._norm = norm
        self._reading = reading

    async def hold(self, *, state: bool = False, wait_s: float | None = None) -> Hold:
        """What `Store.snapshot` reads as of."""
        await self._norm.settle(wait_s)
        return await self._client.holds.hold(state=state, wait_s=self._context.patience(wait_s))

    async def hold_in(self, held: list[Hold], *, state: bool, wait_s: float | None) -> Hold:
        """`hold`, which is added to a list before anybody hears of it."""
        held.append(await self.hold(state=state, wait_s=wait_s))
        return held[-1]

    @asynccontextmanager
    async def held(self, wait_s: float | None) -> AsyncIterator[Hold]:
        """`hold`, until the context is left."""
        hold = await self.hold(wait_s=wait_s)
        try:
            yield hold
        finally:
            self._client.holds.free(hold.reader)

    async def read(
        self, read: Callable[[OneVersion | Hold], Coroutine[Any, Any, T]], *, may_be: bool, wait_s: float | None
    ) -> T:
        """Reads, and again as of a version that shards hold, if what they answered is not of one. `may_be`: False if
        that is to be expected: shards answer each frame as of one decision, and several frames of one shard seldom as
        of the same while others train. These are held from the first. Raises as `hold`; VersionGone."""
        if may_be:
            is_whole = OneVersion()
            result = await read(is_whole)
            if is_whole:
                return result
        async with self.held(wait_s) as hold:
            return await read(hold)

    def pull(self, asked: Pull, consistent: bool | None) -> Coroutine[Any, Any, list[Array]]:
        """What is asked for, of one version if that is wanted. `consistent`: None: by default. Raises BadArgument."""
        may_be = asked.codec is None and asked.if_newer_than is None
        if consistent and not may_be:
            raise BadArgument("a pull with consistent=True takes neither codec nor if_newer_than")
        if consistent is None:
            consistent = may_be and self.is_default
        if not consistent:
            return self._reading.pull(asked)
        return self.read(
            lambda hold: self._reading.pull(asked._replace(hold=hold)),
            may_be=self._reading.takes_a_frame_each(asked),
            wait_s=asked.wait_s,
        )

    async def borrow(
        self, debt: Debt, names: Sequence[str], *, wait_s: float | None = None, consistent: bool | None = None
    ) -> Borrowed:
        """What `Store.borrow` gives, until the debt is settled."""
        layout = await self._borrowing.layout(several("names", names))

        def borrow(hold: OneVersion | Hold | None) -> Coroutine[Any, Any, Borrowed]:
            return self._borrowing.borrow(debt, layout, wait_s, hold)

        if not (self.is_default if consistent is None else consistent):
            return await borrow(None)
        is_cheap = all(shard.shares_memory for shard in self._client.shards)  # next to nothing is to be read again
        return await self.read(borrow, may_be=layout.is_a_frame_each or is_cheap, wait_s=wait_s)
