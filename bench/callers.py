"""Who takes part in `latency`: each pushes and pulls one small value and blocks until it is done.

Their servers are processes of their own. What is between two bursts of calls (`around`) is not measured.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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

PUSH, PULL, BULK, SPIN, BLOCK = b"w", b"r", b"m", b"s", b"b"


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


# ---- psstore ----


@contextlib.contextmanager
def store_caller(transport: str, *, spinning: bool = False, shares: bool = False) -> Iterator[Caller]:
    """Blocking, or both ends asking the kernel for `BUSY_POLL_US` before they sleep. `shares`: memory for
    what is large, as clients on one host do by themselves, and that transport's sockets for the rest."""
    where = cast(Transport, "auto" if shares else transport)  # bulk of others, too, is to go the same way
    busy_us = BUSY_POLL_US if spinning else 0.0
    with (
        store_server("tcp" if transport == "tcp" else "unix", 1, options=["--busy-poll-us", str(busy_us)]) as url,
        psstore.connect(url, rank=0, transport=where, busy_poll_us=busy_us) as store,
    ):
        value, out = np.ones(VALUE_ELEMS, np.float32), np.zeros(VALUE_ELEMS, np.float32)
        store.create("small", value)

        def pipelined(count: int) -> None:
            for under_way in [store.start_push_many({"small": value}) for _ in range(count)]:
                under_way.result()

        yield Caller(
            f"psstore, {transport}{', spinning' if spinning else ''}{' and shared memory' if shares else ''}",
            transport,
            "psstore",
            push=lambda: store.push("small", value),
            pull=lambda: store.pull("small", out=out),
            pipelined=pipelined,
            bulk=None if spinning else StoreBulk(url, where),
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
def raw_caller(transport: str, *, spinning: bool = False) -> Iterator[Caller]:
    """Blocking, or both ends asking the kernel again and again."""
    with socket.socket(FAMILIES[transport]) as listener:
        listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
        listener.listen()
        address = listener.getsockname()
        with child(_echo, listener), socket.socket(FAMILIES[transport]) as link:
            link.connect(address)
            listener.close()
            tune(link)
            bulk = None if spinning else partial(_raw_bulk, transport, address)
            yield _raw_calls(link, transport, spinning=spinning, bulk=bulk)


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


def _raw_calls(
    link: socket.socket, transport: str, *, spinning: bool, bulk: Callable[[], Callable[[], object]] | None
) -> Caller:
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
        bulk=bulk,
        around=both_spin if spinning else nullcontext,
    )


def _echo(listener: socket.socket) -> None:
    """The server: answers until the client that came first is gone, and meanwhile all others."""
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
