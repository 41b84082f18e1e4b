"""Who takes part in `latency`: each pushes and pulls one small value and blocks until it is done.

Their servers are processes of their own. What is between two bursts of calls (`around`) is not measured.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

import psstore
from bench.comparison import Role
from bench.peers import redis_store
from bench.peers.raw_sockets import FAMILIES, receive_all, tune
from bench.processes import child, store_server
from bench.work import one_large
from psstore.config import Transport

VALUE_ELEMS = 256
"""1 KiB."""

HEADER_BYTES = 64
"""As in psstore's frames: what raw sockets send beside the value, and as an answer."""

BULK_ELEMS = 4 << 20
"""16 MiB: what another client sends again and again while latency is measured under load."""

BUSY_POLL_US = 200.0
"""Longer than a round trip, so that between two calls nobody sleeps."""

ROUND_BYTES = 256 << 10
"""Of one client in its turn, where a thread has several: as a shard has it (csrc/serve/link.h)."""

PUSH, PULL, BULK, SPIN, BLOCK = b"w", b"r", b"m", b"s", b"b"


class Cores(NamedTuple):
    """Where the two ends of a call run; None: wherever the kernel wakes them."""

    client: int | None
    server: int | None

    @property
    def pinned(self) -> bool:
        return self.client is not None

    def __str__(self) -> str:
        return "" if not self.pinned else ", one core" if self.client == self.server else ", two cores"


FREE = Cores(None, None)


def placements() -> list[Cores]:
    """Both ends on one core, where one sleeps as the other wakes; and on two, each of which may sleep as well."""
    first, *others = sorted(os.sched_getaffinity(0))
    return [Cores(first, second) for second in (first, *others[:1])]


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """This thread, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Caller:
    name: str
    transport: str
    role: Role
    push: Callable[[], object]
    pull: Callable[[], object]
    pipelined: Callable[[int], object]
    """Pushes so many times, with all of them under way at once."""
    bulk: Callable[[], Callable[[], object]] | None = None
    """In another process: connects, and returns what pushes BULK_ELEMS. Picklable; None: not for this one."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is to be done before and after a burst of calls."""
    cores: Cores = FREE
    one_thread: bool = False
    """Of a limit: its server has one for all clients."""


# ---- psstore ----


@contextlib.contextmanager
def store_caller(
    transport: str, *, spinning: bool = False, shares: bool = False, cores: Cores = FREE
) -> Iterator[Caller]:
    """Blocking, or both ends asking the kernel for `BUSY_POLL_US` before they sleep. `shares`: memory for
    what is large, as clients on one host do by themselves, and that transport's sockets for the rest."""
    where = cast(Transport, "auto" if shares else transport)  # bulk of others, too, is to go the same way
    busy_us = BUSY_POLL_US if spinning else 0.0
    with contextlib.ExitStack() as ends:
        with on_core(cores.server):
            options = ["--busy-poll-us", str(busy_us)]
            url = ends.enter_context(store_server("tcp" if transport == "tcp" else "unix", 1, options=options))
        store = ends.enter_context(psstore.connect(url, rank=0, transport=where, busy_poll_us=busy_us))
        value, out = np.ones(VALUE_ELEMS, np.float32), np.zeros(VALUE_ELEMS, np.float32)
        store.create("small", value)

        def pipelined(count: int) -> None:
            for under_way in [store.start_push_many({"small": value}) for _ in range(count)]:
                under_way.result()

        yield Caller(
            f"psstore, {transport}{', spinning' if spinning else ''}{' and shared memory' if shares else ''}{cores}",
            transport,
            "psstore",
            push=lambda: store.push("small", value),
            pull=lambda: store.pull("small", out=out),
            pipelined=pipelined,
            bulk=None if spinning or cores.pinned else StoreBulk(url, where),
            around=partial(on_core, cores.client),
            cores=cores,
        )


@dataclass(frozen=True)
class StoreBulk:
    url: str
    transport: Transport

    def __call__(self) -> Callable[[], object]:
        store = psstore.connect(self.url, role="client", transport=self.transport)
        value = np.ones(BULK_ELEMS, np.float32)
        store.create("bulk", value)
        return lambda: store.push("bulk", value)


# ---- raw sockets ----


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


# ---- Redis ----


@contextlib.contextmanager
def redis_caller(transport: str) -> Iterator[Caller]:
    """Raises ImportError or FileNotFoundError where something is missing."""
    with redis_store.serve(one_large(1), transport) as where:
        client = redis_store.client(where)
        value = bytes(4 * VALUE_ELEMS)

        def pipelined(count: int) -> None:
            pipeline = client.pipeline(transaction=False)
            for _ in range(count):
                pipeline.set("small", value)
            pipeline.execute()

        yield Caller(
            f"Redis, {transport}",
            transport,
            "peer",
            push=lambda: client.set("small", value),
            pull=lambda: client.get("small"),
            pipelined=pipelined,
            bulk=RedisBulk(where),
        )
        client.close()


@dataclass(frozen=True)
class RedisBulk:
    where: str

    def __call__(self) -> Callable[[], object]:
        client = redis_store.client(self.where)
        value = bytes(4 * BULK_ELEMS)
        return lambda: client.set("bulk", value)


# ---- torch.distributed.rpc ----


@contextlib.contextmanager
def rpc_caller() -> Iterator[Caller]:
    """Raises ImportError without torch. Under load it is not measured: a third process would have to be in it from
    the beginning."""
    import torch  # only who takes part needs it
    from torch.distributed import rpc

    from bench.peers import torch_rpc

    work = one_large(1)
    with torch_rpc.serve(work, "tcp") as where:
        torch_rpc.start("worker0", 1, work, where)
        value = torch.ones(VALUE_ELEMS)

        def push(server: str = torch_rpc.SERVER) -> Any:
            return rpc.rpc_async(server, torch_rpc.keep, (value,))

        yield Caller(
            "torch.distributed.rpc, tcp",
            "tcp",
            "peer",
            push=lambda: push().wait(),
            pull=lambda: rpc.rpc_sync(torch_rpc.SERVER, torch_rpc.kept),
            pipelined=lambda count: torch.futures.wait_all([push() for _ in range(count)]),
        )
        rpc.shutdown()
