"""Says that this worker lives, on a connection of its own, from a native thread that needs neither GIL nor loop.

A program that computes for minutes in one C call is silent on its other connections and must not be taken for dead.
"""

from __future__ import annotations

import asyncio
import math
import secrets

from psstore import _core
from psstore.net.address import parse_address
from psstore.net.client import Tether
from psstore.net.client_connection import ClientConnection
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.session import Session
from psstore.wire.messages import Welcome


class Heartbeats:
    """Keeps a heartbeat connection to the coordinator. The loop makes it, `_core.Heartbeat` writes to it."""

    def __init__(self, worker: ClientIdentity, welcome: Welcome, address: str, loop: asyncio.AbstractEventLoop) -> None:
        identity = ClientIdentity(
            client=worker.client,
            role="heartbeat",
            token=worker.token,
            find_token=worker.find_token,
            found=worker.found,
        )
        session = Session(
            identity=identity,
            decisions=DecisionCache(),
            make_nonce=lambda: secrets.token_bytes(32),
            address=address,
            welcome=welcome,
        )
        self._frame = _core.encode_frame(_core.OPS["HEARTBEAT"], rank=worker.rank, incarnation=worker.incarnation)
        self._interval_s = welcome.heartbeat_s
        self._beating: _core.Heartbeat | None = None
        self._tether = Tether(session, [parse_address(address)], loop=loop, patience_s=math.inf, on_up=self._hand_over)
        self._tether.start()

    async def begun(self, patience_s: float) -> None:
        """Waits for the first beat, so that what the program does next may hold the GIL for as long as it likes.

        Without one in that time the worker goes on: its other connections speak for it, and this one is tried again.
        """
        await asyncio.wait([self._tether.first_up], timeout=patience_s)

    def _hand_over(self, connection: ClientConnection) -> None:
        self._stop_beating()
        self._beating = _core.Heartbeat(connection.fileno(), self._frame, self._interval_s)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.stop()
            self._beating = None

    async def close(self) -> None:
        self._stop_beating()
        await self._tether.close()

    def abandon(self) -> None:
        """In a forked child: lets go of the socket without a word."""
        self._stop_beating()
        self._tether.abandon()
