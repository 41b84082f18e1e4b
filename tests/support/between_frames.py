"""Something that happens while a store's client reads: after the first of a pull's frames was answered, and before the
others are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from psstore.client.layout import Layout
from psstore.client.store import Store
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer


@contextmanager
def between_frames(reader: Store, act: Callable[[], object]) -> Iterator[None]:
    """Has `act` called, on another thread, in the middle of each read of that store's."""
    reading = reader._operations.reading
    receive = reading.receive

    async def receive_around_it(layout: Layout, transfers: Sequence[Transfer], *rest: Any) -> list[Answer]:
        before = await receive(layout, transfers[:1], *rest)
        await asyncio.to_thread(act)
        return before + await receive(layout, transfers[1:], *rest)

    with mock.patch.object(reading, "receive", receive_around_it):
        yield
