"""Tables of rows: the calls of a store about them, and what their arguments may be."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.arrays import Array, Source, Target, fresh, is_masked, source, target
from psstore.client.compression.rows import KeptBack
from psstore.client.context import Context
from psstore.client.norms import Norm
from psstore.client.reading import Reading
from psstore.client.row_bounds import Bounds
from psstore.client.row_cache import KeptPull, RowCaches, RowCacheUse
from psstore.client.row_frames import pulled, pulled_frames, row_dim, with_rows, written, written_pieces
from psstore.client.row_listing import IDS, RECORDS, row_pages
from psstore.client.writing import Writing
from psstore.codec.codecs import dtype_of, is_dtype, payload_bytes
from psstore.errors import BadArgument, DTypeMismatch, ShapeMismatch, TableFull
from psstore.protocol.holds import Hold
from psstore.types import ID_BYTES, PARTITION_BITS, ROW_DTYPES, RowsSpec, Tensor, TensorSpec, record_bytes
from psstore.wire.messages import Exist

RULES = {
    "sgd": "sparse_sgd",
    "adagrad": "sparse_adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "adam": "sparse_adam",
    "momentum": "sparse_momentum",
    "ftrl": "ftrl",
}
"""What callers name a rule of rows -> its name in the store."""

Ids = np.ndarray[Any, np.dtype[np.uint64]]


class Tables:
    """The calls of one store about tables. Used on the store's loop only; the arguments are explained in
    operations.py."""

    def __init__(self, context: Context, norm: Norm, writing: Writing, reading: Reading) -> None:
        self._context = context
        self._norm = norm
        self._writing = writing
        self._reading = reading
        self._caches = RowCaches()
        context.on_gone.append(self._caches.forget)
        self._grouped = _core.GroupedIds(np.empty(0, np.uint64), PARTITION_BITS)
        """The last ones."""

    def _group(self, ids: Ids) -> _core.GroupedIds:
        """A step mostly pushes to the rows that it has pulled."""
        if not self._grouped.are(ids):
            self._grouped = _core.GroupedIds(ids, PARTITION_BITS)
        return self._grouped

    async def create(
        self,
        name: str,
        *,
        dim: int,
        dtype: str,
        rule: str,
        init: str,
        seed: int,
        group: int,
        bounds: Bounds,
        exist: Exist,
    ) -> None:
        if rule not in RULES:
            raise BadArgument(f"create_table {name!r}: rule {rule!r} is not one of {', '.join(RULES)}")
        kind, a, b = first_values(init)
        rows = RowsSpec(dim=dim, init=kind, a=a, b=b, seed=table_seed(name, seed))
        spec = TensorSpec(name=name, shape=rows.shape, dtype=dtype, rule=RULES[rule], group=group, rows=rows)
        spec.check()
        spec = bounds.bounded(spec)
        spec.check()
        tensors, _ = await self._context.client.tensors.create([spec], exist=exist, offer=False)
        self._context.schema.learn(tensors)

    async def push(
        self, name: str, ids: Array, gradients: Array, *, codec: str | None, loss_scale: float | None
    ) -> None:
        table = await self._context.schema.find_table(name)
        self._context.client.worker.need_open("push")  # before anything is forgotten of what was pushed
        what = f"push_rows {name!r}"
        encoding = row_encoding(what, codec)
        numbers, shape = ids_of(what, ids)
        given = source(gradients, dtype="float32")
        _check_rows(f"{what}: gradients", (*shape, row_dim(table)), given)
        grouped = self._group(numbers)
        pieces = written_pieces(what, table, grouped, self._context.client.ways, encoding)
        kept = self._context.coded.rows
        residuals, unique = None, b""
        if not is_dtype(encoding):
            await self._norm.settle(None)  # it tells what becomes of the last round's residuals
            unique = grouped.ids(0, grouped.begins[-1])
            residuals = kept.begin(table, unique, loss_scale=loss_scale)
        transfers = written(table, grouped, given.data, pieces, encoding, residuals)
        kept.drop_pending(table)
        with _saying_the_bound(table):
            await self._writing.send_rows(table, transfers)
        if residuals is not None:
            kept.pushed(table, unique, residuals)

    async def assign(self, name: str, ids: Array, rows: Array, *, codec: str | None) -> None:
        table = await self._context.schema.find_table(name)
        what = f"assign_rows {name!r}"
        encoding = row_encoding(what, codec, table.spec.dtype)
        numbers, shape = ids_of(what, ids)
        given = source(rows, dtype="float32")
        _check_rows(f"{what}: rows", (*shape, row_dim(table)), given)
        grouped = self._group(numbers)
        if grouped.begins[-1] != numbers.size:
            unique, counts = np.unique(numbers, return_counts=True)
            raise BadArgument(f"{what}: id {unique[counts > 1][0]} comes twice; a row can be assigned one value")
        ways = self._context.client.ways
        pieces = with_rows(written_pieces(what, table, grouped, ways, encoding))
        with _saying_the_bound(table):
            await self._writing.assign_rows(table, written(table, grouped, given.data, pieces, encoding))

    async def residuals(self, name: str) -> KeptBack | None:
        table = await self._context.schema.find_table(name)
        await self._norm.settle(None)  # it tells what becomes of the last round's residuals
        return self._context.coded.rows.kept_back(table)

    async def set_residuals(self, name: str, kept_back: KeptBack | None) -> None:
        table = await self._context.schema.find_table(name)
        if kept_back is not None:
            kept_back = _checked(f"set_row_residuals {name!r}", row_dim(table), kept_back)
        self._context.coded.rows.write(table, kept_back)

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
        self,
        name: str,
        ids: Array,
        out: Array | None,
        *,
        wait_s: float | None,
        hold: Hold | None = None,
        codec: str | None = None,
    ) -> Array:
        """`hold`: read as of that decision; None: the newest."""
        context = self._context
        table = await context.schema.find_table(name)
        what = f"pull_rows {name!r}"
        numbers, shape = ids_of(what, ids)
        result_shape = (*shape, row_dim(table))
        receiver = fresh(result_shape, "float32") if out is None else target(out)
        _check_rows(f"{what}: out", result_shape, receiver, ROW_DTYPES)
        encoding = row_encoding(what, codec, table.spec.dtype, receiver.dtype)
        grouped = self._group(numbers)
        cache = self._caches.of(table, encoding) if hold is None else None
        await self._norm.settle(wait_s)
        if cache is None:
            memory = np.empty(grouped.begins[-1] * payload_bytes(encoding, row_dim(table)), np.uint8)
            transfers = pulled(table, grouped, memory, context.client.ways, encoding)
        else:
            kept = KeptPull(cache, grouped, pulled_frames(table, grouped, context.client.ways, encoding))
            memory, transfers = kept.rows, kept.transfers()
        with context.forgetting_unknown([table]):
            answers = await context.client.pull_rows(transfers, wait_s=context.patience(wait_s), hold=hold)
        self._reading.num_bytes += sum(answer.table.payload_bytes for answer in answers)
        if cache is not None:
            kept.take()
        dtypes = _core.DTYPES[dtype_of(encoding)], _core.DTYPES[receiver.dtype]
        grouped.scatter(memory, row_dim(table), receiver.data, *dtypes)
        if receiver.finish is not None:
            receiver.finish()
        return receiver.result

    async def cache(self, name: str, max_bytes: int, *, codec: str | None) -> None:
        table = await self._context.schema.find_table(name)
        self._caches.keep(table, row_encoding(f"cache_rows {name!r}", codec, table.spec.dtype), max_bytes)

    async def cache_use(self, name: str) -> RowCacheUse:
        return self._caches.use_of(await self._context.schema.find_table(name))

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


ROW_CODECS = ("bf16", "fp16", "int8")


def row_encoding(what: str, codec: str | None, *dtypes: str) -> str:
    """What rows travel in: that codec, or the fewest bytes that lose nothing between rows in these dtypes. Raises
    BadArgument."""
    if codec is None or codec == "none":
        return "bfloat16" if "bfloat16" in dtypes else "float32"
    if codec in ROW_CODECS:
        return codec
    raise BadArgument(f"{what}: codec is {codec!r}; rows travel in none, {', '.join(ROW_CODECS)}")


def ids_of(what: str, value: Array) -> tuple[Ids, tuple[int, ...]]:
    """Returns ids as flat uint64, and the shape that they came in. Raises DTypeMismatch, BadArgument."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if is_masked(value):
        raise BadArgument(f"{what}: ids are masked; expected integers in [0, 2^64)")
    try:
        array = value if isinstance(value, np.ndarray) else _array_of(value)
    except ValueError:
        raise BadArgument(f"{what}: ids are lists of several lengths; expected integers in [0, 2^64)") from None
    if array.dtype.kind not in "iu":
        raise DTypeMismatch(f"{what}: ids are {array.dtype.name}; expected integers in [0, 2^64)")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise BadArgument(f"{what}: id {array.min()} is negative; expected ids in [0, 2^64)")
    return np.ascontiguousarray(array, dtype=np.uint64).reshape(-1), array.shape


def _array_of(value: Array) -> np.ndarray[Any, Any]:
    """The array of what is none, as a list. numpy makes numbers with a point of ids on both sides of 2^63."""
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.uint64)  # a list does not say what it has none of
    if array.dtype.kind not in "fO":
        return array
    each = np.asarray(value, dtype=object)
    are_ids = all(isinstance(one, (int, np.integer)) and 0 <= one < 1 << 64 for one in each.flat)
    return each.astype(np.uint64) if are_ids else array


def _checked(what: str, dim: int, kept_back: KeptBack) -> KeptBack:
    """What `row_residuals` gave, of a table of that dim. Raises DTypeMismatch, ShapeMismatch, BadArgument."""
    ids, (num_ids, *_) = ids_of(what, np.atleast_1d(kept_back.ids))
    residuals, ages = np.ascontiguousarray(kept_back.residuals), np.ascontiguousarray(kept_back.ages)
    _check_rows(f"{what}: residuals", (num_ids, dim), source(residuals, dtype="float32"))
    if ages.shape != (num_ids,):
        raise ShapeMismatch(f"{what}: expected ages of shape ({num_ids},), one of each id, got {ages.shape}")
    if ages.dtype != np.uint32:
        raise DTypeMismatch(f"{what}: expected ages of dtype uint32, got {ages.dtype.name}")
    return KeptBack(ids, residuals, ages)


def _check_rows(
    what: str, expected: Sequence[int], given: Source | Target, dtypes: Sequence[str] = ("float32",)
) -> None:
    if given.shape != tuple(expected):
        raise ShapeMismatch(f"{what}: expected shape {tuple(expected)}, of the ids and then (dim,), got {given.shape}")
    if given.dtype not in dtypes:
        raise DTypeMismatch(f"{what}: expected dtype {' or '.join(dtypes)}, got {given.dtype}; convert it first")
