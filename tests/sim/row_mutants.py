"""Rules of rows broken on purpose, each in one place; see mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from psstore.checkpoint.bases import BaseChoice, Retention
from psstore.checkpoint.manifest import BaseRecord
from psstore.client import row_frames

from . import rows
from .mutants import Mutant, broken_in_core, method
from .server import ObservedShard


def partitions_without_rows_are_not_named() -> Any:
    pieces = row_frames.written_pieces
    return mock.patch.object(rows, "written_pieces", lambda *given: row_frames.with_rows(pieces(*given)))


def _load(change: Callable[..., tuple[int, list[Any]]]) -> Mutant:
    """A shard that begins from a checkpoint loads something else."""

    def load(self: ObservedShard, key: int, version: int, steps: int, parts: list[Any], num_rows: int = 0) -> None:
        steps, parts = change(steps, parts) if num_rows else (steps, parts)
        self.core.load(key, version, steps, parts, num_rows)

    return lambda: mock.patch.object(ObservedShard, "load", load, create=True)


def bases_are_not_kept(self: Retention, *, is_complete: bool, base: BaseRecord | None) -> None:
    self._left -= is_complete


def deltas_are_bases(self: BaseChoice, one: BaseRecord, base: BaseRecord | None) -> None:
    self._base = one


ROW_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "rows that come twice in a push are not summed": ("sync", broken_in_core("ROWS_ARE_SUMMED")),
    "partitions without rows are not named": ("async", partitions_without_rows_are_not_named),
    "rows go in the order in which they lie": ("async", broken_in_core("EVICTION_IS_BY_DECISIONS")),
    "rows are rounded by lots that a partition counts": ("async", broken_in_core("ROUNDING_IS_BY_DECISION")),
    "admission counts decisions": ("sync", broken_in_core("ADMISSION_COUNTS_ALL")),
    "an assigned row keeps its state": ("async", broken_in_core("ASSIGNED_STATE_IS_NEW")),
    "what is held has rows that were assigned since": ("ssp", broken_in_core("ASSIGNED_ROWS_END_HOLDS")),
    "a checkpoint is without what admission has counted": ("async", broken_in_core("COUNTS_ARE_WRITTEN")),
    "who reads rows as of a decision gets what is newest": ("async", broken_in_core("READS_ARE_AS_OF_THEIR_DECISION")),
    "rows that are held are not kept": ("async", broken_in_core("WHAT_IS_HELD_IS_KEPT")),
    "who keeps rows does not hear of those that were trained": ("async", broken_in_core("STEPPED_ROWS_ARE_MARKED")),
    "who keeps rows does not hear of those that were assigned": ("async", broken_in_core("ASSIGNED_ROWS_ARE_MARKED")),
    "who keeps rows does not hear of those that were evicted": ("async", broken_in_core("EVICTED_ROWS_ARE_MARKED")),
}
"""What is broken -> the mode in which it shows soonest, and how it is broken."""

ROW_FALL_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "rows begin anew when they were used": ("async", broken_in_core("USAGE_IS_LOADED")),
    "a table's steps are counted anew": ("async", _load(lambda steps, parts: (0, parts))),
    "what admission has counted is not loaded": ("async", _load(lambda steps, parts: (steps, parts[:1]))),
    "a delta is without rows that decisions changed": ("async", broken_in_core("STEPPED_ROWS_ARE_NOTED")),
    "a delta is without rows that were assigned": ("async", broken_in_core("ASSIGNED_ROWS_ARE_NOTED")),
    "a delta is without rows that took another's place": ("async", broken_in_core("NOTES_MOVE_WITH_ROWS")),
    "a base goes before its deltas": ("async", method(Retention, "stays", bases_are_not_kept)),
    "a delta is of a delta": ("async", method(BaseChoice, "written", deltas_are_bases)),
    "rows that were kept outlive the store that went back": ("async", broken_in_core("ROW_MARKS_ARE_THEIR_OWN")),
}
"""As above, and shown where the store goes back to checkpoints."""

ROW_STANDBY_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "standbys are not sent rows": ("sync", broken_in_core("ROWS_ARE_RECORDED")),
    "a new standby takes one codec of rows for another": ("async", broken_in_core("ROWS_KEEP_THEIR_CODEC")),
    "a new standby does not know what admission has counted": ("async", broken_in_core("COUNTS_ARE_FILLED_IN")),
    "a new standby does not know when rows were used": ("async", broken_in_core("USAGE_IS_LOADED")),
    "who leads is taken for who led": ("async", broken_in_core("ROW_MARKS_ARE_THEIR_OWN")),
}
"""As above, and shown where shards have standbys, of which some die."""
