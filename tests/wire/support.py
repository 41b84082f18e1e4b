"""What the wire tests share: whole frames as bytes, and deliveries in reads of any size."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from psstore import _core

F32 = _core.DTYPES["float32"]

HEADER = struct.Struct("<4sBBHIIQQQIIQII")
"""The header as docs/wire.md draws it, without psstore's own code."""

FIELDS = (
    "magic",
    "version",
    "op",
    "flags",
    "num_slices",
    "body_bytes",
    "payload_bytes",
    "request",
    "round",
    "rank",
    "incarnation",
    "sequence",
    "payload_crc",
    "header_crc",
)


def push(*payloads: bytes, body: bytes = b"", checksum: bool = False) -> bytes:
    """A PUSH of one slice per payload: the frame and its payload, as they follow on the stream."""
    table = _core.SliceTable((key, len(payload), F32) for key, payload in enumerate(payloads))
    payload = b"".join(payloads)
    head = _core.encode_frame(
        _core.OPS["PUSH"],
        table=table,
        body=body,
        payload_bytes=len(payload),
        payload_crc=_core.crc32c(payload) if checksum else None,
    )
    return head + payload


def forge(frame: bytes, **fields: int | bytes) -> bytes:
    """`frame` with header fields replaced; its checksum is made right again unless it is among them."""
    values = dict(zip(FIELDS, HEADER.unpack_from(frame), strict=True)) | fields
    packed = HEADER.pack(*values.values())
    if "header_crc" not in fields:
        packed = packed[:-4] + struct.pack("<I", _core.crc32c(packed[:-4]))
    return packed + frame[HEADER.size :]


def head_with(frame: bytes, table: bytes) -> bytes:
    """The head of `frame`, which has no body, with `table` in place of its own."""
    return frame[: HEADER.size] + table + struct.pack("<I", _core.crc32c(table))


def reads(stream: bytes, max_bytes: int) -> Iterator[bytes]:
    for begin in range(0, len(stream), max_bytes):
        yield stream[begin : begin + max_bytes]


def receive(decoder: _core.FrameDecoder, data: bytes) -> None:
    """What a transport does: asks for memory, writes to it, says how much. `data` must fit."""
    while data:
        window = decoder.get_buffer(-1)
        size = min(len(window), len(data))
        window[:size] = data[:size]
        decoder.buffer_updated(size)
        data = data[size:]


def drain(
    decoder: _core.FrameDecoder, destination: Callable[[_core.Frame], _core.Buffer | _core.Segments | None]
) -> Iterator[_core.Frame]:
    """The complete frames; payloads go where `destination` says, or nowhere if it says None."""
    while (frame := decoder.next_frame()) is not None:
        if frame.complete:
            yield frame
        elif (chosen := destination(frame)) is not None:
            decoder.accept(chosen)
        else:
            decoder.discard()


def gather_into(memory: list[bytearray]) -> Callable[[_core.Frame], _core.Segments]:
    """A destination that leaves each payload in `memory`, one bytearray per slice."""

    def choose(frame: _core.Frame) -> _core.Segments:
        memory[:] = [bytearray(size) for size in frame.table.num_bytes()]
        return _core.Segments(memory, writable=True)

    return choose
