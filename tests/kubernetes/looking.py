"""Waiting as a cluster's controllers do: by looking now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.05


async def until(holds: Callable[[], bool], *, every_s: float = LOOK_S) -> None:
    """Returns when it is true; raises what `holds` raises."""
    while not holds():  # noqa: ASYNC110 (of processes and files, which tell nobody)
        await asyncio.sleep(every_s)
