"""Lists of rows: what a table has as of one decision, page by page from every shard at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.context import Context
from psstore.errors import BadHeader
from psstore.protocol.client import Hold, Transfer
from psstore.protocol.requests import Answer
from psstore.types import PARTITION_BITS, Tensor

IDS, RECORDS = 0, 1
"""What is listed: parts of a partition's entry."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


async def row_pages(
    context: Context, table: Tensor, *, what: int, row_bytes: int, hold: Hold, wait_s: float
) -> AsyncIterator[Bytes]:
    """Yields the table's rows as of that decision, (rows, row_bytes) at a time, in no order. `what`: IDS or RECORDS, of
    so many bytes each.

    Raises VersionGone, DeadlineExceeded."""
    listed = [0] * (1 << PARTITION_BITS)
    ways: dict[int, list[int]] = {}
    for partition, way in enumerate(context.client.ways.of(table)):
        ways.setdefault(way, []).append(partition)
    while ways:
        pages = [_Page(table, way, partitions, listed, what, row_bytes) for way, partitions in ways.items()]
        with context.forgetting_unknown([table]):
            answers = await context.client.list_rows(hold, [page.transfer() for page in pages], wait_s=wait_s)
        ways = {}
        for page, answer in zip(pages, answers, strict=True):
            left = page.take(answer, listed)
            if left:
                ways[page.way] = left
            yield page.rows


class _Page:
    """One answer of one shard: rows of some of its partitions, from where the last page ended."""

    def __init__(
        self, table: Tensor, way: int, partitions: list[int], listed: list[int], what: int, row_bytes: int
    ) -> None:
        self.way = way
        self.rows: Bytes = np.empty((0, row_bytes), np.uint8)
        asked = _core.SliceTable([(table.key(one), 0, _core.DTYPES["rows"]) for one in partitions])
        self._asked = asked.with_parts([what] * len(partitions)).with_versions([listed[one] for one in partitions])
        self._partitions = partitions
        self._row_bytes = row_bytes

    def transfer(self) -> Transfer:
        return Transfer(self.way, self._asked, self._make_room)

    def take(self, answer: Answer, listed: list[int]) -> list[int]:
        """Counts what came in `listed`; returns the partitions that have more. Raises BadHeader if nothing came."""
        left = []
        for one, size, num_rows in zip(
            self._partitions, answer.table.num_bytes(), answer.table.versions(), strict=True
        ):
            listed[one] += size // self._row_bytes
            if listed[one] < num_rows:
                left.append(one)
        if left and not len(self.rows):
            raise BadHeader("a list of rows was answered without a row, and there are more")
        return left

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for parts of rows."""
        sizes = table.num_bytes()
        if len(sizes) != len(self._partitions) or any(size % self._row_bytes for size in sizes):
            raise BadHeader(f"a list of rows of {self._row_bytes} bytes was answered with {sizes}")
        self.rows = np.empty((sum(sizes) // self._row_bytes, self._row_bytes), np.uint8)
        memory = self.rows.reshape(-1)
        pieces = [memory[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(pieces, writable=True)
