"""Cuts the output of several processes into lines, and shows from whom each line came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import IO, BinaryIO, NamedTuple

CHUNK_BYTES = 1 << 16
"""Read at once; a pipe holds as much."""

MAX_LINE_BYTES = 1 << 20
"""A line longer than this is passed on in pieces, so that output without newlines is not hoarded."""


class Line(NamedTuple):
    """One line of output, without its newline."""

    source: str
    """'rank 0' or 'store'."""
    is_error: bool
    """True if the line came from standard error."""
    text: bytes


Deliver = Callable[[Line], None]
"""Raises OSError if it can't."""


class Delivery:
    """Delivers lines until that fails. What follows is dropped, so that nobody waits for ever for room in a pipe."""

    def __init__(self, deliver: Deliver) -> None:
        self.failed: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
        self._deliver = deliver

    def __call__(self, line: Line) -> None:
        if self.failed.done():
            return
        try:
            self._deliver(line)
        except OSError as error:
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


async def pump(pipe: IO[bytes], *, source: str, is_error: bool, deliver: Deliver) -> None:
    """Delivers what comes through a pipe, line by line, until its end."""
    cutter = LineCutter()
    stream = await read_pipe(pipe)
    while data := await stream.read(CHUNK_BYTES):
        for text in cutter.feed(data):
            deliver(Line(source, is_error, text))
    for text in cutter.finish():
        deliver(Line(source, is_error, text))


COLOURS = ("36", "33", "35", "32", "34", "31")
"""SGR codes of cyan, yellow, magenta, green, blue, red (ECMA-48, 8.3.117), by rank."""


class Prefixer:
    """Writes each line to where it belongs, as '[rank 0] text'."""

    def __init__(self, *, out: BinaryIO, err: BinaryIO, colour: bool) -> None:
        self._out = out
        self._err = err
        self._colour = colour

    def __call__(self, line: Line) -> None:
        stream = self._err if line.is_error else self._out
        stream.write(self.prefix(line.source) + line.text + b"\n")
        stream.flush()

    def prefix(self, source: str) -> bytes:
        label = f"[{source}]"
        if not self._colour:
            return f"{label} ".encode()
        rank = source.rpartition(" ")[2]
        code = COLOURS[int(rank) % len(COLOURS)] if rank.isdigit() else "2"
        return f"\x1b[{code}m{label}\x1b[0m ".encode()
