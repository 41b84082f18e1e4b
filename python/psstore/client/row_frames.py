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


Piece = tuple[int, int, int, int]
"""(way, partition, begin, end): rows [begin, end) of the grouped ids, which are all of one partition. A step makes one
for each partition several times: a tuple costs a third of what one with names does."""


ASKED_BYTES = ID_BYTES + 4
"""Most that a row has in a request for it: its id, and the decision that a cache has it as of."""


def written_pieces(
    what: str, table: Tensor, grouped: _core.GroupedIds, ways: Router, encoding: str = "float32"
) -> list[Piece]:
    """Every partition, also one without a row: a contribution is to all of the table. Raises BadArgument that names
    `what` if a partition's rows are more than a frame holds. `encoding`: float32, or the codec that rows travel in."""
    begins, row_bytes = grouped.begins, _written_bytes(table, encoding)
    pieces = [(way, part, begins[part], begins[part + 1]) for part, way in enumerate(ways.of(table))]
    most = max(end - begin for _, _, begin, end in pieces)
    if most * row_bytes > _core.MAX_PAYLOAD_BYTES:
        raise BadArgument(
            f"{what}: {most} rows of one partition are {most * row_bytes} bytes, and a frame holds"
            f" {_core.MAX_PAYLOAD_BYTES}; send fewer rows at a time"
        )
    return pieces


def with_rows(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces that are not empty."""
    return [piece for piece in pieces if piece[2] < piece[3]]


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
    frames = _frames(pieces, _written_bytes(table, encoding))
    return [Transfer(frame.way, frame.push_table(table, dtype), frame.segments(packed)) for frame in frames]


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
    row_bytes = payload_bytes(encoding, row_dim(table))
    most_bytes = max(row_bytes, ASKED_BYTES)
    return _frames(_pulled_pieces(table, grouped, ways, most_bytes), row_bytes, most_bytes)


class RowFrame(NamedTuple):
    """Pieces that go over one way together."""

    way: int
    row_bytes: int
    """Bytes of one row in the frame."""
    pieces: list[Piece]

    def push_table(self, table: Tensor, dtype: str) -> _core.SliceTable:
        rows = _core.DTYPES["rows" if dtype == "float32" else f"rows_{dtype}"]
        first, row_bytes = table.key(0), self.row_bytes
        entries = [(first + part, (end - begin) * row_bytes, rows) for _, part, begin, end in self.pieces]
        return _core.SliceTable(entries)

    def pull_table(self, table: Tensor, dtype: int) -> _core.SliceTable:
        first = table.key(0)
        asked = _core.SliceTable([(first + part, 0, dtype) for _, part, _, _ in self.pieces])
        return asked.with_versions([end - begin for _, _, begin, end in self.pieces])

    def segments(self, memory: Memory) -> _core.Segments:
        """Memory of the pieces, in what all rows have one after the other."""
        row_bytes = self.row_bytes
        return _core.Segments([memory[begin * row_bytes : end * row_bytes] for begin, end in self._runs()])

    def destination(self, memory: Memory) -> _core.Segments:
        """Memory of each piece."""
        row_bytes = self.row_bytes
        ranges = [memory[begin * row_bytes : end * row_bytes] for _, _, begin, end in self.pieces]
        return _core.Segments(ranges, writable=True)

    def ids(self, grouped: _core.GroupedIds) -> bytes:
        return b"".join(grouped.ids(begin, end) for begin, end in self._runs())

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Where the pieces' rows are among the grouped ids, those together that follow each other: where there is one
        shard, all of them."""
        first = last = self.pieces[0][2]
        for _, _, begin, end in self.pieces:
            if begin != last:
                yield first, last
                first = begin
            last = end
        yield first, last


def row_dim(table: Tensor) -> int:
    """Elements of a row."""
    assert table.spec.rows is not None, "it is a table"
    return table.spec.rows.dim


# ---- how ----


def _written_bytes(table: Tensor, encoding: str) -> int:
    """Bytes of a row in a contribution, with its id."""
    return ID_BYTES + payload_bytes(encoding, row_dim(table))


def _pulled_pieces(table: Tensor, grouped: _core.GroupedIds, ways: Router, row_bytes: int) -> list[Piece]:
    """Runs of rows of one partition, none larger than a frame. `row_bytes`: in the answer or in the request, whichever
    has more."""
    begins = grouped.begins
    most = max(1, FRAME_BYTES // row_bytes)
    pieces: list[Piece] = []
    for partition, way in enumerate(ways.of(table)):
        begin, last = begins[partition], begins[partition + 1]
        while begin < last:
            end = min(begin + most, last)
            pieces.append((way, partition, begin, end))
            begin = end
    return pieces


def _frames(pieces: Iterable[Piece], row_bytes: int, most_bytes: int | None = None) -> list[RowFrame]:
    """The pieces in frames of about FRAME_BYTES, in their order on each way. `most_bytes`: of a row in a frame, where
    that is not `row_bytes`."""
    counted = row_bytes if most_bytes is None else most_bytes
    frames: list[RowFrame] = []
    open_pieces: dict[int, list[Piece]] = {}
    room_bytes: dict[int, int] = {}
    for piece in pieces:
        way, _, begin, end = piece
        room = room_bytes.get(way, -1) - (end - begin) * counted
        if room < 0 or len(open_pieces[way]) == _core.MAX_SLICES:
            frames.append(RowFrame(way, row_bytes, []))
            open_pieces[way] = frames[-1].pieces
            room = FRAME_BYTES - (end - begin) * counted
        open_pieces[way].append(piece)
        room_bytes[way] = room
    return frames
