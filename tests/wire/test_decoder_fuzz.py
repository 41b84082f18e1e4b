"""Whatever bytes come, in whatever pieces: a frame, or a ProtocolError, and memory that stays within its bounds."""

from __future__ import annotations

import random
import time

import psutil
from hypothesis import given, settings
from hypothesis import strategies as st

from psstore import _core
from psstore.errors import ProtocolError
from tests.wire.support import drain, forge, gather_into, push, reads

GOOD_STREAM = (
    _core.encode_frame(_core.OPS["HELLO"], body=b"hello")
    + push(b"abcd", b"", b"efg" * 100, checksum=True)
    + push(bytes(70_000), b"x", body=b"body")
    + _core.encode_frame(_core.OPS["PULL"], table=_core.SliceTable([(1, 0, 1), (2, 0, 2)]))
)

MAX_BODY_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 18

MUTATION_S = 8.0
"""How long the seeded mutations run; the number of rounds is what the machine makes of it."""

MEMORY_MARGIN_BYTES = 32 << 20
"""What a process may grow by without a leak: allocator and test runner included."""


def decode(stream: bytes, max_read: int) -> int:
    """How many frames the stream holds; raises nothing but ProtocolError."""
    decoder = _core.FrameDecoder(max_body_bytes=MAX_BODY_BYTES, max_payload_bytes=MAX_PAYLOAD_BYTES)
    num_frames = 0
    try:
        for data in reads(stream, max_read):
            decoder.feed(data)
            for frame in drain(decoder, gather_into([])):
                assert len(frame.body) <= MAX_BODY_BYTES
                assert frame.payload_bytes <= MAX_PAYLOAD_BYTES
                num_frames += 1
    except ProtocolError:
        pass
    return num_frames


def mutated(choice: random.Random, stream: bytes) -> bytes:
    changed = bytearray(stream)
    for _ in range(choice.randrange(5)):
        position = choice.randrange(len(changed))
        match choice.randrange(4):
            case 0:
                changed[position] ^= 1 << choice.randrange(8)
            case 1:
                changed[position] = choice.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del changed[position : position + choice.randrange(100)]
            case _:
                changed[position:position] = choice.randbytes(choice.randrange(100))
        if not changed:
            break
    return bytes(changed)


def test_the_good_stream_is_good() -> None:
    for max_read in (1, 100, 1 << 20):
        assert decode(GOOD_STREAM, max_read) == 4


def test_mutated_streams_raise_protocol_errors_only_and_leak_nothing() -> None:
    process = psutil.Process()
    choice = random.Random(5700)
    end = time.monotonic() + MUTATION_S
    decode(GOOD_STREAM, 1000)
    before = process.memory_info().rss
    while time.monotonic() < end:
        decode(mutated(choice, GOOD_STREAM), choice.choice([37, 1000, 65_536]))
    assert process.memory_info().rss - before < MEMORY_MARGIN_BYTES


small = st.integers(0, 300)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)

some_fields = st.fixed_dictionaries(
    {},
    optional={
        "op": st.integers(0, 2**8 - 1),
        "flags": st.integers(0, 2**16 - 1),
        "num_slices": small | u32,
        "body_bytes": small | u32,
        "payload_bytes": small | u64,
        "payload_crc": u32,
    },
)


@settings(max_examples=400, deadline=None)
@given(fields=some_fields, tail=st.binary(max_size=600), max_read=st.integers(1, 700))
def test_any_header_with_a_right_checksum_is_a_frame_or_a_protocol_error(
    fields: dict[str, int], tail: bytes, max_read: int
) -> None:
    decode(forge(_core.encode_frame(_core.OPS["PUSH"]), **fields) + tail, max_read)


@settings(max_examples=400, deadline=None)
@given(stream=st.binary(max_size=2000), max_read=st.integers(1, 700))
def test_any_bytes_are_a_frame_or_a_protocol_error(stream: bytes, max_read: int) -> None:
    decode(stream, max_read)
    decode(b"PSS1\1" + stream, max_read)
