"""How ids and rows become frames, one entry for each partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.codec.codecs import dtype_of, payload_bytes
from psstore.errors import BadArgument
from psstore.partition.packing import FRAME_BYTES
from psstore.partition.router import Router
from psstore.protocol.client import Transfer
from psstore.types import ID_BYTES, Tensor

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Piece(NamedTuple):
    """Rows [begin, end) of the grouped ids, which are all of one partition."""

    way: int
    partition: int
    begin: int
    end: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.row_bytes


def written_pieces(
    what: str, table: Tensor, grouped: _core.GroupedIds, ways: Router, encoding: str = "float32"
) -> Iterator[Piece]:
    """Every partition, also one without a row: a contribution is to all of the table. Raises BadArgument that names
    `what` if a partition's rows are more than a frame holds. `encoding`: float32, or the codec that rows travel in."""
    begins, row_bytes = grouped.begins, ID_BYTES + payload_bytes(encoding, row_dim(table))
    for partition, way in enumerate(ways.of(table)):
        piece = Piece(way, partition, begins[partition], begins[partition + 1], row_bytes)
        if piece.num_bytes > _core.MAX_PAYLOAD_BYTES:
            raise BadArgument(
                f"{what}: {piece.end - piece.begin} rows of one partition are {piece.num_bytes} bytes, and a frame"
                f" holds {_core.MAX_PAYLOAD_BYTES}; send fewer rows at a time"
            )
        yield piece


def written(
    table: Tensor,
    grouped: _core.GroupedIds,
    rows: Any,
    pieces: Iterable[Piece],
    encoding: str = "float32",
    residuals: Any = None,
) -> list[Transfer]:
    """Frames with each piece's ids and what was given for them. `rows`: float32, one for each id that was given;
    `residuals`: float32, one for each id, which a codec adds, and has be what it lost."""
    dtype = dtype_of(encoding)
    packed = np.empty(grouped.packed_bytes(row_dim(table), _core.DTYPES[dtype]), np.uint8)
    grouped.pack(rows, row_dim(table), packed, _core.DTYPES[dtype], residuals)
    return [Transfer(frame.way, frame.push_table(table, dtype), frame.segments(packed)) for frame in _frames(pieces)]


def pulled(
    table: Tensor, grouped: _core.GroupedIds, memory: Memory, ways: Router, encoding: str = "float32"
) -> list[Transfer]:
    """Requests whose answers bring the rows of the grouped ids to `memory`, one after the other."""
    dtype = _core.DTYPES[dtype_of(encoding)]
    return [
        Transfer(frame.way, frame.pull_table(table, dtype), frame.destination(memory), frame.ids(grouped))
        for frame in pulled_frames(table, grouped, ways, encoding)
    ]


def pulled_frames(table: Tensor, grouped: _core.GroupedIds, ways: Router, encoding: str) -> list[RowFrame]:
    """The frames of a pull of the grouped ids."""
    return _frames(_pulled_pieces(table, grouped, ways, encoding))


class RowFrame(NamedTuple):
    """Pieces that go over one way together."""

    way: int
    pieces: list[Piece]

    def push_table(self, table: Tensor, dtype: str) -> _core.SliceTable:
        rows = _core.DTYPES["rows" if dtype == "float32" else f"rows_{dtype}"]
        return _core.SliceTable([(table.key(one.partition), one.num_bytes, rows) for one in self.pieces])

    def pull_table(self, table: Tensor, dtype: int) -> _core.SliceTable:
        asked = _core.SliceTable([(table.key(one.partition), 0, dtype) for one in self.pieces])
        return asked.with_versions([one.end - one.begin for one in self.pieces])

    def segments(self, memory: Memory) -> _core.Segments:
        """Memory of the pieces, in what all rows have one after the other."""
        row_bytes = self.pieces[0].row_bytes
        return _core.Segments([memory[begin * row_bytes : end * row_bytes] for begin, end in self._runs()])

    def destination(self, memory: Memory) -> _core.Segments:
        """Memory of each piece."""
        ranges = [memory[one.begin * one.row_bytes : one.end * one.row_bytes] for one in self.pieces]
        return _core.Segments(ranges, writable=True)

    def ids(self, grouped: _core.GroupedIds) -> bytes:
        return b"".join(grouped.ids(begin, end) for begin, end in self._runs())

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Where the pieces' rows are among the grouped ids, those together that follow each other: where there is one
        shard, all of them."""
        first, last = self.pieces[0].begin, self.pieces[0].begin
        for piece in self.pieces:
            if piece.begin != last:
                yield first, last
                first = piece.begin
            last = piece.end
        yield first, last


def row_dim(table: Tensor) -> int:
    """Elements of a row."""
    assert table.spec.rows is not None, "it is a table"
    return table.spec.rows.dim


# ---- how ----


def _pulled_pieces(table: Tensor, grouped: _core.GroupedIds, ways: Router, encoding: str) -> Iterator[Piece]:
    """Runs of rows of one partition, none larger than a frame."""
    begins, row_bytes = grouped.begins, payload_bytes(encoding, row_dim(table))
    most = max(1, FRAME_BYTES // row_bytes)
    for partition, way in enumerate(ways.of(table)):
        for begin in range(begins[partition], begins[partition + 1], most):
            yield Piece(way, partition, begin, min(begin + most, begins[partition + 1]), row_bytes)


def _frames(pieces: Iterable[Piece]) -> list[RowFrame]:
    """The pieces in frames of about FRAME_BYTES, in their order on each way."""
    frames: list[RowFrame] = []
    open_frames: dict[int, tuple[RowFrame, int]] = {}
    for piece in pieces:
        frame, num_bytes = open_frames.get(piece.way, (None, 0))
        if frame is None or num_bytes + piece.num_bytes > FRAME_BYTES or len(frame.pieces) == _core.MAX_SLICES:
            frame, num_bytes = RowFrame(piece.way, []), 0
            frames.append(frame)
        frame.pieces.append(piece)
        open_frames[piece.way] = frame, num_bytes + piece.num_bytes
    return frames
