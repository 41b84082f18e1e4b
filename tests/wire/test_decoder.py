"""FrameDecoder as a transport sees it: each good case whole, byte by byte and with leftovers; then each bad one."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterable

import psutil
import pytest

from psstore import _core
from psstore.errors import BadArgument, BadChecksum, BadHeader, BadMagic, BadVersion, FrameTooLarge, ProtocolError
from tests.wire.support import HEADER, drain, forge, gather_into, head_with, push, reads, receive

BIG = bytes(range(256)) * 1100
"""100 KiB: large enough to be received in place."""

GOOD = {
    "header only": (_core.encode_frame(_core.OPS["LEAVE"]), []),
    "body": (_core.encode_frame(_core.OPS["JOIN"], body=b"\x80"), []),
    "body longer than the receive buffer": (_core.encode_frame(_core.OPS["CREATE"], body=BIG), []),
    "small slices": (push(b"abcd", b"", b"efg"), [b"abcd", b"", b"efg"]),
    "large slice": (push(BIG), [BIG]),
    "large between small, checksummed": (push(b"a", BIG, b"b", checksum=True), [b"a", BIG, b"b"]),
    "body and payload": (push(b"abcd", body=b"body"), [b"abcd"]),
}

good = pytest.mark.parametrize(("stream", "payloads"), GOOD.values(), ids=GOOD.keys())


def incomplete(decoder: _core.FrameDecoder) -> _core.Frame:
    frame = decoder.next_frame()
    assert frame is not None
    assert not frame.complete
    return frame


# ---- good frames ------------------------------------------------------------------------------------


@good
@pytest.mark.parametrize("max_read", [1, 61, 1 << 30])
def test_frame_arrives_in_reads_of_any_size(stream: bytes, payloads: list[bytes], max_read: int) -> None:
    decoder = _core.FrameDecoder()
    memory: list[bytearray] = []
    frames: list[_core.Frame] = []
    for data in reads(stream, max_read):
        assert not frames
        decoder.feed(data)
        frames += drain(decoder, gather_into(memory))
    assert len(frames) == 1
    assert memory == payloads
    assert not decoder.mid_frame


@good
def test_frame_leaves_what_follows_it_alone(stream: bytes, payloads: list[bytes]) -> None:
    decoder = _core.FrameDecoder()
    memory: list[bytearray] = []
    decoder.feed(stream + stream[:63])
    frames = drain(decoder, gather_into(memory))
    assert next(frames).complete
    assert memory == payloads
    assert list(frames) == []
    assert decoder.mid_frame


@good
def test_discarded_payload_passes_by(stream: bytes, payloads: list[bytes]) -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(stream * 3)
    assert [frame.payload for frame in drain(decoder, lambda frame: None)] == [None] * 3


def test_both_sights_of_a_frame_are_the_same_object() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"abcd"))
    frame = incomplete(decoder)
    decoder.discard()
    assert decoder.next_frame() is frame
    assert frame.complete
    assert decoder.next_frame() is None


def test_slices_without_bytes_leave_their_range_alone() -> None:
    kept = bytearray(b"kept")
    got = bytearray(4)
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"", b"abcd"))
    frames = drain(decoder, lambda frame: _core.Segments([kept, got], writable=True))
    assert next(frames).complete
    assert [bytes(kept), bytes(got)] == [b"kept", b"abcd"]


# ---- windows ----------------------------------------------------------------------------------------


def test_large_ranges_are_received_in_place() -> None:
    memory = bytearray(len(BIG))
    decoder = _core.FrameDecoder()
    decoder.feed(push(BIG)[: -len(BIG)])
    incomplete(decoder)
    decoder.accept(_core.Segments([memory], writable=True))
    window = decoder.get_buffer(-1)
    assert len(window) == len(BIG)
    window[:3] = b"abc"
    assert memory[:3] == b"abc"


def test_a_window_outlives_decoder_and_destination() -> None:
    decoder = _core.FrameDecoder()
    head = decoder.get_buffer(-1)
    decoder.feed(push(BIG)[: -len(BIG)])
    incomplete(decoder)
    decoder.accept(_core.Segments([bytearray(len(BIG))], writable=True))
    direct = decoder.get_buffer(-1)
    del decoder
    gc.collect()
    head[:] = bytes(len(head))
    direct[:] = bytes(len(direct))


def test_a_destination_is_held_until_its_payload_is_complete() -> None:
    memory = bytearray(len(BIG))
    decoder = _core.FrameDecoder()
    decoder.feed(push(BIG)[: -len(BIG)])
    incomplete(decoder)
    decoder.accept(_core.Segments([memory], writable=True))
    with pytest.raises(BufferError):
        memory.clear()
    receive(decoder, BIG)
    assert decoder.next_frame() is not None
    memory.clear()


def test_calls_out_of_order_are_refused_and_change_nothing() -> None:
    decoder = _core.FrameDecoder()
    with pytest.raises(ValueError, match="accept without"):
        decoder.accept(_core.Segments([], writable=True))
    with pytest.raises(ValueError, match="discard without"):
        decoder.discard()
    with pytest.raises(ValueError, match="window"):
        decoder.buffer_updated(1)
    decoder.feed(push(BIG))
    with pytest.raises(ValueError, match="still wait"):
        decoder.feed(b"more")
    incomplete(decoder)
    with pytest.raises(ValueError, match="accept or discard"):
        decoder.next_frame()
    decoder.discard()
    assert len(list(drain(decoder, lambda frame: None))) == 1


def test_destinations_of_the_wrong_kind_are_refused() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"abcd"))
    incomplete(decoder)
    with pytest.raises(BadArgument, match="writable=True"):
        decoder.accept(_core.Segments([bytes(4)]))
    with pytest.raises(TypeError, match="Buffer or Segments"):
        decoder.accept(bytearray(4))  # type: ignore[arg-type]
    decoder.discard()
    assert decoder.next_frame() is not None


# ---- bad frames -------------------------------------------------------------------------------------

LEAVE = _core.encode_frame(_core.OPS["LEAVE"])
PULL = _core.encode_frame(_core.OPS["PULL"], table=_core.SliceTable([(1, 0, 1)]))

BAD: dict[str, tuple[bytes, type[ProtocolError]]] = {
    "HTTP": (b"GET / HTTP/1.1\r\n", BadMagic),
    "TLS": (b"\x16\x03\x01", BadMagic),
    "one wrong byte": (b"Q", BadMagic),
    "wrong magic": (forge(LEAVE, magic=b"PSS2"), BadMagic),
    "another version": (forge(LEAVE, version=_core.PROTOCOL_VERSION + 1)[:5], BadVersion),
    "wrong header checksum": (forge(LEAVE, header_crc=1), BadChecksum),
    "unknown operation": (forge(LEAVE, op=1), BadHeader),
    "unknown flag": (forge(LEAVE, flags=0x4000), BadHeader),
    "checksum without flag": (forge(LEAVE, payload_crc=1), BadHeader),
    "checksum of no payload": (forge(LEAVE, payload_crc=1, flags=_core.FLAG_CHECKSUM), BadChecksum),
    "too many slices": (forge(LEAVE, num_slices=_core.MAX_SLICES + 1), FrameTooLarge),
    "body too long": (forge(LEAVE, body_bytes=_core.MAX_BODY_BYTES + 1), FrameTooLarge),
    "payload too long": (forge(LEAVE, payload_bytes=_core.MAX_PAYLOAD_BYTES + 1), FrameTooLarge),
    "all lengths at their most": (
        forge(LEAVE, num_slices=2**32 - 1, body_bytes=2**32 - 1, payload_bytes=2**64 - 1),
        FrameTooLarge,
    ),
    "wrong checksum of a table": (PULL[:-5] + b"\1" + PULL[-4:], BadChecksum),
    "wrong checksum of a body": (_core.encode_frame(_core.OPS["JOIN"], body=b"\x80")[:-1] + b"\1", BadChecksum),
    "slices beyond the payload": (forge(push(b"abcd"), payload_bytes=3), BadHeader),
    "payload beyond the slices": (forge(push(b"abcd"), payload_bytes=5), BadHeader),
    "offset of what is on the stream": (head_with(PULL, PULL[HEADER.size : -5] + b"\1"), BadHeader),
    "shared payload without slices": (forge(LEAVE, payload_bytes=4, flags=_core.FLAG_SHARED), BadHeader),
    "shared payload with a checksum": (forge(LEAVE, flags=_core.FLAG_SHARED | _core.FLAG_CHECKSUM), BadHeader),
    "wrong payload checksum": (push(b"abcd", checksum=True)[:-1] + b"x", BadChecksum),
    "wrong checksum of a large payload": (push(BIG, checksum=True)[:-1] + b"x", BadChecksum),
}


def feed_and_discard(decoder: _core.FrameDecoder, stream: Iterable[bytes]) -> None:
    for data in stream:
        decoder.feed(data)
        assert list(drain(decoder, lambda frame: None)) == []


@pytest.mark.parametrize("max_read", [1, 1 << 30])
@pytest.mark.parametrize(("stream", "error"), BAD.values(), ids=BAD.keys())
def test_bad_frame_is_a_protocol_error_for_ever(stream: bytes, error: type[ProtocolError], max_read: int) -> None:
    decoder = _core.FrameDecoder()
    with pytest.raises(error) as first:
        feed_and_discard(decoder, reads(stream, max_read))
    for call in (
        decoder.next_frame,
        decoder.discard,
        lambda: decoder.feed(LEAVE),
        lambda: decoder.get_buffer(-1),
        lambda: decoder.buffer_updated(0),
        lambda: decoder.accept(_core.Segments([], writable=True)),
    ):
        with pytest.raises(error) as again:
            call()
        assert again.value.message == first.value.message


@pytest.mark.parametrize("sizes", [[4], [4, 4, 4], [4, 5], [8]])
def test_slices_that_were_not_asked_for_are_a_protocol_error(sizes: list[int]) -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"abcd", b"efgh"))
    incomplete(decoder)
    memory = [bytearray(size) for size in sizes]
    with pytest.raises(BadHeader):
        decoder.accept(_core.Segments(memory, writable=True))
    for data in memory:
        data.clear()  # a broken decoder holds nothing


def test_good_frames_before_a_bad_one_still_count() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(LEAVE + bytes(_core.HEADER_BYTES))
    assert decoder.next_frame() is not None
    with pytest.raises(BadChecksum):
        decoder.next_frame()


def test_before_the_handshake_less_is_allowed() -> None:
    limit = _core.PRE_AUTH_MAX_BYTES
    too_many = _core.SliceTable([(0, 0, 1)] * (limit // _core.SLICE_ENTRY_BYTES + 1))
    for stream in (
        push(b"abcd"),
        _core.encode_frame(_core.OPS["HELLO"], body=bytes(limit + 1)),
        _core.encode_frame(_core.OPS["PULL"], table=too_many),
    ):
        decoder = _core.FrameDecoder(max_body_bytes=limit, max_payload_bytes=0)
        decoder.feed(_core.encode_frame(_core.OPS["HELLO"], body=bytes(limit)))
        assert decoder.next_frame() is not None
        decoder.feed(stream)
        with pytest.raises(FrameTooLarge):
            decoder.next_frame()


def test_limits_rise_from_the_next_header_on() -> None:
    decoder = _core.FrameDecoder(max_body_bytes=4, max_payload_bytes=0)
    decoder.set_limits(max_body_bytes=64, max_payload_bytes=4)
    decoder.feed(push(b"abcd"))
    assert len(list(drain(decoder, lambda frame: None))) == 1


def test_errors_say_what_was_expected_and_what_came() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(forge(LEAVE, body_bytes=2**31))
    with pytest.raises(FrameTooLarge, match=f"body of {2**31} bytes: at most {_core.MAX_BODY_BYTES}"):
        decoder.next_frame()


def test_a_huge_announcement_allocates_nothing() -> None:
    """The largest allowed lengths, and not one of their bytes. Counted as address space: memory that was asked
    for and not touched would not show otherwise."""
    header = forge(LEAVE, body_bytes=_core.MAX_BODY_BYTES, payload_bytes=_core.MAX_PAYLOAD_BYTES)
    process = psutil.Process()
    before = process.memory_info().vms
    decoders = [_core.FrameDecoder() for _ in range(64)]
    for decoder in decoders:
        decoder.feed(header)
        assert decoder.next_frame() is None
    assert process.memory_info().vms - before < 64 << 20  # bodies of 1 GiB were announced


def test_a_frame_can_be_read_after_its_decoder_is_gone() -> None:
    decoder = _core.FrameDecoder()
    decoder.feed(push(b"abcd", body=b"body"))
    frame = incomplete(decoder)
    del decoder
    gc.collect()
    assert frame.body == b"body"
    assert bytes(frame.table) == struct.pack("<QQIBBHQ", 0, 0, 4, 1, 0, 0, 0)
