"""Probes of a container: asked on their schedule, and what so many answers in a row make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class Probe:
    """One of a container's; `is_well` is what it says, from the first answers on."""

    def __init__(self, manifest: Mapping[str, Any], ports: Mapping[str, int], address: str) -> None:
        self.period_s = float(manifest.get("periodSeconds", 10))
        self._path = manifest["httpGet"]["path"]
        self._port = ports[manifest["httpGet"]["port"]]
        self._timeout_s = float(manifest.get("timeoutSeconds", 1))
        self._failures = int(manifest.get("failureThreshold", 3))
        self._address = address
        self._in_a_row = 0

    async def ask(self) -> bool | None:
        """Whether it is well; None: it has failed, but not yet as often in a row as it may."""
        if await self._answers():
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        return False if self._in_a_row >= self._failures else None

    async def succeeds(self) -> bool:
        """Waits for the first time that it is well; False: it has failed before."""
        while True:
            well = await self.ask()
            if well is not None:
                return well
            await asyncio.sleep(self.period_s)

    async def fails(self) -> None:
        """Waits until it has failed as often in a row as it may not."""
        while True:
            if await self.ask() is False:
                return
            await asyncio.sleep(self.period_s)

    async def _answers(self) -> bool:
        try:
            return await asyncio.wait_for(self._get(), self._timeout_s)
        except (OSError, asyncio.TimeoutError, ValueError, IndexError):
            return False

    async def _get(self) -> bool:
        reader, writer = await asyncio.open_connection(self._address, self._port)
        try:
            writer.write(f"GET {self._path} HTTP/1.0\r\nHost: {self._address}\r\n\r\n".encode())
            status = int((await reader.readline()).split()[1])
            return 200 <= status < 400
        finally:
            writer.close()
