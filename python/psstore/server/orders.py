"""A shard process and its supervisor: lines that it hears through its stdin, and lines that it says on its stdout."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
from collections.abc import Callable

from psstore.server.pipe_words import LEAD, NOT_RESHARDED, OVER, STAND_STILL, WITHOUT

_log = logging.getLogger("psstore.server")


class Orders:
    """What the supervisor says. The end of it is the supervisor's death, and the shard's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
        self.is_orphan = False
        """The supervisor is gone."""
        self.lead = asyncio.Event()
        """This standby is to lead."""
        self.on_without: Callable[[str], None] = lambda client: None
        """Called with a standby that will never lead."""
        self.on_over: Callable[[str], None] = lambda reason: None
        """Called when the workers are done, or lost, before the order to end."""
        self.on_stand_still: Callable[[str], None] = lambda client: None
        """Called with the client that may have the shard stand still."""
        self.on_not_resharded: Callable[[str], None] = lambda why: None
        """Called with why the store goes on with the shards that it has."""
        self._loop = loop
        self._stopped = stopped
        self._begun = b""
        self._is_closed = False
        loop.add_reader(sys.stdin.fileno(), self._read)

    def catch_up(self) -> None:
        """Carries out what was ordered before now."""
        while not self._is_closed and select.select([sys.stdin], [], [], 0.0)[0]:
            self._read()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(sys.stdin.fileno())

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self.close()
            self.is_orphan = True
            _log.warning("the supervisor is gone; shutting down")
            self._stopped.set()
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            what, _, rest = line.decode().partition(" ")
            if what == LEAD:
                self.lead.set()
            elif what == WITHOUT:
                self.on_without(rest)
            elif what == OVER:
                self.on_over(rest)
            elif what == STAND_STILL:
                self.on_stand_still(rest)
            elif what == NOT_RESHARDED:
                self.on_not_resharded(rest)


def report(*words: str) -> None:
    """Says a line to the supervisor. One that is gone hears nothing, and this process ends once it has read that."""
    try:
        print(*words, flush=True)
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # what could not be said would be tried again at the end
        os.close(null)
