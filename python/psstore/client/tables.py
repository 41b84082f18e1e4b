"""Tables of rows: how ids and rows become frames, one entry for each partition, and back."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Floats, Source, fresh, source, target
from psstore.client.context import Context
from psstore.client.norms import Norm
from psstore.client.reading import Reading
from psstore.client.row_bounds import Bounds
from psstore.client.row_listing import IDS, RECORDS, row_pages
from psstore.client.writing import Writing
from psstore.errors import BadArgument, DTypeMismatch, ShapeMismatch, TableFull
from psstore.partition.packing import FRAME_BYTES
from psstore.protocol.client import Hold, Transfer
from psstore.types import PARTITION_BITS, RowsSpec, Tensor, TensorSpec, record_bytes
from psstore.wire.messages import Exist

RULES = {
    "sgd": "sparse_sgd",
    "adagrad": "sparse_adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "adam": "sparse_adam",
}
"""What callers name a rule of rows -> its name in the store."""

ID_BYTES = 8
VALUE_BYTES = 4

Ids = np.ndarray[Any, np.dtype[np.uint64]]


class Tables:
    """The calls of one store about tables. Used on the store's loop only; the arguments are explained in
    operations.py."""

    def __init__(self, context: Context, norm: Norm, writing: Writing, reading: Reading) -> None:
        self._context = context
        self._norm = norm
        self._writing = writing
        self._reading = reading

    async def create(
        self, name: str, *, dim: int, rule: str, init: str, seed: int, group: int, bounds: Bounds, exist: Exist
    ) -> None:
        if rule not in RULES:
            raise BadArgument(f"create_table {name!r}: rule {rule!r} is not one of {', '.join(RULES)}")
        kind, a, b = first_values(init)
        rows = RowsSpec(dim=dim, init=kind, a=a, b=b, seed=table_seed(name, seed))
        spec = TensorSpec(name=name, shape=rows.shape, rule=RULES[rule], group=group, rows=rows)
        spec.check()
        spec = bounds.bounded(spec)
        spec.check()
        tensors, _ = await self._context.client.create([spec], exist=exist, offer=False)
        self._context.schema.learn(tensors)

    async def push(self, name: str, ids: Array, gradients: Array) -> None:
        table = await self._context.schema.find_table(name)
        what = f"push_rows {name!r}"
        numbers, shape = ids_of(what, ids)
        given = source(gradients, dtype="float32")
        _check_rows(f"{what}: gradients", (*shape, _dim(table)), given.shape, given.dtype)
        grouped = _core.GroupedIds(numbers, PARTITION_BITS)
        pieces = self._written_pieces(what, table, grouped)
        with _saying_the_bound(table):
            await self._writing.send_rows(table, _written(table, grouped, given, pieces))

    async def assign(self, name: str, ids: Array, rows: Array) -> None:
        table = await self._context.schema.find_table(name)
        what = f"assign_rows {name!r}"
        numbers, shape = ids_of(what, ids)
        given = source(rows, dtype="float32")
        _check_rows(f"{what}: rows", (*shape, _dim(table)), given.shape, given.dtype)
        grouped = _core.GroupedIds(numbers, PARTITION_BITS)
        if grouped.begins[-1] != numbers.size:
            unique, counts = np.unique(numbers, return_counts=True)
            raise BadArgument(f"{what}: id {unique[counts > 1][0]} comes twice; a row can be assigned one value")
        pieces = (one for one in self._written_pieces(what, table, grouped) if one.num_bytes)
        with _saying_the_bound(table):
            await self._writing.assign_rows(table, _written(table, grouped, given, pieces))

    async def keys(self, name: str, *, wait_s: float | None, hold: Hold) -> Ids:
        table = await self._context.schema.find_table(name)
        pages = row_pages(
            self._context,
            table,
            what=IDS,
            row_bytes=ID_BYTES,
            hold=hold,
            wait_s=self._context.patience(wait_s),
        )
        ids = [page.reshape(-1).view(np.uint64) async for page in pages]
        return np.sort(np.concatenate(ids))

    async def pull(
        self, name: str, ids: Array, out: Array | None, *, wait_s: float | None, hold: Hold | None = None
    ) -> Array:
        """`hold`: read as of that decision; None: the newest."""
        context = self._context
        table = await context.schema.find_table(name)
        numbers, shape = ids_of(f"pull_rows {name!r}", ids)
        result_shape = (*shape, _dim(table))
        receiver = fresh(result_shape, "float32") if out is None else target(out)
        _check_rows(f"pull_rows {name!r}: out", result_shape, receiver.shape, receiver.dtype)
        grouped = _core.GroupedIds(numbers, PARTITION_BITS)
        rows: Floats = np.empty((grouped.begins[-1], _dim(table)), np.float32)
        memory = rows.reshape(-1).view(np.uint8)
        transfers = [
            Transfer(frame.way, frame.pull_table(table), frame.segments(memory), frame.ids(grouped))
            for frame in _frames(self._pulled_pieces(table, grouped))
        ]
        await self._norm.settle(wait_s)
        with context.forgetting_unknown([table]):
            answers = await context.client.pull_rows(transfers, wait_s=context.patience(wait_s), hold=hold)
        self._reading.num_bytes += sum(answer.table.payload_bytes for answer in answers)
        grouped.scatter(memory, _dim(table), receiver.data)
        if receiver.finish is not None:
            receiver.finish()
        return receiver.result

    async def export(self, name: str, path: Path, *, wait_s: float | None, hold: Hold) -> None:
        from psstore.checkpoint.exchange.table_file import write_table

        table = await self._context.schema.find_table(name)
        pages = row_pages(
            self._context,
            table,
            what=RECORDS,
            row_bytes=record_bytes(table.spec),
            hold=hold,
            wait_s=self._context.patience(wait_s),
        )
        records = np.concatenate([page async for page in pages])
        await asyncio.to_thread(write_table, path, table.spec, records)

    def _written_pieces(self, what: str, table: Tensor, grouped: _core.GroupedIds) -> Iterator[_Piece]:
        """Every partition, also one without a row: a contribution is to all of the table."""
        begins, row_bytes = grouped.begins, ID_BYTES + VALUE_BYTES * _dim(table)
        for partition, way in enumerate(self._context.client.ways.of(table)):
            piece = _Piece(way, partition, begins[partition], begins[partition + 1], row_bytes)
            if piece.num_bytes > _core.MAX_PAYLOAD_BYTES:
                raise BadArgument(
                    f"{what}: {piece.end - piece.begin} rows of one partition are {piece.num_bytes} bytes, and a frame"
                    f" holds {_core.MAX_PAYLOAD_BYTES}; send fewer rows at a time"
                )
            yield piece

    def _pulled_pieces(self, table: Tensor, grouped: _core.GroupedIds) -> Iterator[_Piece]:
        """Runs of rows of one partition, none larger than a frame."""
        begins, row_bytes = grouped.begins, VALUE_BYTES * _dim(table)
        most = max(1, FRAME_BYTES // row_bytes)
        for partition, way in enumerate(self._context.client.ways.of(table)):
            for begin in range(begins[partition], begins[partition + 1], most):
                yield _Piece(way, partition, begin, min(begin + most, begins[partition + 1]), row_bytes)


class _Piece(NamedTuple):
    """Rows [begin, end) of the grouped ids, which are all of one partition."""

    way: int
    partition: int
    begin: int
    end: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.row_bytes


class _RowFrame(NamedTuple):
    """Pieces that go over one way together."""

    way: int
    pieces: list[_Piece]

    def push_table(self, table: Tensor) -> _core.SliceTable:
        rows = _core.DTYPES["rows"]
        return _core.SliceTable([(table.key(one.partition), one.num_bytes, rows) for one in self.pieces])

    def pull_table(self, table: Tensor) -> _core.SliceTable:
        float32 = _core.DTYPES["float32"]
        asked = _core.SliceTable([(table.key(one.partition), 0, float32) for one in self.pieces])
        return asked.with_versions([one.end - one.begin for one in self.pieces])

    def segments(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> _core.Segments:
        """Memory of the pieces, in what all rows have one after the other."""
        ranges = [memory[one.begin * one.row_bytes : one.end * one.row_bytes] for one in self.pieces]
        return _core.Segments(ranges, writable=True)

    def ids(self, grouped: _core.GroupedIds) -> bytes:
        return b"".join(grouped.ids(one.begin, one.end) for one in self.pieces)


def _written(table: Tensor, grouped: _core.GroupedIds, given: Source, pieces: Iterator[_Piece]) -> list[Transfer]:
    """Frames with each piece's ids and what was given for them."""
    packed = np.empty(grouped.packed_bytes(_dim(table)), np.uint8)
    grouped.pack(given.data, _dim(table), packed)
    return [Transfer(frame.way, frame.push_table(table), frame.segments(packed)) for frame in _frames(pieces)]


def _frames(pieces: Iterator[_Piece]) -> list[_RowFrame]:
    """The pieces in frames of about FRAME_BYTES, in their order on each way."""
    frames: list[_RowFrame] = []
    open_frames: dict[int, tuple[_RowFrame, int]] = {}
    for piece in pieces:
        frame, num_bytes = open_frames.get(piece.way, (None, 0))
        if frame is None or num_bytes + piece.num_bytes > FRAME_BYTES or len(frame.pieces) == _core.MAX_SLICES:
            frame, num_bytes = _RowFrame(piece.way, []), 0
            frames.append(frame)
        frame.pieces.append(piece)
        open_frames[piece.way] = frame, num_bytes + piece.num_bytes
    return frames


@contextmanager
def _saying_the_bound(table: Tensor) -> Iterator[None]:
    """Raises TableFull again with what is known here of the table."""
    try:
        yield
    except TableFull:
        name, rows = table.spec.name, table.spec.rows
        assert rows is not None, "it is a table"
        raise TableFull(
            f"table {name!r} is full: it may have {rows.max_rows} rows, {rows.partition_rows} in each of its"
            f" {1 << PARTITION_BITS} partitions, and some would have more; push rows that it has"
            f" (store.keys({name!r})), or drop it and create it with more max_rows, or with evict='lru'",
            name=name,
        ) from None


def _dim(table: Tensor) -> int:
    assert table.spec.rows is not None, "it is a table"
    return table.spec.rows.dim


# ---- arguments --------------------------------------------------------------------------------------

_NUMBER = r"\s*([^\s,()]+)\s*"
_INITS = {
    "zeros": re.compile(r"zeros()()"),
    "constant": re.compile(rf"constant\({_NUMBER}\)()"),
    "uniform": re.compile(rf"uniform\({_NUMBER},{_NUMBER}\)"),
    "normal": re.compile(rf"normal\({_NUMBER},{_NUMBER}\)"),
}


def first_values(init: str) -> tuple[str, float, float]:
    """Reads 'normal(0, 0.01)' as (kind, a, b). Raises BadArgument."""
    for kind, form in _INITS.items():
        found = form.fullmatch(init.strip())
        if found is None:
            continue
        try:
            a, b = (float(text) if text else 0.0 for text in found.groups())
        except ValueError:
            break
        if (kind == "uniform" and a > b) or (kind == "normal" and b < 0):
            break
        return "constant" if kind == "zeros" else kind, a, b
    raise BadArgument(
        f"init is {init!r}; expected 'zeros', 'constant(c)', 'uniform(a, b)' with a <= b, or 'normal(mean, std)'"
    )


def table_seed(name: str, seed: int) -> int:
    """What a row's first values are drawn by, beside its id: 64 bits of the table's name and the seed."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def ids_of(what: str, value: Array) -> tuple[Ids, tuple[int, ...]]:
    """Returns ids as flat uint64, and the shape that they came in. Raises DTypeMismatch, BadArgument."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.uint64)  # of a list, which does not say what it has none of
    if array.dtype.kind not in "iu":
        raise DTypeMismatch(f"{what}: ids are {array.dtype.name}; expected integers in [0, 2^64)")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise BadArgument(f"{what}: id {array.min()} is negative; expected ids in [0, 2^64)")
    return np.ascontiguousarray(array, dtype=np.uint64).reshape(-1), array.shape


def _check_rows(what: str, expected: Sequence[int], shape: Sequence[int], dtype: str) -> None:
    if tuple(shape) != tuple(expected):
        raise ShapeMismatch(f"{what}: expected shape {tuple(expected)}, of the ids and then (dim,), got {tuple(shape)}")
    if dtype != "float32":
        raise DTypeMismatch(f"{what}: expected dtype float32, got {dtype}; convert it first")
