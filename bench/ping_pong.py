"""What `latency` holds others against: plain sockets that push and pull as many bytes, and the processes that answer.

A server has a thread for each client, or one for all, as a shard has it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from bench.callers import BULK_ELEMS, FREE, VALUE_ELEMS, Caller, Cores, on_core
from bench.peers.raw_sockets import FAMILIES, receive_all, tune
from bench.processes import child

HEADER_BYTES = 64
"""As in psstore's frames: what is sent beside the value, and as an answer."""

ROUND_BYTES = 256 << 10
"""Of one client in its turn, where a thread has several: as a shard has it (csrc/server/connection.h)."""

PUSH, PULL, BULK, SPIN, BLOCK = b"w", b"r", b"m", b"s", b"b"


@contextlib.contextmanager
def raw_caller(
    transport: str, *, spinning: bool = False, cores: Cores = FREE, one_thread: bool = False
) -> Iterator[Caller]:
    """Blocking, or both ends asking the kernel again and again. `one_thread`: of the server, for all clients, as a
    shard has it; else one for each."""
    with socket.socket(FAMILIES[transport]) as listener:
        listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
        listener.listen()
        address = listener.getsockname()
        serve = _serve_all if one_thread else _echo
        with child(serve, listener, cores.server), socket.socket(FAMILIES[transport]) as link:
            link.connect(address)
            listener.close()
            tune(link)
            calls = _raw_calls(link, transport, spinning=spinning, core=cores.client)
            name = f"{calls.name}{', one thread' if one_thread else ''}{cores}"
            bulk = None if spinning or cores.pinned else partial(_raw_bulk, transport, address)
            yield replace(calls, name=name, bulk=bulk, cores=cores, one_thread=one_thread)


def _raw_bulk(transport: str, address: Any) -> Callable[[], object]:
    link = socket.socket(FAMILIES[transport])
    link.connect(address)
    tune(link)
    request, values, answer = BULK.ljust(HEADER_BYTES), bytes(4 * BULK_ELEMS), memoryview(bytearray(HEADER_BYTES))

    def push() -> None:
        link.sendall(request)
        link.sendall(values)
        receive_all(link, answer)

    return push


def _raw_calls(link: socket.socket, transport: str, *, spinning: bool, core: int | None) -> Caller:
    pull = PULL.ljust(HEADER_BYTES)
    push = PUSH.ljust(HEADER_BYTES) + bytes(4 * VALUE_ELEMS)
    header, value = bytearray(HEADER_BYTES), bytearray(HEADER_BYTES + 4 * VALUE_ELEMS)
    receive = receive_spinning if spinning else receive_all

    def call(request: bytes, answer: bytearray) -> None:
        link.sendall(request)
        receive(link, memoryview(answer))

    def pipelined(count: int) -> None:
        link.sendall(push * count)
        receive(link, memoryview(bytearray(HEADER_BYTES * count)))

    @contextlib.contextmanager
    def both_spin() -> Iterator[None]:
        """Only for the burst: else the server would take a core from the others."""
        call(SPIN.ljust(HEADER_BYTES), header)
        link.setblocking(False)
        try:
            with on_core(core):
                yield
        finally:
            link.setblocking(True)
            call(BLOCK.ljust(HEADER_BYTES), header)

    return Caller(
        f"raw sockets, {transport}, {'spinning' if spinning else 'blocking'}",
        transport,
        "limit",
        push=lambda: call(push, header),
        pull=lambda: call(pull, value),
        pipelined=pipelined,
        around=both_spin if spinning else partial(on_core, core),
    )


def _echo(listener: socket.socket, core: int | None) -> None:
    """The server: answers until the client that came first is gone, and meanwhile all others."""
    with on_core(core):
        _echo_here(listener)


def _echo_here(listener: socket.socket) -> None:
    first, _ = listener.accept()
    threading.Thread(target=_echo_others, args=(listener,), daemon=True).start()
    _answer(first)


def _echo_others(listener: socket.socket) -> None:
    while True:
        link, _ = listener.accept()
        threading.Thread(target=_answer, args=(link,), daemon=True).start()


def _answer(link: socket.socket) -> None:
    tune(link)
    bulk = bytearray()
    request, payload = bytearray(HEADER_BYTES), bytearray(4 * VALUE_ELEMS)
    answer = bytes(HEADER_BYTES)
    value = bytes(HEADER_BYTES + 4 * VALUE_ELEMS)
    receive = receive_all
    with contextlib.suppress(ConnectionError):
        while True:
            receive(link, memoryview(request))
            kind = request[:1]
            if kind == PUSH:
                receive(link, memoryview(payload))
            elif kind == BULK:
                bulk = bulk or bytearray(4 * BULK_ELEMS)
                receive(link, memoryview(bulk))
            link.sendall(value if kind == PULL else answer)
            if kind in (SPIN, BLOCK):
                link.setblocking(kind == BLOCK)
                receive = receive_all if kind == BLOCK else receive_spinning


def _serve_all(listener: socket.socket, core: int | None) -> None:
    """The same on one thread, which reads some of what each has sent, in turn."""
    first, _ = listener.accept()
    with on_core(core), selectors.DefaultSelector() as ready:
        windows: dict[socket.socket, memoryview] = {}
        talks: dict[socket.socket, Generator[memoryview, int, None]] = {}
        ready.register(listener, selectors.EVENT_READ)
        came: list[socket.socket] = [first]
        while first in talks or came:
            for link in came:
                tune(link)
                ready.register(link, selectors.EVENT_READ)
                talks[link] = _talk(link)
                windows[link] = next(talks[link])
            came = []
            for key, _ in ready.select():
                link = cast(socket.socket, key.fileobj)
                if link is listener:
                    came.append(listener.accept()[0])
                elif received := link.recv_into(windows[link]):
                    windows[link] = talks[link].send(received)
                else:
                    ready.unregister(link)
                    del talks[link], windows[link]


def _talk(link: socket.socket) -> Generator[memoryview, int, None]:
    """Yields where the next bytes are to go, and answers each request once it is whole."""
    request, payload, bulk = bytearray(HEADER_BYTES), bytearray(4 * VALUE_ELEMS), bytearray()
    while True:
        yield from _filled(request)
        kind = request[:1]
        if kind == PUSH:
            yield from _filled(payload)
        elif kind == BULK:
            bulk = bulk or bytearray(4 * BULK_ELEMS)
            yield from _filled(bulk)
        link.sendall(bytes(HEADER_BYTES + (4 * VALUE_ELEMS if kind == PULL else 0)))


def _filled(data: bytearray) -> Generator[memoryview, int, None]:
    missing = memoryview(data)
    while missing:
        missing = missing[(yield missing[:ROUND_BYTES]) :]


def receive_spinning(link: socket.socket, data: memoryview) -> None:
    while data:
        try:
            received = link.recv_into(data)
        except BlockingIOError:
            continue
        if received == 0:
            raise ConnectionResetError("the peer is gone")
        data = data[received:]
