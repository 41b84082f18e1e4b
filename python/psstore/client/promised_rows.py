"""Pushes of rows beside an early commit: all shards that take one know of its decision, or none does.

A full table refuses rows, but not to a decision that waits for them: then what there is no room for is left out, and
counted. Were a push to meet shards of both kinds, some partitions would take it and others refuse it, and what is
pushed in its place would count in these only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from psstore.errors import BadArgument, UsageError
from psstore.types import Tensor


class PromisedRows:
    """Tables of one store in the present round. Used on the store's loop only."""

    def __init__(self) -> None:
        self.unsettled: set[int] = set()
        """Ids of tables whose last push is under way or has failed: some partitions may have their part of it."""
        self._is_asked = False
        """An early commit was sent, and not answered: any shard may have heard of its decision."""
        self._over = asyncio.Event()
        """Set while no early commit is under way."""
        self._over.set()

    async def commit_is_answered(self) -> None:
        """Returns when what is pushed carries the decision of an early commit that was begun before. Raises BadArgument
        if that commit failed."""
        while not self._over.is_set():
            await self._over.wait()
        if self._is_asked:
            raise BadArgument("push_rows: the round's early commit was not answered; commit again, then push rows")

    @contextmanager
    def promising(self, ids: Collection[int]) -> Iterator[None]:
        """Around an early commit that promises these tensors. Raises BadArgument."""
        if not self.unsettled.isdisjoint(ids):
            raise BadArgument(
                "commit promises a table whose last push in this round has failed, and some of its partitions may have"
                " taken that; push to the table again before, or leave it out of present="
            )
        self._is_asked = True
        self._over.clear()
        try:
            yield
            self._is_asked = False
        except UsageError:  # there is no such commit
            self._is_asked = False
            raise
        finally:
            self._over.set()

    def push_begins(self, table: Tensor) -> None:
        """REQUIRES: `commit_is_answered`, and nothing was awaited since."""
        self.unsettled.add(table.id)

    def push_is_whole(self, table: Tensor) -> None:
        self.unsettled.discard(table.id)

    def round_ended(self) -> None:
        self.unsettled.clear()
        self._is_asked = False
