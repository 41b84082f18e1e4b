"""Residuals of rows: what codecs lost of the gradients of a table's rows, by id, which is added to the next gradients.

As those of tensors (push.py) they change once in a round, when it is known to count:

    settled ──push──► pending ──push again──► pending, made anew from settled
       ▲                 │
       └── counted ──────┴── not counted (late, skipped, not named in the commit, refused): dropped

`settled` is bounded, since ids are not: of what has no room, the rows that were pushed longest ago are forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Floats
from psstore.types import Tensor

MAX_RESIDUAL_BYTES = 256 << 20
"""Residuals that are kept of one table: 950,000 rows of 64. What is forgotten is one codec's loss of one gradient."""

BESIDE_A_ROW_BYTES = 24
"""Id, place in the index, and when it was pushed last."""


class KeptBack(NamedTuple):
    """What codecs have lost so far of the gradients of a table's rows."""

    ids: np.ndarray[Any, np.dtype[np.uint64]]
    """In no order, each once."""
    residuals: Floats
    """(ids, dim), in units of gradients without a loss scale."""
    ages: np.ndarray[Any, np.dtype[np.uint32]]
    """How many pushes to the table ago each was pushed; the oldest are forgotten first."""


class _Pending(NamedTuple):
    """A push of rows in a codec, until its round is known to count."""

    ids: bytes
    residuals: Floats
    """(ids, dim), in units of the gradients that were pushed."""


class _TableResiduals:
    """The residuals of one table."""

    def __init__(self, table: Tensor) -> None:
        assert table.spec.rows is not None, "it is a table"
        self.dim = dim = table.spec.rows.dim
        self.settled = _core.RowResiduals(dim, max(1, MAX_RESIDUAL_BYTES // (4 * dim + BESIDE_A_ROW_BYTES)))
        """In units of real gradients."""
        self.pending: _Pending | None = None
        self.loss_scale = 1.0
        """As the last round that counted was committed."""

    def kept_back(self) -> KeptBack:
        num_rows = self.settled.num_rows
        kept = KeptBack(
            np.empty(num_rows, np.uint64), np.empty((num_rows, self.dim), np.float32), np.empty(num_rows, np.uint32)
        )
        self.settled.copy(*kept)
        return kept

    def settle(self, *, counted: bool, loss_scale: float) -> None:
        if counted and self.pending is not None:
            self.pending.residuals[:] /= np.float32(loss_scale)
            self.settled.write(self.pending.ids, self.pending.residuals)
            self.loss_scale = loss_scale
        self.pending = None


class RowFeedback:
    """The residuals of the tables of one client. Used on its loop only."""

    def __init__(self) -> None:
        self._tables: dict[int, _TableResiduals] = {}

    def begin(self, table: Tensor, ids: bytes, *, loss_scale: float | None) -> Floats:
        """Residuals of these ids, (ids, dim), for a push to add, and to leave there what it loses. `loss_scale`: of its
        gradients; None: that of the last."""
        kept = self._tables.setdefault(table.id, _TableResiduals(table))
        residuals: Floats = np.empty((len(ids) // 8, kept.dim), np.float32)
        kept.settled.read(ids, residuals)
        residuals *= np.float32(kept.loss_scale if loss_scale is None else loss_scale)
        return residuals

    def pushed(self, table: Tensor, ids: bytes, residuals: Floats) -> None:
        """Notes that a push in a codec is whole, and what it lost."""
        self._tables[table.id].pending = _Pending(ids, residuals)

    def drop_pending(self, table: Tensor) -> None:
        """Drops what was encoded of the table in this round."""
        kept = self._tables.get(table.id)
        if kept is not None:
            kept.pending = None

    def settle(self, counted: Collection[int], *, loss_scale: float) -> None:
        """Ends a round in which contributions to these tensors counted. `loss_scale`: as it was committed."""
        for table_id, kept in self._tables.items():
            kept.settle(counted=table_id in counted, loss_scale=loss_scale)

    def kept_back(self, table: Tensor) -> KeptBack | None:
        """A copy of what is settled of the table; None: nothing."""
        kept = self._tables.get(table.id)
        return None if kept is None or kept.settled.num_rows == 0 else kept.kept_back()

    def write(self, table: Tensor, kept_back: KeptBack | None) -> None:
        """Makes this what is settled of the table; None: nothing. Raises BadArgument, OutOfMemory; nothing has changed
        then."""
        if kept_back is None:
            self._tables.pop(table.id, None)
            return
        kept = _TableResiduals(table)
        kept.settled.load(*kept_back)
        self._tables[table.id] = kept

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the residuals of tables that are gone, or were made anew."""
        for tensor in tensors:
            self._tables.pop(tensor.id, None)
