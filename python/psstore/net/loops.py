"""The event loop of this process: uvloop where it is installed, asyncio's own everywhere."""

from __future__ import annotations

import asyncio
import importlib.util
import selectors
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

T = TypeVar("T")

LoopName = Literal["auto", "uvloop", "asyncio"]


def run(main: Coroutine[Any, Any, T], name: LoopName) -> T:
    """Runs `main` on a loop of its own, and closes the loop. 'auto' takes uvloop if it is there; 'uvloop' raises
    ImportError if it is not."""
    loop = _new_event_loop(name)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def bell(loop: asyncio.AbstractEventLoop) -> int:
    """A file descriptor that is readable when the loop has something to do, timers and calls of its own thread apart;
    -1 if it does not tell."""
    if hasattr(loop, "_get_backend_id"):  # uvloop's; its libuv has an epoll
        return int(loop._get_backend_id())
    selector = getattr(loop, "_selector", None)  # asyncio's
    return selector.fileno() if isinstance(selector, selectors.EpollSelector) else -1


def _new_event_loop(name: LoopName) -> asyncio.AbstractEventLoop:
    if name == "uvloop" or (name == "auto" and importlib.util.find_spec("uvloop") is not None):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
