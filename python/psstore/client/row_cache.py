"""Rows that were pulled, kept in this process: pulled again, those come alone that may have changed since.

What a pull gives is what it would have given without: a row that is here is asked for by the change that it is as of,
and its shard sends it unless it has been the same since (docs/wire.md, 'Rows that a reader keeps').
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.row_bounds import INDEX_BYTES
from psstore.client.row_frames import RowFrame, row_dim
from psstore.codec.codecs import dtype_of, payload_bytes
from psstore.errors import BadArgument, BadHeader
from psstore.protocol.client import Transfer
from psstore.types import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MOST_ROWS = 1 << 31
"""As many as there may be, whatever memory they may take: their numbers have 32 bits."""


class RowCacheUse(NamedTuple):
    """What a cache of rows has been good for since it began."""

    num_rows: int
    """Rows that are kept now."""
    asked_rows: int
    """Rows that pulls have asked for, each once in a pull."""
    unchanged_rows: int
    """Rows that were asked for, kept, and had not changed, so that they did not travel."""
    saved_bytes: int
    """Bytes of the rows that did not travel."""

    @property
    def hit_rate(self) -> float:
        """The part of the rows asked for that did not travel; 0 before any was."""
        return self.unchanged_rows / self.asked_rows if self.asked_rows else 0.0


class RowCache:
    """Rows of one table that travelled in one encoding, so many at most."""

    def __init__(self, table: Tensor, encoding: str, max_bytes: int) -> None:
        """Raises BadArgument for less memory than a row takes."""
        self.table = table
        self.encoding = encoding
        self.max_bytes = max_bytes
        row_bytes = payload_bytes(encoding, row_dim(table))
        kept_bytes = _core.RowCache.record_bytes(row_bytes) + INDEX_BYTES
        if max_bytes < kept_bytes:
            raise BadArgument(f"max_bytes is {max_bytes}; a row of {table.spec.name!r} takes {kept_bytes}")
        self._row_bytes = row_bytes
        self._max_rows = min(max_bytes // kept_bytes, MOST_ROWS)

    @cached_property
    def rows(self) -> _core.RowCache:
        """The rows themselves, which take memory from the first pull on."""
        return _core.RowCache(self._row_bytes, self._max_rows, len(self.table.shards))

    @property
    def use(self) -> RowCacheUse:
        rows = self.rows
        unchanged = rows.num_unchanged
        return RowCacheUse(rows.num_rows, rows.num_taken, unchanged, unchanged * rows.row_bytes)


class RowCaches:
    """What one store keeps of rows, by the names of tables."""

    def __init__(self) -> None:
        self._by_name: dict[str, RowCache] = {}

    def keep(self, table: Tensor, encoding: str, max_bytes: int) -> None:
        """Keeps rows of the table that are pulled in that encoding; what is kept of it stays if nothing else is said
        than before. 0 bytes: none any more. Raises BadArgument."""
        name = table.spec.name
        if max_bytes == 0:
            self._by_name.pop(name, None)
            return
        made = RowCache(table, encoding, max_bytes)
        there = self.of(table, encoding)
        if there is None or there.max_bytes != max_bytes:
            self._by_name[name] = made

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the rows of tables that are gone. Of one that is created again by the same name they are kept as they
        were of the one before."""
        for tensor in tensors:
            there = self._by_name.get(tensor.spec.name)
            if there is not None and there.table.id == tensor.id:
                self._by_name[tensor.spec.name] = RowCache(tensor, there.encoding, there.max_bytes)

    def use_of(self, table: Tensor) -> RowCacheUse:
        """Raises BadArgument where no rows of the table are kept."""
        name = table.spec.name
        if name not in self._by_name:
            raise BadArgument(f"no rows of {name!r} are kept here; have them kept by cache_rows({name!r}, max_bytes)")
        there = self.of(table, self._by_name[name].encoding)
        assert there is not None, "it has that encoding"
        return there.use

    def of(self, table: Tensor, encoding: str) -> RowCache | None:
        """The cache of that table's rows in that encoding; None: they are not kept. A table that was dropped and
        created again is another one."""
        there = self._by_name.get(table.spec.name)
        if there is None or there.encoding != encoding:
            return None
        if there.table.id != table.id:
            there = self._by_name[table.spec.name] = RowCache(table, encoding, there.max_bytes)
        return there


class KeptPull:
    """A pull of rows of which some are kept."""

    def __init__(self, cache: RowCache, grouped: _core.GroupedIds, frames: Sequence[RowFrame]) -> None:
        """`frames`: of all the grouped ids."""
        num_ids = grouped.begins[-1]
        self.rows: Bytes = np.empty(num_ids * cache.rows.row_bytes, np.uint8)
        """The rows of the grouped ids, one after the other, once `take` has returned."""
        self._cache = cache
        self._grouped = grouped
        self._changes = np.empty(num_ids, np.uint32)
        cache.rows.read(grouped, self.rows, self._changes)
        self._asked = [_AskedFrame(frame) for frame in frames]

    def transfers(self) -> list[Transfer]:
        return [one.transfer(self._cache, self._grouped, self._changes) for one in self._asked]

    def take(self) -> None:
        """Completes the rows by what came, and keeps them. Raises BadHeader for what can't be an answer."""
        for asked in self._asked:
            if not self._cache.rows.take(self._grouped, asked.pieces, self.rows, self._changes, asked.came):
                raise BadHeader(
                    f"{asked.came.nbytes} bytes came of rows of {self._cache.table.spec.name!r} of which some are here:"
                    " no answer to what was asked has so many, or names so few rows"
                )


class _AskedFrame:
    """One request of a pull, and memory for what comes."""

    def __init__(self, frame: RowFrame) -> None:
        self._frame = frame
        self.pieces = [(partition, begin, end, 0) for _, partition, begin, end in frame.pieces]
        """(partition, begin, end, bytes that came) of each."""
        self.came: Bytes = np.empty(0, np.uint8)
        """What came of all pieces, one after the other."""

    def transfer(self, cache: RowCache, grouped: _core.GroupedIds, changes: Any) -> Transfer:
        dtype = _core.DTYPES[dtype_of(cache.encoding)] | _core.CHANGES_BIT
        question = cache.rows.question(grouped, self.pieces, changes)
        return Transfer(self._frame.way, self._frame.pull_table(cache.table, dtype), self._make_room, question)

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for another number of pieces than were asked for."""
        sizes = table.num_bytes()
        if len(sizes) != len(self.pieces):
            raise BadHeader(f"a pull of {len(self.pieces)} partitions was answered with {len(sizes)}")
        self.pieces = [(*one[:3], size) for one, size in zip(self.pieces, sizes, strict=True)]
        self.came = np.empty(sum(sizes), np.uint8)
        ranges = [self.came[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(ranges, writable=True)
