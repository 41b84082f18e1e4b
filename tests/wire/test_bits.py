"""Every bit of a frame that changes on its way is noticed before anybody acts on the frame."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from psstore import _core
from psstore.errors import BadChecksum
from psstore.wire import messages as m
from tests.wire.support import drain, gather_into

VALUES = bytes(range(48))

TABLE = _core.SliceTable([(7 << 24, 32, 1), (7 << 24 | 1, 16, 1)]).with_versions([3, 4])
NO_BYTES = _core.SliceTable([(7 << 24, 0, 1), (7 << 24 | 1, 0, 1)])
FACT = m.Signed(blob=b"\x81\xa4type\xa8decision", mac=bytes(16))


def frame(op: str, *, body: m.Message | None = None, table: _core.SliceTable | None = None) -> bytes:
    """A frame of a connection whose client asked for checksums: with VALUES if the table has bytes."""
    payload = VALUES if table is not None and table.payload_bytes else b""
    head = _core.encode_frame(
        _core.OPS[op],
        request=9,
        round=5,
        rank=1,
        incarnation=2,
        sequence=6,
        table=table,
        body=b"" if body is None else m.encode_body(body),
        payload_bytes=len(payload),
        payload_crc=_core.crc32c(payload) if payload else None,
    )
    return head + payload


COMMIT = m.Commit(round=5, hypers={0: {"lr": 0.1}}, weight=8.0, present=((7, 9),), since=4)

FRAMES = {
    "HELLO": frame("HELLO", body=m.Hello(client="0" * 32, nonce=bytes(32))),
    "COMMIT": frame("COMMIT", body=COMMIT),
    "COMMITTED": frame(
        "COMMITTED", body=m.Committed(round=5, decision=5, next_round=6, decisions=(FACT,), last=5, slowest=5)
    ),
    "PUSH": frame("PUSH", body=m.Carry(decisions=(FACT,), newest=5), table=TABLE),
    "PUSHED": frame("PUSHED", table=NO_BYTES),
    "PULL": frame("PULL", body=m.Carry(at_least=5, wait_s=300.0), table=NO_BYTES),
    "PULLED": frame("PULLED", table=TABLE),
    "ERROR": frame("ERROR", body=m.Failure(code=50, message="rank 1 is lost", details={"rank": 1})),
    "HEARTBEAT": frame("HEARTBEAT"),
}


def decoded(stream: bytes) -> Iterator[_core.Frame]:
    """The frames behind a good one: before it a peer may speak any protocol."""
    decoder = _core.FrameDecoder()
    decoder.feed(FRAMES["HEARTBEAT"] + stream)
    assert decoder.next_frame() is not None
    return drain(decoder, gather_into([]))


@pytest.mark.parametrize("stream", FRAMES.values(), ids=FRAMES)
def test_every_changed_bit_is_noticed(stream: bytes) -> None:
    assert len(list(decoded(stream))) == 1
    for bit in range(8 * len(stream)):
        changed = bytearray(stream)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadChecksum):
            list(decoded(bytes(changed)))


@pytest.mark.parametrize("op", ["PUSH", "PULLED"])
def test_changed_head_is_noticed_before_its_payload_is_announced(op: str) -> None:
    head = FRAMES[op][: -len(VALUES)]
    for byte in range(len(head)):
        with pytest.raises(BadChecksum):
            next(decoded(head[:byte] + bytes([head[byte] ^ 0x10]) + head[byte + 1 :]))
