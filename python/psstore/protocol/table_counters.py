"""Counters of single tables: what a shard tells of its rows, once for each table."""

from __future__ import annotations

from collections.abc import Mapping

from psstore import _core
from psstore.types import Tensor

MAX_TABLES = 64
"""How many tables have counters of their own: those that were created first. Each is a label of metrics."""


def table_counters(tensors: Mapping[int, Tensor], shard: _core.Shard) -> dict[str, int]:
    """'rows/NAME', 'row_bytes/NAME', 'rows_evicted/NAME' and 'rows_refused/NAME' of tables in their partitions here."""
    tables = sorted((number, tensor.spec.name) for number, tensor in tensors.items() if tensor.spec.rows is not None)
    if not tables:
        return {}
    stats = shard.row_stats()
    return {
        f"{counter}/{name}": count
        for number, name in tables[:MAX_TABLES]
        for counter, count in stats.get(number, {}).items()
    }
