"""A blocking client for tests that say exactly which frames go out: `encode_frame`, a socket, `FrameDecoder`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

from psstore import _core
from psstore.errors import PsstoreError, from_code
from psstore.net.address import TcpAddress, parse_address
from psstore.net.user_token import find
from psstore.protocol.auth import proof
from psstore.types import ITEM_BYTES, Tensor, TensorSpec
from psstore.wire import messages as m

M = TypeVar("M", bound=m.Message)

TIMEOUT_S = 20.0
"""Of every wait on the server."""


class RawClient:
    """One connection to one shard. Requests are answered in the order of their numbers unless a test says otherwise."""

    def __init__(self, address: str, *, client: str | None = None, sock: socket.socket | None = None) -> None:
        """`sock`: one that is connected to it; None: it is made."""
        self.client = client or os.urandom(16).hex()
        self.address = address
        self.sock = sock or connect_socket(address)
        self._decoder = _core.FrameDecoder()
        self._requests = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    # ---- frames ----

    def send(self, op: str, *, body: m.Message | bytes = b"", payload: Sequence[Any] = (), **fields: Any) -> int:
        """Sends one request; returns its number."""
        self._requests += 1
        encoded = m.encode_body(body) if isinstance(body, m.Message) else body
        payload_bytes = sum(memoryview(piece).nbytes for piece in payload)
        fields = {"request": self._requests, **fields}
        self.sock.sendall(_core.encode_frame(_core.OPS[op], body=encoded, payload_bytes=payload_bytes, **fields))
        for piece in payload:
            self.sock.sendall(piece)
        return self._requests

    def receive(self) -> _core.Frame | None:
        """The next frame, an announced payload included (then answer it with `decoder.accept` or `discard`).
        None: the server closed the connection between two frames."""
        while (frame := self._decoder.next_frame()) is None:
            received = self.sock.recv_into(self._decoder.get_buffer(-1))
            if received == 0:
                assert not self._decoder.mid_frame, "the server closed the connection in the middle of a frame"
                return None
            self._decoder.buffer_updated(received)
        return frame

    def reply(self, op: str, *, destination: _core.Segments | None = None) -> _core.Frame:
        """The next frame, which must be this reply, payload and all. Raises what an ERROR says."""
        frame = self.receive()
        assert frame is not None, "the server closed the connection"
        if not frame.complete:
            if destination is None:
                self._decoder.discard()
            else:
                self._decoder.accept(destination)
            frame = self.receive()
            assert frame is not None
        if frame.op == _core.OPS["ERROR"]:
            raise failure_of(frame)
        assert frame.op == _core.OPS[op], f"expected {op}, got operation {frame.op}"
        return frame

    def ask(self, op: str, reply: str, *, body: m.Message | bytes = b"", **fields: Any) -> _core.Frame:
        """A request and its reply."""
        request = self.send(op, body=body, **fields)
        frame = self.reply(reply)
        assert frame.request == request
        return frame

    def closed_by_server(self) -> bool:
        """True once the server has ended the connection, after at most TIMEOUT_S."""
        try:
            return self.receive() is None
        except ConnectionResetError:
            return True

    # ---- the protocol ----

    def hello(self, token: bytes | None = None, **fields: Any) -> m.Welcome:
        """The handshake. `token`: None: that of the store's own user, if there is one. Raises AuthFailed if the server
        wants another token, or any."""
        token = find(self.address) if token is None else token
        hello = m.Hello(client=self.client, **{"nonce": os.urandom(32) if token else b"", **fields})
        self.send("HELLO", body=hello)
        if token is not None:
            challenge = m.decode_body(m.Challenge, self.reply("CHALLENGE").body)
            answer = proof(token, "client", client=self.client, client_nonce=hello.nonce, shard_nonce=challenge.nonce)
            self.send("AUTH", body=m.Auth(proof=answer))
        return m.decode_body(m.Welcome, self.reply("WELCOME").body)

    def join(self, rank: int | None = None) -> m.Joined:
        """Becomes a worker, and attaches to this shard."""
        joined = m.decode_body(m.Joined, self.ask("JOIN", "JOINED", body=m.Join(rank=rank)).body)
        self.ask("ATTACH", "ATTACHED", body=m.Attach(ticket=joined.ticket))
        return joined

    def create(self, **spec: Any) -> Tensor:
        """Creates one tensor and defines it on this shard."""
        created = m.decode_body(
            m.Created, self.ask("CREATE", "CREATED", body=m.Create(specs=(TensorSpec(**spec),))).body
        )
        self.ask("DEFINE", "DEFINED", body=m.Define(facts=created.tensors))
        tensor = m.decode_fact(created.tensors[0].blob)
        assert isinstance(tensor, Tensor)
        return tensor

    def stats(self) -> dict[str, int | float | str]:
        return m.decode_body(m.Statistics, self.ask("STATS", "STATISTICS").body).counters


def connect_socket(address: str) -> socket.socket:
    """A blocking socket to `ps://...` or `unix://...`, with a time-out on everything."""
    parsed = parse_address(address)
    if isinstance(parsed, TcpAddress):
        return socket.create_connection((parsed.host, parsed.port), TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(parsed.path)
    return sock


def failure_of(frame: _core.Frame) -> PsstoreError:
    """The exception that an ERROR frame stands for."""
    body = m.decode_body(m.Failure, frame.body)
    return from_code(body.code, body.message, **body.details)


def slice_table(tensor: Tensor, *, with_bytes: bool, shard: int = 0) -> _core.SliceTable:
    """The tensor's slices on a shard, in its own dtype. A PULL asks without bytes; a write has them."""
    item_bytes, dtype = ITEM_BYTES[tensor.spec.dtype], _core.DTYPES[tensor.spec.dtype]
    entries = []
    for index, owner in enumerate(tensor.shards):
        if owner == shard:
            begin, end = tensor.bounds(index)
            entries.append((tensor.key(index), (end - begin) * item_bytes if with_bytes else 0, dtype))
    return _core.SliceTable(entries)
