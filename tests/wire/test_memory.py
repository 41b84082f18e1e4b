"""Segments, Buffer and crc32c: memory that is sent from and received into without a needless copy."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psstore import _core
from psstore.errors import BadArgument
from tests.shard.frames import define, key_of
from tests.wire.support import F32, receive

SMALL_BYTES = 8 << 10
"""Copied together with its neighbours."""

LARGE_BYTES = 64 << 10
"""A piece of its own."""

# ---- crc32c -----------------------------------------------------------------------------------------


def test_crc32c_matches_published_vectors() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert _core.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _core.crc32c(b"") == 0


@given(data=st.binary(max_size=20_000), cut=st.integers(0, 20_000))
def test_crc32c_continues_from_its_seed(data: bytes, cut: int) -> None:
    assert _core.crc32c(data[cut:], _core.crc32c(data[:cut])) == _core.crc32c(data)


@given(st.lists(st.binary(max_size=100)))
def test_segments_have_the_checksum_of_their_concatenation(ranges: list[bytes]) -> None:
    assert _core.Segments(ranges).crc32c() == _core.crc32c(b"".join(ranges))


# ---- Segments ---------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0, 1, 100, SMALL_BYTES, LARGE_BYTES]), max_size=20))
def test_pieces_are_the_ranges_in_order(sizes: list[int]) -> None:
    ranges = [bytes([i]) * size for i, size in enumerate(sizes)]
    segments = _core.Segments(ranges)
    assert len(segments) == len(ranges)
    assert segments.nbytes == sum(sizes)
    assert b"".join(segments.pieces()) == b"".join(ranges)
    assert all(len(piece) for piece in segments.pieces())


def test_many_small_ranges_cost_one_piece() -> None:
    assert len(_core.Segments([bytes(100)] * 500).pieces()) == 1


def test_large_ranges_are_not_copied_and_small_ones_are() -> None:
    small, large = np.zeros(10, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    copied, shared = _core.Segments([small, large]).pieces()
    small[:] = 1
    large[:] = 1
    assert bytes(copied) == bytes(10)
    assert bytes(shared) == b"\1" * LARGE_BYTES


def test_pieces_are_flat_read_only_bytes() -> None:
    (piece,) = _core.Segments([np.ones((128, 256), np.float32)]).pieces()
    assert (piece.format, piece.ndim, piece.nbytes, piece.readonly) == ("B", 1, 128 * 256 * 4, True)


def test_pieces_keep_the_memory_of_large_ranges() -> None:
    memory = bytearray(LARGE_BYTES)
    pieces = _core.Segments([memory]).pieces()
    gc.collect()
    with pytest.raises(BufferError):
        memory.clear()
    del pieces
    memory.clear()


def test_ranges_that_are_not_one_run_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _core.Segments([np.zeros((4, 4))[:, 1]])
    with pytest.raises(TypeError):
        _core.Segments([object()])  # type: ignore[list-item]
    with pytest.raises((BufferError, ValueError)):
        _core.Segments([b"read-only"], writable=True)


def test_segments_release_every_range_if_one_is_refused() -> None:
    memory = bytearray(10)
    with pytest.raises(TypeError):
        _core.Segments([memory, object()])  # type: ignore[list-item]
    memory.clear()


def test_copying_many_megabytes_lets_other_threads_run() -> None:
    segments = _core.Segments([bytes(SMALL_BYTES)] * 8000)
    rounds = 0
    done = threading.Event()

    def work() -> None:
        for _ in range(5):
            segments.pieces()
            segments.crc32c()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        rounds += 1
    thread.join()
    assert rounds > 0


# ---- Buffer -----------------------------------------------------------------------------------------


def announced(shard: _core.Shard, decoder: _core.FrameDecoder, payload: bytes) -> tuple[_core.Frame, _core.Buffer]:
    """An ASSIGN of one slice whose payload is admitted and still to come."""
    define(shard, 1, len(payload) // 4, rule="assign")
    table = _core.SliceTable([(key_of(1), len(payload), F32)])
    receive(
        decoder,
        _core.encode_frame(_core.OPS["ASSIGN"], sequence=1, table=table, payload_bytes=len(payload)),
    )
    frame = decoder.next_frame()
    assert frame is not None
    buffer = shard.admit(frame)
    assert buffer is not None
    return frame, buffer


@pytest.mark.parametrize("num_bytes", [400, 400_000])
def test_a_payload_is_received_into_a_buffer(num_bytes: int) -> None:
    payload = np.arange(num_bytes // 4, dtype=np.float32).tobytes()
    decoder = _core.FrameDecoder()
    frame, buffer = announced(_core.Shard(index=0), decoder, payload)
    assert (buffer.nbytes, len(buffer)) == (num_bytes, num_bytes)
    decoder.accept(buffer)
    receive(decoder, payload)
    assert decoder.next_frame() is frame
    assert frame.payload is not None
    assert bytes(frame.payload) == payload


def test_a_buffer_is_writable_until_it_is_received() -> None:
    payload = bytes(400)
    decoder = _core.FrameDecoder()
    frame, buffer = announced(_core.Shard(index=0), decoder, payload)
    assert not memoryview(buffer).readonly
    decoder.accept(buffer)
    receive(decoder, payload)
    decoder.next_frame()
    assert memoryview(buffer).readonly
    assert frame.payload is not None
    assert memoryview(frame.payload).readonly


def test_a_received_buffer_is_not_received_into_again() -> None:
    payload = bytes(400)
    decoder = _core.FrameDecoder()
    shard = _core.Shard(index=0)
    _, buffer = announced(shard, decoder, payload)
    decoder.accept(buffer)
    receive(decoder, payload)
    decoder.next_frame()
    announced(shard, decoder, payload)
    with pytest.raises(BadArgument, match="already"):
        decoder.accept(buffer)


def test_a_buffer_of_another_size_is_refused() -> None:
    shard = _core.Shard(index=0)
    _, small = announced(shard, _core.FrameDecoder(), bytes(400))
    decoder = _core.FrameDecoder()
    define(shard, 2, 101, rule="assign")
    table = _core.SliceTable([(key_of(2), 404, F32)])
    receive(decoder, _core.encode_frame(_core.OPS["ASSIGN"], sequence=2, table=table, payload_bytes=404))
    decoder.next_frame()
    with pytest.raises(ValueError, match="400 bytes for a payload of 404"):
        decoder.accept(small)


def test_a_memoryview_keeps_its_buffer() -> None:
    view = memoryview(announced(_core.Shard(index=0), _core.FrameDecoder(), bytes(400))[1])
    gc.collect()
    view[:] = b"\7" * 400
    assert bytes(view) == b"\7" * 400
