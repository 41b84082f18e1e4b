"""Which checkpoints of a store are deltas, of which base, and which of them stay.

Rules alone, which touch no storage: a place of checkpoints carries them out, and so do simulations.
"""

from __future__ import annotations

from collections.abc import Iterable

from psstore.checkpoint.manifest import BaseRecord


class BaseChoice:
    """Chooses what the next checkpoint is a delta of: the last one with all rows that this store has written. A store
    knows only of its own that its shards, as many as they are, have noted what has changed since."""

    def __init__(self, full_every: int) -> None:
        """`full_every`: of so many that are written one has all rows."""
        self._full_every = full_every
        self._base: BaseRecord | None = None
        self._num_deltas = 0
        """Deltas of that one that there are."""

    def base_for(self, version: int, *, has_rows: bool) -> BaseRecord | None:
        """The base of a checkpoint of this version that begins now; None: it is to have all rows. `has_rows`: there are
        tables."""
        base = self._base
        if base is None or not has_rows or self._num_deltas + 1 >= self._full_every or base.version >= version:
            return None
        return base

    def written(self, one: BaseRecord, base: BaseRecord | None) -> None:
        """That checkpoint is there, with all rows or as a delta of `base`."""
        self._num_deltas += 1
        if base is None:
            self._base, self._num_deltas = one, 0

    def lost(self) -> None:
        """The base is not there any more: the next one has all rows."""
        self._base = None


class Retention:
    """Chooses which of the checkpoints at a place stay. Asked from the newest to the oldest."""

    def __init__(self, keep: int, bases: Iterable[BaseRecord | None]) -> None:
        """`keep`: how many complete ones there may be, beside the bases of those that stay. `bases`: of what is being
        written."""
        self._left = keep
        self._bases = {base.version for base in bases if base is not None}

    def may_stay(self, version: int) -> bool:
        """Whether it stays if it is more than what a dead writer has left."""
        return self._left > 0 or version in self._bases

    def stays(self, *, is_complete: bool, base: BaseRecord | None) -> None:
        """The one that was asked for stays, and with it what it is a delta of."""
        if base is not None:
            self._bases.add(base.version)
        self._left -= is_complete
