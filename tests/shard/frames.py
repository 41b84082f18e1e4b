"""Drives a `_core.Shard` as the server does, with real frames and no sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psstore import _core
from psstore.types import complete_hyper

Array = npt.NDArray[np.float32]
Payload = Array | npt.NDArray[np.uint8]
"""Floats, or bytes of another dtype."""

SGD: Mapping[int, Mapping[str, float]] = {0: complete_hyper("sgd", {"lr": 1.0})}
"""Group 0 takes plain steps of lr 1: what is staged is subtracted."""


def key_of(tensor_id: int, index: int = 0) -> int:
    return tensor_id << _core.SLICE_INDEX_BITS | index


def define(
    shard: _core.Shard,
    tensor_id: int,
    num_elems: int | Sequence[int],
    *,
    rule: str = "sgd",
    dtype: str = "float32",
    zeros: bool = True,
) -> None:
    """A tensor with one slice of each size, in group 0."""
    sizes = [num_elems] if isinstance(num_elems, int) else num_elems
    slices = [(key_of(tensor_id, index), size) for index, size in enumerate(sizes)]
    shard.define(tensor_id, dtype=_core.DTYPES[dtype], rule=_core.RULES[rule], group=0, zeros=zeros, slices=slices)


def decision(
    number: int,
    members: Sequence[tuple[int, int, int, float]],
    *,
    skip: bool = False,
    divisor: float = 1.0,
    hypers: Mapping[int, Mapping[str, float]] = SGD,
    present: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    early: bool = False,
    needs_scale: bool = False,
) -> _core.Decision:
    """`present`: rank -> ranges of tensor ids (default: every member has a gradient for every tensor)."""
    everything = {member[0]: [(0, 1 << 40)] for member in members}
    chosen = everything if present is None else present
    return _core.Decision(
        number,
        skip=skip,
        divisor=divisor,
        members=members,
        hypers=hypers,
        present=chosen,
        early=early,
        needs_scale=needs_scale,
    )


def receive(shard: _core.Shard, head: bytes, payload: bytes) -> _core.Frame:
    """Feeds one frame to a decoder and lets the shard choose where its payload goes."""
    decoder = _core.FrameDecoder()
    decoder.feed(head)
    frame = decoder.next_frame()
    assert frame is not None
    if frame.complete:
        shard.admit(frame)
        return frame
    destination = shard.admit(frame)
    if destination is None:
        decoder.discard()
    else:
        decoder.accept(destination)
    decoder.feed(payload)
    complete = decoder.next_frame()
    assert complete is not None
    assert complete.complete
    return complete


class Answer(NamedTuple):
    """One slice of a reply's table."""

    status: int
    version: int
    num_bytes: int


def answers(table: _core.SliceTable) -> list[Answer]:
    return [Answer(*row) for row in zip(table.statuses(), table.versions(), table.num_bytes(), strict=True)]


def _frame(
    shard: _core.Shard,
    op: str,
    values: Mapping[int, Payload],
    *,
    dtype: str = "float32",
    rank: int = 0,
    incarnation: int = 0,
    round: int = 0,
    sequence: int = 0,
) -> _core.Frame:
    number = _core.DTYPES[dtype]
    table = _core.SliceTable((key, value.nbytes, number) for key, value in values.items())
    head = _core.encode_frame(
        _core.OPS[op],
        round=round,
        rank=rank,
        incarnation=incarnation,
        sequence=sequence,
        table=table,
        payload_bytes=table.payload_bytes,
    )
    return receive(shard, head, b"".join(value.tobytes() for value in values.values()))


def _request(op: str, table: _core.SliceTable) -> _core.Frame:
    decoder = _core.FrameDecoder()
    decoder.feed(_core.encode_frame(_core.OPS[op], table=table))
    frame = decoder.next_frame()
    assert frame is not None
    return frame


def push(
    shard: _core.Shard,
    values: Mapping[int, Payload],
    *,
    dtype: str = "float32",
    rank: int = 0,
    incarnation: int = 1,
    round: int = 1,
) -> list[Answer]:
    frame = _frame(shard, "PUSH", values, dtype=dtype, rank=rank, incarnation=incarnation, round=round)
    return answers(shard.stage(frame))


def initialise(shard: _core.Shard, values: Mapping[int, Payload], *, dtype: str = "float32") -> list[Answer]:
    return answers(shard.initialise(_frame(shard, "INIT", values, dtype=dtype)))


def write(
    shard: _core.Shard,
    op: str,
    values: Mapping[int, Payload],
    *,
    sequence: int,
    client: str = "client",
    dtype: str = "float32",
) -> list[Answer]:
    return answers(shard.write(_frame(shard, op, values, dtype=dtype, sequence=sequence), client))


class Restored(NamedTuple):
    """What one slice is to get: its value (part 0), or a state buffer and the number of steps."""

    key: int
    part: int
    data: Payload
    steps: int = 0


def restore(
    shard: _core.Shard, items: Sequence[Restored], *, sequence: int, client: str = "client", dtype: str = "float32"
) -> list[Answer]:
    table = _core.SliceTable((item.key, item.data.nbytes, _core.DTYPES[dtype]) for item in items)
    table = table.with_parts([item.part for item in items]).with_versions([item.steps for item in items])
    head = _core.encode_frame(_core.OPS["RESTORE"], sequence=sequence, table=table, payload_bytes=table.payload_bytes)
    frame = receive(shard, head, b"".join(item.data.tobytes() for item in items))
    return answers(shard.restore(frame, client))


def norms(shard: _core.Shard, keys: Sequence[int]) -> tuple[list[Answer], list[float]]:
    """The reply's table, and the sums of squares of those that are OK."""
    asked = _core.SliceTable((key, 0, _core.DTYPES["float32"]) for key in keys)
    table, pieces, ready = shard.norms(_request("NORM", asked))
    if ready is not None:
        ready.wait()
    return answers(table), [float(square) for square in np.frombuffer(b"".join(pieces), np.float64)]


class Pulled(NamedTuple):
    answers: list[Answer]
    payload_bytes: int
    pieces: list[memoryview]
    dtypes: list[int]


def pull(
    shard: _core.Shard,
    keys: Sequence[int],
    *,
    versions: Sequence[int] | None = None,
    parts: Sequence[int] | None = None,
    dtype: str = "float32",
) -> Pulled:
    wanted = _core.SliceTable((key, 0, _core.DTYPES[dtype]) for key in keys)
    if versions is not None:
        wanted = wanted.with_versions(versions)
    if parts is not None:
        wanted = wanted.with_parts(parts)
    table, pieces, _, ready = shard.read(_request("PULL", wanted))
    if ready is not None:
        ready.wait()
        if not all(_core.say_changes(table, piece) for piece in pieces):
            table, pieces, _, ready = shard.read(_request("PULL", wanted), whole=True)
            assert ready is not None
            ready.wait()
    return Pulled(answers(table), table.payload_bytes, pieces, table.dtypes())


def value(shard: _core.Shard, key: int) -> list[float]:
    payload = b"".join(pull(shard, [key]).pieces)
    return [float(element) for element in np.frombuffer(payload, np.float32)]


def floats(*elements: float) -> Array:
    return np.array(elements, np.float32)
