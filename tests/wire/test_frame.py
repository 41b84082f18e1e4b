"""encode_frame and SliceTable: what goes out is what docs/wire.md draws, and comes in again unchanged."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psstore import _core
from psstore.errors import BadArgument
from tests.wire.support import F32, FIELDS, HEADER, drain, gather_into, head_with, push, reads, receive

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ops = st.sampled_from(sorted(_core.OPS.values()))


# ---- bytes ------------------------------------------------------------------------------------------


def test_header_fields_lie_where_the_drawing_says() -> None:
    table = _core.SliceTable([(7, 3, F32)])
    frame = _core.encode_frame(
        _core.OPS["PUSH"],
        request=1,
        round=2,
        rank=3,
        incarnation=4,
        sequence=5,
        table=table,
        body=b"body",
        payload_bytes=3,
        payload_crc=6,
    )
    fields = dict(zip(FIELDS, HEADER.unpack_from(frame), strict=True))
    assert fields.pop("header_crc") == _core.crc32c(frame[:60])
    assert fields == {
        "magic": b"PSS1",
        "version": _core.PROTOCOL_VERSION,
        "op": 10,
        "flags": _core.FLAG_CHECKSUM,
        "num_slices": 1,
        "body_bytes": 4,
        "payload_bytes": 3,
        "request": 1,
        "round": 2,
        "rank": 3,
        "incarnation": 4,
        "sequence": 5,
        "payload_crc": 6,
    }
    assert HEADER.size == _core.HEADER_BYTES
    covered = bytes(table) + b"body"
    assert frame[64:] == covered + struct.pack("<I", _core.crc32c(covered))


def test_slice_entry_fields_lie_where_the_drawing_says() -> None:
    table = _core.SliceTable([(2**63 + 1, 4096, F32)]).with_versions([9]).with_parts([2])
    assert bytes(table) == struct.pack("<QQIBBHQ", 2**63 + 1, 9, 4096, F32, 0, 2, 0)
    assert len(bytes(table)) == _core.SLICE_ENTRY_BYTES


@given(
    op=ops,
    request=u64,
    round_=u64,
    rank=u32,
    incarnation=u32,
    sequence=u64,
    body=st.binary(max_size=300),
    payloads=st.lists(st.binary(max_size=50), max_size=8),
    checksum=st.booleans(),
    max_read=st.integers(1, 700),
)
def test_what_is_encoded_is_decoded(
    op: int,
    request: int,
    round_: int,
    rank: int,
    incarnation: int,
    sequence: int,
    body: bytes,
    payloads: list[bytes],
    checksum: bool,
    max_read: int,
) -> None:
    payload = b"".join(payloads)
    head = _core.encode_frame(
        op,
        request=request,
        round=round_,
        rank=rank,
        incarnation=incarnation,
        sequence=sequence,
        table=_core.SliceTable((key, len(data), F32) for key, data in enumerate(payloads)),
        body=body,
        payload_bytes=len(payload),
        payload_crc=_core.crc32c(payload) if checksum else None,
    )
    decoder = _core.FrameDecoder()
    memory: list[bytearray] = []
    frames: list[_core.Frame] = []
    for data in reads(head + payload, max_read):
        receive(decoder, data)
        frames += drain(decoder, gather_into(memory))
    (frame,) = frames
    assert (frame.op, frame.request, frame.round, frame.rank) == (op, request, round_, rank)
    assert (frame.incarnation, frame.sequence, frame.body) == (incarnation, sequence, body)
    assert frame.flags == (_core.FLAG_CHECKSUM if checksum else 0)
    assert frame.payload_bytes == len(payload)
    assert frame.table.num_bytes() == [len(data) for data in payloads]
    assert b"".join(memory) == payload


# ---- what can't be sent -----------------------------------------------------------------------------


def test_more_than_a_frame_holds_is_refused() -> None:
    op = _core.OPS["PUSH"]
    with pytest.raises(BadArgument, match="4097 slices"):
        _core.encode_frame(op, table=_core.SliceTable([(0, 0, F32)] * (_core.MAX_SLICES + 1)))
    with pytest.raises(BadArgument, match="body bytes"):
        _core.encode_frame(op, body=bytes(_core.MAX_BODY_BYTES + 1))
    with pytest.raises(BadArgument, match="payload bytes"):
        _core.encode_frame(op, payload_bytes=_core.MAX_PAYLOAD_BYTES + 1)


def test_a_table_that_does_not_fit_the_payload_is_refused() -> None:
    with pytest.raises(BadArgument, match="table that says 4"):
        _core.encode_frame(_core.OPS["PUSH"], table=_core.SliceTable([(0, 4, F32)]), payload_bytes=5)


@pytest.mark.parametrize(("op", "part"), [("PUSH", 1), ("NORM", 1), ("PULL", 4), ("RESTORE", 4)])
def test_parts_that_the_operation_is_not_about_are_refused(op: str, part: int) -> None:
    with pytest.raises(BadArgument, match=f"can't be about part {part} of key 7"):
        _core.encode_frame(_core.OPS[op], table=_core.SliceTable([(7, 0, F32)]).with_parts([part]))


@pytest.mark.parametrize("flags", [_core.FLAG_CHECKSUM, 4, 0x8000])
def test_flags_that_nothing_stands_behind_are_refused(flags: int) -> None:
    with pytest.raises(BadArgument, match="FLAG_CHECKSUM"):
        _core.encode_frame(_core.OPS["PUSH"], flags=flags)


# ---- SliceTable -------------------------------------------------------------------------------------


def received_table(statuses: list[int]) -> _core.SliceTable:
    """A reply's table: with statuses, which only a shard writes."""
    head = _core.encode_frame(
        _core.OPS["PULLED"], table=_core.SliceTable((key, 0, F32) for key in range(len(statuses)))
    )
    entries = b"".join(struct.pack("<QQIBBHQ", key, 0, 0, F32, status, 0, 0) for key, status in enumerate(statuses))
    decoder = _core.FrameDecoder()
    decoder.feed(head_with(head, entries))
    frame = decoder.next_frame()
    assert frame is not None
    return frame.table


def test_table_gives_its_columns() -> None:
    table = _core.SliceTable([(5, 8, F32), (6, 4, 3)])
    assert len(table) == 2
    assert table.keys() == [5, 6]
    assert table.num_bytes() == [8, 4]
    assert table.dtypes() == [F32, 3]
    assert table.versions() == [0, 0]
    assert table.statuses() == [0, 0]
    assert table.parts() == [0, 0]
    assert table.payload_bytes == 12


def test_versions_parts_and_selections_are_copies() -> None:
    table = _core.SliceTable((key, key, F32) for key in range(4))
    newer = table.with_versions([10, 11, 12, 13]).with_parts([0, 1, 2, 3])
    assert (table.versions(), table.parts()) == ([0] * 4, [0] * 4)
    assert newer.versions() == [10, 11, 12, 13]
    assert (newer.parts(), newer.select([3, 1]).parts()) == ([0, 1, 2, 3], [3, 1])
    assert newer.select([3, 1]).keys() == [3, 1]
    assert newer.select([3, 1]).versions() == [13, 11]
    with pytest.raises(ValueError, match="1 values for 4 slices"):
        table.with_versions([1])
    with pytest.raises(ValueError, match="5 values for 4 slices"):
        table.with_parts([0] * 5)
    with pytest.raises(IndexError):
        table.select([4])


@pytest.mark.parametrize("failure", ["UNKNOWN_KEY", "NOT_APPLIED"])
def test_first_failure_is_none_of_ok_not_modified_and_no_state(failure: str) -> None:
    fine = [0, _core.ERROR_CODES["NOT_MODIFIED"], _core.ERROR_CODES["NO_STATE"]]
    assert received_table([]).first_failure() is None
    assert received_table(fine).first_failure() is None
    code = _core.ERROR_CODES[failure]
    assert received_table([*fine, code, 31]).first_failure() == (3, code)


@pytest.mark.parametrize(
    "row", [(0, 4, 9), (-1, 4, F32), (2**64, 4, F32), (0, 2**32, F32), (0, -1, F32), (0, 4), "row", None]
)
def test_a_table_refuses_what_is_no_slice(row: object) -> None:
    with pytest.raises(BadArgument, match="a slice is"):
        _core.SliceTable([row])  # type: ignore[list-item]


def test_a_table_outlives_its_frame() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"abcd"))
    frame = decoder.next_frame()
    assert frame is not None
    table = frame.table
    del frame, decoder
    assert table.keys() == [0]
