"""The limit of small calls without an interpreter: native_ping_pong.c, compiled here, at both ends of a socket.

A server has one request size and one answer size for each connection, which its client says first.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from bench.callers import VALUE_ELEMS
from bench.kernel_work import compiled
from bench.peers.raw_sockets import FAMILIES, receive_all, tune
from bench.processes import child

HEADER_BYTES = 64
"""As in psstore's frames."""

VALUE_BYTES = HEADER_BYTES + 4 * VALUE_ELEMS

SIZES = {"push": (VALUE_BYTES, HEADER_BYTES), "pull": (HEADER_BYTES, VALUE_BYTES), "commit": (HEADER_BYTES,) * 2}
"""Bytes of a request and of its answer, by what it stands for."""


@contextlib.contextmanager
def native_calls(transport: str) -> Iterator[dict[str, Callable[[], None]]]:
    """A round trip of each kind. Raises FileNotFoundError without a C compiler."""
    with contextlib.ExitStack() as ends:
        yield {kind: ends.enter_context(_call(transport, *sizes)) for kind, sizes in SIZES.items()}


@contextlib.contextmanager
def _call(transport: str, request_bytes: int, answer_bytes: int) -> Iterator[Callable[[], None]]:
    with socket.socket(FAMILIES[transport]) as listener:
        listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
        listener.listen()
        with (
            child(_answer, listener, request_bytes, answer_bytes),
            socket.socket(FAMILIES[transport]) as link,
        ):
            link.connect(listener.getsockname())
            tune(link)
            receive_all(link, memoryview(bytearray(1)))  # it is compiled there
            yield partial(_round_trip, link.fileno(), request_bytes, answer_bytes)


def _round_trip(link: int, request_bytes: int, answer_bytes: int) -> None:
    if not _ping_pong()(link, request_bytes, answer_bytes):
        raise ConnectionResetError("the peer is gone")


def _answer(listener: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    """The server: receives first, so that its part of each turn begins with a request."""
    link, _ = listener.accept()
    tune(link)
    ping_pong = _ping_pong()
    link.sendall(b"x")
    receive_all(link, memoryview(bytearray(request_bytes)))
    while ping_pong(link.fileno(), answer_bytes, request_bytes):
        pass


@lru_cache
def _ping_pong() -> Callable[[int, int, int], int]:
    return compiled("native_ping_pong")
