"""Residuals of rows: what codecs lost of the gradients of a table's rows, by id, which is added to the next gradients.

As those of tensors (push.py) they change once in a round, when it is known to count:

    settled ──push──► pending ──push again──► pending, made anew from settled
       ▲                 │
       └── counted ──────┴── not counted (late, skipped, not named in the commit, refused): dropped

`settled` is bounded, since ids are not: of what has no room, the rows that were pushed longest ago are forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Floats
from psstore.types import Tensor

MAX_RESIDUAL_BYTES = 256 << 20
"""Residuals that are kept of one table: 950,000 rows of 64. What is forgotten is one codec's loss of one gradient."""

BESIDE_A_ROW_BYTES = 24
"""Id, place in the index, and when it was pushed last."""


class _Pending(NamedTuple):
    """A push of rows in a codec, until its round is known to count."""

    ids: bytes
    residuals: Floats
    """(ids, dim), in units of the gradients that were pushed."""


class _TableResiduals:
    """The residuals of one table."""

    def __init__(self, dim: int) -> None:
        self.settled = _core.RowResiduals(dim, max(1, MAX_RESIDUAL_BYTES // (4 * dim + BESIDE_A_ROW_BYTES)))
        """In units of real gradients."""
        self.pending: _Pending | None = None
        self.loss_scale = 1.0
        """As the last round that counted was committed."""

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
        assert table.spec.rows is not None, "it is a table"
        dim = table.spec.rows.dim
        kept = self._tables.setdefault(table.id, _TableResiduals(dim))
        residuals: Floats = np.empty((len(ids) // 8, dim), np.float32)
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

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Drops the residuals of tables that are gone, or were made anew."""
        for tensor in tensors:
            self._tables.pop(tensor.id, None)
