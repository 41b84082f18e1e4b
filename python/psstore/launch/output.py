"""Cuts the output of several processes into lines, and shows from whom each line came."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Awaitable, Callable
from typing import IO, NamedTuple

CHUNK_BYTES = 1 << 16
"""Read at once; a pipe holds as much."""

MAX_LINE_BYTES = 1 << 20
"""A line longer than this is passed on in pieces, so that output without newlines is not hoarded."""


WRITTEN_BYTES = 4096
"""Written at once: a pipe that has room has room for as much (POSIX: PIPE_BUF is at least 512, 4,096 on Linux)."""


class Line(NamedTuple):
    """One line of output, without its newline."""

    source: str
    """'rank 0' or 'store'."""
    is_error: bool
    """True if the line came from standard error."""
    text: bytes


Deliver = Callable[[Line], Awaitable[None] | None]
"""Raises OSError if it can't. Where it may have to wait for room it is to be awaited, and nobody else waits."""


class Delivery:
    """Delivers lines until that fails. What follows is dropped, so that nobody waits for ever for room in a pipe."""

    def __init__(self, deliver: Deliver) -> None:
        self.failed: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
        self._deliver = deliver

    async def __call__(self, line: Line) -> None:
        if self.failed.done():
            return
        try:
            waits = self._deliver(line)
            if waits is not None:
                await waits
        except OSError as error:
            if not self.failed.done():  # another line's, which was written meanwhile
                self.failed.set_result(error)


class LineCutter:
    """Bytes in, whole lines out. Of what a progress bar overwrites with carriage returns, the last is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [visible(line) for line in lines]

    def finish(self) -> list[bytes]:
        """What came after the last newline, if anything."""
        rest, self._rest = self._rest, b""
        return [visible(rest)] if rest else []


def visible(line: bytes) -> bytes:
    """What a terminal shows of a line when it is over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


async def read_pipe(pipe: IO[bytes]) -> asyncio.StreamReader:
    """The pipe's reading end, for await; it is closed at its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def pump(pipe: IO[bytes], *, source: str, is_error: bool, deliver: Delivery) -> None:
    """Delivers what comes through a pipe, line by line, until its end."""
    cutter = LineCutter()
    stream = await read_pipe(pipe)
    while data := await stream.read(CHUNK_BYTES):
        for text in cutter.feed(data):
            await deliver(Line(source, is_error, text))
    for text in cutter.finish():
        await deliver(Line(source, is_error, text))


COLOURS = ("36", "33", "35", "32", "34", "31")
"""SGR codes of cyan, yellow, magenta, green, blue, red (ECMA-48, 8.3.117), by rank."""


class Outlet:
    """A file of this process that may have no room for a while, as a pipe into a pager: who writes there waits for it,
    and the loop goes on, which has signals to hear."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = asyncio.Lock()
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    async def write(self, data: bytes) -> None:
        """All of it, before what others write after it. Raises OSError."""
        async with self._turn:
            rest = memoryview(data)
            while rest:
                if not self._room.poll(0):
                    await self._wait()
                rest = rest[os.write(self._fd, rest[:WRITTEN_BYTES]) :]

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        has_room = asyncio.Event()
        loop.add_writer(self._fd, has_room.set)
        try:
            await has_room.wait()
        finally:
            loop.remove_writer(self._fd)


class Prefixer:
    """Writes each line to where it belongs, as '[rank 0] text'."""

    def __init__(self, *, out: Outlet, err: Outlet, colour: bool) -> None:
        self._out = out
        self._err = err
        self._colour = colour

    async def __call__(self, line: Line) -> None:
        outlet = self._err if line.is_error else self._out
        await outlet.write(self.prefix(line.source) + line.text + b"\n")

    def prefix(self, source: str) -> bytes:
        label = f"[{source}]"
        if not self._colour:
            return f"{label} ".encode()
        rank = source.rpartition(" ")[2]
        code = COLOURS[int(rank) % len(COLOURS)] if rank.isdigit() else "2"
        return f"\x1b[{code}m{label}\x1b[0m ".encode()
