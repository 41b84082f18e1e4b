"""What a pull gets: statuses per slice, few pieces, and bytes that stay what they were."""

from __future__ import annotations

import numpy as np
import pytest

from psstore import _core, errors
from tests.shard.frames import answers, decision, define, floats, key_of, pull, push, receive, value, write
from tests.support.fake_shards import in_main_memory

A, B, UNKNOWN = key_of(1), key_of(2), key_of(99)
LARGE = 1 << 14  # float32 elements of 64 KiB: shared, not copied


def test_each_slice_is_answered_for_itself() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 2, rule="assign")
    define(shard, 2, 1, zeros=False)
    write(shard, "ASSIGN", {A: floats(1, 2)}, sequence=1)
    pulled = pull(shard, [UNKNOWN, A, B])
    assert [answer.status for answer in pulled.answers] == [
        errors.UnknownKey.code,
        errors.OK,
        errors.NotInitialised.code,
    ]
    assert pulled.answers[1].num_bytes == pulled.payload_bytes == 8


def test_each_slice_is_admitted_for_itself() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 2)
    define(shard, 2, 1, rule="assign")
    pushed = push(shard, {UNKNOWN: floats(9), B: floats(9), A: floats(1, 2)})
    assert [answer.status for answer in pushed] == [errors.UnknownKey.code, errors.RuleMismatch.code, errors.OK]
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert value(shard, A) == [-1, -2]


def test_not_modified_carries_no_bytes() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 1, rule="assign")
    write(shard, "ASSIGN", {A: floats(5)}, sequence=1)
    pulled = pull(shard, [A, A, A], versions=[0, 1, 2])
    assert [answer.status for answer in pulled.answers] == [errors.OK, errors.OK, errors.NOT_MODIFIED]
    assert [answer.version for answer in pulled.answers] == [1, 1, 1]
    assert pulled.payload_bytes == 8


@in_main_memory
def test_small_values_share_a_piece_and_large_ones_are_not_copied() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, [3, 5, LARGE, 1, 1])
    pulled = pull(shard, [key_of(1, index) for index in range(5)])
    assert [piece.nbytes for piece in pulled.pieces] == [32, 4 * LARGE, 8]
    assert sum(piece.nbytes for piece in pulled.pieces) == pulled.payload_bytes


@pytest.mark.parametrize("num_elems", [3, LARGE])
def test_pieces_are_read_only_and_keep_their_bytes(num_elems: int) -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, num_elems)
    (held,) = pull(shard, [A]).pieces
    assert held.readonly
    for round_ in (1, 2):
        push(shard, {A: np.ones(num_elems, np.float32)}, round=round_)
        shard.advance(decision(round_, [(0, 1, round_, 1.0)]))
    assert value(shard, A) == [-2.0] * num_elems
    assert bytes(held) == bytes(4 * num_elems)


def test_a_piece_outlives_its_shard() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, LARGE)
    (held,) = pull(shard, [A]).pieces
    del shard
    assert bytes(held) == bytes(4 * LARGE)


def test_half_precision_comes_converted() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 2, rule="assign")
    write(shard, "ASSIGN", {A: floats(1, -2)}, sequence=1)
    half = b"".join(pull(shard, [A], dtype="float16").pieces)
    assert np.frombuffer(half, np.float16).tolist() == [1, -2]
    assert pull(shard, [A], dtype="float64").answers[0].status == errors.DTypeMismatch.code


def test_non_finite_values_are_refused_slice_by_slice_if_asked() -> None:
    shard = _core.Shard(index=0, refuse_non_finite=True)
    define(shard, 1, [1, 1, 1])
    keys = [key_of(1, index) for index in range(3)]
    pushed = push(shard, {keys[0]: floats(np.nan), keys[1]: floats(1), keys[2]: floats(-np.inf)})
    assert [answer.status for answer in pushed] == [errors.NonFinite.code, errors.OK, errors.NonFinite.code]


def test_a_frame_of_another_operation_is_refused() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 1)
    table = _core.SliceTable([(A, 4, _core.DTYPES["float32"])])
    head = _core.encode_frame(_core.OPS["PUSH"], incarnation=1, round=1, table=table, payload_bytes=4)
    frame = receive(shard, head, bytes(4))
    for call in (shard.initialise, shard.read, lambda frame: shard.write(frame, "client")):
        with pytest.raises(errors.BadArgument):
            call(frame)
    assert answers(shard.stage(frame))[0].status == errors.OK


def test_a_frame_whose_payload_has_not_arrived_is_refused() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 1)
    table = _core.SliceTable([(A, 4, _core.DTYPES["float32"])])
    decoder = _core.FrameDecoder()
    decoder.feed(_core.encode_frame(_core.OPS["PUSH"], incarnation=1, round=1, table=table, payload_bytes=4))
    frame = decoder.next_frame()
    assert frame is not None
    destination = shard.admit(frame)
    assert destination is not None
    decoder.accept(destination)
    with pytest.raises(errors.BadArgument, match="not arrived"):
        shard.stage(frame)
