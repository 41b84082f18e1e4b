"""The actor that knows where each process of a store runs now: Ray has no DNS, and moves what it starts again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

WAIT_S = 30.0
"""How long a question waits for news."""

Hosts = dict[str, str]
"""Addresses by the names of hosts."""


class Directory:
    """Loses what it knows when it is started again; whoever asks then tells it anew."""

    def __init__(self) -> None:
        self._hosts: Hosts = {}
        self._changed = asyncio.Condition()
        self._has_ended = False

    async def end(self) -> None:
        """The store is no more: nobody need ask again."""
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def moved(self, own: Mapping[str, str]) -> Hosts:
        """`own` has moved there. Returns all that is known."""
        async with self._changed:
            self._hosts.update(own)
            self._changed.notify_all()
        return dict(self._hosts)

    async def news(self, known: Mapping[str, str], own: Mapping[str, str]) -> Hosts | None:
        """All that is known, as soon as something of it is not in `known`, or after WAIT_S; None: the store has ended.
        `own`: where the caller is, which counts if nobody else has said so: its next life may have moved meanwhile."""
        missing = {name: address for name, address in own.items() if name not in self._hosts}
        if missing:
            await self.moved(missing)
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._has_news(known)), WAIT_S)
        return None if self._has_ended else dict(self._hosts)

    def _has_news(self, known: Mapping[str, str]) -> bool:
        return self._has_ended or any(known.get(name) != address for name, address in self._hosts.items())
