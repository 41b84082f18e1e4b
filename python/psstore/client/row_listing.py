"""Lists of rows: what a table has as of one decision, page by page from every shard at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from psstore import _core
from psstore.client.context import Context
from psstore.errors import BadHeader
from psstore.partition.packing import FRAME_BYTES
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.requests import Answer
from psstore.types import Tensor

IDS, RECORDS = 0, 1
"""What is listed: parts of a partition's entry."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


async def row_pages(
    context: Context, table: Tensor, *, what: int, row_bytes: int, hold: Hold, wait_s: float
) -> AsyncIterator[Bytes]:
    """Yields the table's rows as of that decision, (rows, row_bytes) at a time, in no order. `what`: IDS or RECORDS, of
    so many bytes each.

    Raises VersionGone, DeadlineExceeded."""
    ways: dict[int, list[_Listed]] = {}
    for partition, way in enumerate(context.client.ways.of(table)):
        ways.setdefault(way, []).append(_Listed(table.key(partition)))
    while ways:
        pages = [_Page(way, _fitting(of_way, row_bytes), what, row_bytes) for way, of_way in ways.items()]
        with context.forgetting_unknown([table]):
            answers = await context.client.list_rows(hold, [page.transfer() for page in pages], wait_s=wait_s)
        for page, answer in zip(pages, answers, strict=True):
            page.take(answer)
            yield page.rows
        ways = {way: left for way, of_way in ways.items() if (left := [one for one in of_way if one.num_left != 0])}


@dataclass
class _Listed:
    """A partition, as far as it was listed."""

    key: int
    num_listed: int = 0
    num_left: int | None = None
    """None: its shard has not been asked."""


def _fitting(partitions: list[_Listed], row_bytes: int) -> list[_Listed]:
    """The first ones, whose rows fill a frame; all that nobody knows how many rows they have. A shard looks at all of a
    partition that it is asked for."""
    known = (row_bytes * (one.num_left or 0) for one in partitions)
    count = sum(num_bytes < FRAME_BYTES for num_bytes in accumulate(known, initial=0))
    return partitions[:count]


class _Page:
    """One answer of one shard: rows of some of its partitions, from where the last page ended."""

    def __init__(self, way: int, partitions: list[_Listed], what: int, row_bytes: int) -> None:
        self.way = way
        self.rows: Bytes = np.empty((0, row_bytes), np.uint8)
        asked = _core.SliceTable([(one.key, 0, _core.DTYPES["rows"]) for one in partitions])
        self._asked = asked.with_parts([what] * len(partitions)).with_versions([one.num_listed for one in partitions])
        self._partitions = partitions
        self._row_bytes = row_bytes

    def transfer(self) -> Transfer:
        return Transfer(self.way, self._asked, self._make_room)

    def take(self, answer: Answer) -> None:
        """Notes what came. Raises BadHeader if nothing did, and there is more."""
        table = answer.table
        for one, size, num_rows in zip(self._partitions, table.num_bytes(), table.versions(), strict=True):
            one.num_listed += size // self._row_bytes
            one.num_left = max(0, num_rows - one.num_listed)
        if any(one.num_left for one in self._partitions) and not len(self.rows):
            raise BadHeader("a list of rows was answered without a row, and there are more")

    def _make_room(self, table: _core.SliceTable) -> _core.Segments:
        """Raises BadHeader for parts of rows."""
        sizes = table.num_bytes()
        if len(sizes) != len(self._partitions) or any(size % self._row_bytes for size in sizes):
            raise BadHeader(f"a list of rows of {self._row_bytes} bytes was answered with {sizes}")
        self.rows = np.empty((sum(sizes) // self._row_bytes, self._row_bytes), np.uint8)
        memory = self.rows.reshape(-1)
        pieces = [memory[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
        return _core.Segments(pieces, writable=True)
