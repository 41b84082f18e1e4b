"""The limit of small calls without an interpreter: native_ping_pong.c, compiled here, at both ends of a socket.

Requests come in an order that both ends know, again and again, so that their sizes need not be said.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import cycle

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
def native_calls(transport: str, kinds: Sequence[str]) -> Iterator[list[Callable[[], None]]]:
    """A round trip of each kind; whoever makes them keeps to that order. Raises FileNotFoundError without a C
    compiler."""
    with socket.socket(FAMILIES[transport]) as listener:
        listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
        listener.listen()
        with child(_answer, listener, kinds), socket.socket(FAMILIES[transport]) as link:
            link.connect(listener.getsockname())
            tune(link)
            receive_all(link, memoryview(bytearray(1)))  # it is compiled there
            yield [partial(_round_trip, link.fileno(), *SIZES[kind]) for kind in kinds]


def _round_trip(link: int, request_bytes: int, answer_bytes: int) -> None:
    if not _ping_pong()(link, request_bytes, answer_bytes):
        raise ConnectionResetError("the peer is gone")


def _answer(listener: socket.socket, kinds: Sequence[str]) -> None:
    """The server: receives first, so that its part of each turn begins with an answer."""
    link, _ = listener.accept()
    tune(link)
    ping_pong = _ping_pong()
    link.sendall(b"x")
    sizes = cycle(SIZES[kind] for kind in kinds)
    request_bytes, answer_bytes = next(sizes)
    receive_all(link, memoryview(bytearray(request_bytes)))
    for request_bytes, next_answer_bytes in sizes:
        if not ping_pong(link.fileno(), answer_bytes, request_bytes):
            return
        answer_bytes = next_answer_bytes


@lru_cache
def _ping_pong() -> Callable[[int, int, int], int]:
    return compiled("native_ping_pong")
