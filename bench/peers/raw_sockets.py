"""The limit of sockets: plain blocking ones that move the same bytes, and the store's kernel on what arrives.

"in sequence": all gradients up, an answer when the step is taken, a request, all parameters down. "pipelined": each
batch comes back as soon as its step is taken, so that both directions are busy at once. Both ends send from and
receive into plain memory, in batches; the server steps each batch while it is in its cache still.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.comparison import Role
from bench.processes import child
from bench.work import Floats, Work, flat_tensors, memory, sgd

NAME = "raw sockets"
ROLE: Role = "limit"
IN_ONE_PROCESS = False
SPINS = False

BATCH_ELEMS = 1 << 16
"""256 KiB, the fastest of 256 KiB, 1 MiB and 4 MiB: what was received is stepped, and sent, in a core's own cache."""

UNIX_BUFFER_BYTES = 1 << 20
"""As psstore sets them."""

IN_SEQUENCE, PIPELINED = b"s", b"p"

ANSWER = np.ones(1, np.float32)
"""That the step is taken."""


def why_not(work: Work, transport: str) -> str | None:
    return None if transport in FAMILIES else "sockets are no shared memory"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    family = FAMILIES[transport]
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1", 0) if transport == "tcp" else "")  # "": a name that the kernel picks
        listener.listen()
        address = listener.getsockname()
        where = json.dumps([transport, address.hex() if isinstance(address, bytes) else address])
        with child(_serve, listener, work):
            listener.close()
            yield where


def join(work: Work, rank: int, where: str) -> RawWorker:
    transport, address = json.loads(where)
    link = socket.socket(FAMILIES[transport])
    link.connect(tuple(address) if transport == "tcp" else bytes.fromhex(address))
    return RawWorker(work, rank, link)


class RawWorker:
    """The client's end of one connection."""

    def __init__(self, work: Work, rank: int, link: socket.socket) -> None:
        tune(link)
        self._link = link
        self._tensors = flat_tensors(work, rank)
        self._sender = ThreadPoolExecutor(1)
        self._last = 0.0
        self.variants: Mapping[str, Callable[[], None]] = {
            "in sequence": self._in_sequence,
            "pipelined": self._pipelined,
        }
        link.sendall(bytes([rank]))

    @property
    def last(self) -> float:
        return self._last

    def close(self) -> None:
        self._sender.shutdown()
        self._link.close()

    def _in_sequence(self) -> None:
        up, down = self._tensors.next()
        self._link.sendall(IN_SEQUENCE)
        send_all(self._link, up)
        receive_all(self._link, memoryview(bytearray(ANSWER.nbytes)))
        self._link.sendall(b"x")
        self._receive(down)

    def _pipelined(self) -> None:
        up, down = self._tensors.next()
        self._link.sendall(PIPELINED)
        sending = self._sender.submit(send_all, self._link, up)
        self._receive(down)
        sending.result()

    def _receive(self, down: Floats) -> None:
        for batch in batches(down):
            receive_all(self._link, batch.data.cast("B"))
        self._last = float(down[-1])


# ---- the server ----


def _serve(listener: socket.socket, work: Work) -> None:
    """Takes rounds until the clients are gone."""
    links = sorted(_accepted(listener, work.num_workers), key=lambda link: int(_receive_byte(link)[0]))
    value = memory(work.num_elems)
    staging = [memory(BATCH_ELEMS) for _ in links]
    with contextlib.suppress(ConnectionError):
        while True:
            pipelined = {_receive_byte(link) for link in links} == {PIPELINED}
            for batch in batches(value):
                _step(links, staging, batch)
                if pipelined:
                    _send_to_all(links, batch)
            if not pipelined:
                _send_to_all(links, ANSWER)
                for link in links:
                    _receive_byte(link)
                _send_to_all(links, value)


def _accepted(listener: socket.socket, count: int) -> list[socket.socket]:
    links = [listener.accept()[0] for _ in range(count)]
    for link in links:
        tune(link)
    return links


def _step(links: Sequence[socket.socket], staging: Sequence[Floats], value: Floats) -> None:
    gradients = [buffer[: value.size] for buffer in staging]
    for link, gradient in zip(links, gradients, strict=True):
        receive_all(link, gradient.data.cast("B"))
    sgd(value, gradients)


def _send_to_all(links: Sequence[socket.socket], data: Floats) -> None:
    for link in links:
        send_all(link, data)


def _receive_byte(link: socket.socket) -> bytes:
    byte = bytearray(1)
    receive_all(link, memoryview(byte))
    return bytes(byte)


# ---- both ends ----

FAMILIES: Mapping[str, socket.AddressFamily] = {"tcp": socket.AF_INET, "unix": socket.AF_UNIX}


def tune(link: socket.socket) -> None:
    if link.family == socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    else:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def batches(data: Floats) -> Iterator[Floats]:
    for begin in range(0, data.size, BATCH_ELEMS):
        yield data[begin : begin + BATCH_ELEMS]


def send_all(link: socket.socket, data: Floats) -> None:
    for batch in batches(data):
        link.sendall(batch.data)


def receive_all(link: socket.socket, data: memoryview) -> None:
    while data:
        received = link.recv_into(data)
        if received == 0:
            raise ConnectionResetError("the peer is gone")
        data = data[received:]
