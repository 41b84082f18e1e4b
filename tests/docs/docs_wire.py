"""docs/wire.md in plain Python: frames, slice entries, CRC-32C. Written from that page alone, for docs_client.py."""

from __future__ import annotations

import enum
import socket
import struct
from typing import Any, NamedTuple

import msgspec

Body = dict[str, Any]

HEADER = struct.Struct("<4sBBHIIQQQIIQI")  # up to header_crc
ENTRY = struct.Struct("<QQIBBHQ")
VERSION = 3
CARRY = struct.Struct("<QQQdd")
CHECKSUM = 1  # bit 0 of flags
DTYPES = {"float32": (1, 4), "float64": (2, 8)}  # number, bytes per element


class Op(enum.IntEnum):
    """What a client may ask; the reply has the next odd number."""

    HELLO, CHALLENGE, AUTH, WELCOME = 2, 3, 4, 5
    PUSH, PULL, ASSIGN, ADD, INIT, PULL_ROWS = 10, 12, 14, 16, 18, 24
    DEFINE, ATTACH, ATTEST = 30, 32, 38
    JOIN, CREATE, READY, COMMIT, DESCRIBE, LEAVE, DECISIONS = 50, 52, 54, 56, 58, 62, 68
    STATS, HEARTBEAT, ERROR = 70, 80, 255


DATA_REPLIES = (*range(Op.PUSH + 1, Op.INIT + 2, 2), Op.PULL_ROWS + 1)


class Violation(Exception):
    """The peer does not keep to the protocol, or is not who it should be."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


class Slice(NamedTuple):
    """An entry of the slice table."""

    key: int
    version: int = 0
    num_bytes: int = 0
    dtype: int = 0
    status: int = 0


class Frame(NamedTuple):
    """The lengths and checksums of its header are made and checked on the way."""

    op: int
    request: int = 0
    body: Body | bytes | None = None
    slices: tuple[Slice, ...] = ()
    payload: bytes = b""
    round: int = 0
    rank: int = 0
    incarnation: int = 0
    sequence: int = 0

    @property
    def fields(self) -> Body:
        return self.body if isinstance(self.body, dict) else {}


CHANGES = 16  # added to a dtype's number: what has changed


def changed(copy: bytes, payload: bytes, item_bytes: int) -> bytes:
    """A slice's bytes after what has changed: gaps, seven bits to a byte, each with the bytes of the next element."""
    now, place, at = bytearray(copy), 0, 0
    while at < len(payload):
        gap = shift = 0
        while True:
            gap |= (payload[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if payload[at - 1] < 128:
                break
        place += gap
        now[place * item_bytes : (place + 1) * item_bytes] = payload[at : at + item_bytes]
        place, at = place + 1, at + item_bytes
    return bytes(now)


class KeptRow(NamedTuple):
    """A row as of that change of these marks of its partition."""

    marks: int
    change: int
    data: bytes


def partition_of(number: int) -> int:
    """Of the row of that id: the 6 highest bits of its hash."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = (number ^ number >> 33) * factor % 2**64
    return (number ^ number >> 33) >> 58


def asked_rows(ids: list[list[int]], kept: dict[int, KeptRow]) -> bytes:
    """What is behind the Carry of a pull of rows of some partitions, of which some are kept."""
    marks = [max((kept[one].marks for one in of_one if one in kept), default=0) for of_one in ids]
    body = b"".join(struct.pack("<Q", one) for of_one in ids for one in of_one) + struct.pack(f"<{len(ids)}Q", *marks)
    for of_one, number in zip(ids, marks, strict=True):
        is_of_them = [one in kept and kept[one].marks == number for one in of_one]
        changes = [kept[one].change if holds else 0 for one, holds in zip(of_one, is_of_them, strict=True)]
        body += struct.pack(f"<{len(changes)}I", *changes)
    return body


def come_rows(payload: bytes, ids: list[int], row_bytes: int, kept: dict[int, KeptRow]) -> int:
    """Brings the rows of one partition to what came. Returns how many that were."""
    (marks, change), num_words = struct.unpack_from("<QI", payload), (len(ids) + 31) // 32
    words = struct.unpack_from(f"<{num_words}I", payload, 12)
    at = first = 12 + 4 * num_words
    for i, one in enumerate(ids):
        comes = words[i // 32] >> i % 32 & 1
        data = payload[at : at + row_bytes] if comes else kept[one].data
        at += row_bytes if comes else 0
        kept[one] = KeptRow(marks, change, data)
    require(at == len(payload), "other rows came than it says")
    return (at - first) // row_bytes


def carry(decisions: dict[int, Body], at_least: int = 0, wait_s: float = 0.0) -> bytes:
    """The body of a PUSH or PULL. `decisions`: signed, by number."""
    fixed = CARRY.pack(max(decisions, default=0), at_least, 0, wait_s, 0.0)
    return fixed + (msgspec.msgpack.encode([decisions[number] for number in sorted(decisions)]) if decisions else b"")


def send(stream: socket.socket, frame: Frame) -> None:
    table = b"".join(ENTRY.pack(*entry, 0, 0) for entry in frame.slices)
    body = (
        b""
        if frame.body is None
        else frame.body
        if isinstance(frame.body, bytes)
        else msgspec.msgpack.encode(frame.body)
    )
    flags, payload_crc = (CHECKSUM, crc32c(frame.payload)) if frame.payload else (0, 0)
    lengths = (len(frame.slices), len(body), len(frame.payload))
    numbers = (frame.request, frame.round, frame.rank, frame.incarnation, frame.sequence)
    header = HEADER.pack(b"PSS1", VERSION, frame.op, flags, *lengths, *numbers, payload_crc)
    stream.sendall(sealed(header) + (sealed(table + body) if table or body else b"") + frame.payload)


def receive(stream: socket.socket) -> Frame:
    header = _unsealed(stream, HEADER.size)
    magic, version, op, flags, *lengths, request, round, rank, incarnation, sequence, payload_crc = HEADER.unpack(
        header
    )
    require((magic, version) == (b"PSS1", VERSION), "not a frame of this protocol")
    num_slices, body_bytes, payload_bytes = lengths
    table_bytes = num_slices * ENTRY.size
    fields = _unsealed(stream, table_bytes + body_bytes) if table_bytes or body_bytes else b""
    table, body = fields[:table_bytes], fields[table_bytes:]
    payload = _exactly(stream, payload_bytes)
    require(not flags & CHECKSUM or payload_crc == crc32c(payload), "the payload was damaged on its way")
    slices = tuple(Slice(*entry[:5]) for entry in ENTRY.iter_unpack(table))
    decoded = msgspec.msgpack.decode(body) if body else None
    return Frame(op, request, decoded, slices, payload, round, rank, incarnation, sequence)


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


def _unsealed(stream: socket.socket, num_bytes: int) -> bytes:
    """What was sealed: read it, and hold it against the checksum that follows."""
    data = _exactly(stream, num_bytes)
    require(sealed(data)[-4:] == _exactly(stream, 4), "damaged on its way")
    return data


def _exactly(stream: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        part = stream.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("the shard closed the connection")
        received += part
    return bytes(received)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC_TABLE = [_remainder(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
