"""A frame on its way out: the pieces to write, in order. Shared by both sides."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from psstore import _core
from psstore.errors import PsstoreError
from psstore.wire.messages import Failure, Message, encode_body

Piece = bytes | memoryview
"""What a transport's `writelines` takes: owned bytes, or a view that keeps its memory alive."""


class Send(Struct, frozen=True):
    """Write these pieces to that connection."""

    conn: int
    pieces: Sequence[Piece]
    error: PsstoreError | None = None
    """What the frame says if it is an ERROR, for logs."""


class Close(Struct, frozen=True):
    """Write nothing more and close, once what was sent is out."""

    conn: int
    reason: str
    error: PsstoreError | None = None
    """What was sent last, if it is an ERROR that ends it; for logs."""


Output = Send | Close


def failure(conn: int, request: int, error: PsstoreError) -> Send:
    return Send(conn, [failure_frame(request, error)], error)


def failure_frame(request: int, error: PsstoreError) -> bytes:
    """The ERROR reply to `request`; to the whole connection if it is 0."""
    details = {
        name: value if isinstance(value, (int, float, str)) else str(value) for name, value in error.details.items()
    }
    body = encode_body(Failure(code=error.code, message=error.message, details=details))
    return _core.encode_frame(_core.OPS["ERROR"], request=request, body=body)


def ended_by(conn: int, error: PsstoreError) -> list[Output]:
    """What ends a connection that can't go on: the error, and its close."""
    return [failure(conn, 0, error), Close(conn, error.message, error)]


def answer(conn: int, frame: _core.Frame, body: Message | None, *, op: int | None = None) -> Send:
    """The reply to a request: the next op number, unless the handshake says otherwise."""
    encoded = encode_body(body) if body is not None else b""
    return Send(conn, [_core.encode_frame(op if op is not None else frame.op + 1, request=frame.request, body=encoded)])
