"""What `Store.follow` gives: versions one after the other, each with arrays of its own.

An iterator that is made of `yield` ends with its first error. These go on: whoever is told that there is no newer
version, or that the store has gone back, asks the same one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psstore.client.changes import Copies, Version

if TYPE_CHECKING:
    from psstore.client.store import AsyncStore, Store


class _Followed:
    """What one follows over a store's connection."""

    def __init__(
        self, store: Store | AsyncStore, names: Sequence[str], dtype: str | None, wait_s: float | None
    ) -> None:
        self._followed = store
        self._copies = Copies(names, dtype)
        self._operations = store._operations
        self._wait_s = wait_s

    async def _next(self) -> Version:
        """The next version, with copies of its values, which stay what they are."""
        if self._operations is not self._followed._operations:  # after `reconnect` others may have the same numbers
            self._copies.forget()
            self._operations = self._followed._operations
        version = await self._copies.advance(self._operations, wait_s=self._wait_s)
        return version._replace(values={name: value.copy() for name, value in version.values.items()})


class Versions(_Followed):
    """An iterator over versions, without an end."""

    def __iter__(self) -> Versions:
        return self

    def __next__(self) -> Version:
        return self._followed._run(self._next())


class AwaitedVersions(_Followed):
    """An iterator over versions that are awaited, without an end."""

    def __aiter__(self) -> AwaitedVersions:
        return self

    async def __anext__(self) -> Version:
        return await self._followed._backend.thread.awaited(self._followed._submit(self._next()))
