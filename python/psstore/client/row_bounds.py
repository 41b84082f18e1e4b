"""What callers say of a table's bounds, as its definition has it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from psstore.errors import BadArgument
from psstore.types import RowsSpec, TensorSpec, record_bytes

INDEX_BYTES = 12
"""Most bytes of an index for each row: 5 of a place, of which 7 in 16 at least are taken."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The options of `create_table` about how many rows there may be; `operations.py` explains them."""

    max_rows: int | None = None
    max_bytes: int | None = None
    evict: str | None = None
    admit: str | None = None

    def bounded(self, spec: TensorSpec) -> TensorSpec:
        """A table with these bounds. Raises BadArgument for what says none; the spec is to be checked again."""
        assert spec.rows is not None, "it is a table"
        rows = _admitting(_evicting(spec.rows, self.evict), self.admit)
        spec = msgspec.structs.replace(spec, rows=rows)
        return msgspec.structs.replace(spec, rows=msgspec.structs.replace(rows, max_rows=self._max_rows(spec)))

    def _max_rows(self, spec: TensorSpec) -> int:
        """0: as many as come."""
        if self.max_bytes is None:
            if self.max_rows == 0:
                raise BadArgument("max_rows is 0; expected a number of rows, or None: as many as come")
            return self.max_rows or 0
        if self.max_rows is not None:
            raise BadArgument(f"max_rows {self.max_rows} and max_bytes {self.max_bytes}: expected one of them")
        row_bytes = record_bytes(spec) + INDEX_BYTES
        if self.max_bytes < row_bytes:
            raise BadArgument(f"max_bytes is {self.max_bytes}; a row of {spec.name!r} takes {row_bytes}")
        return self.max_bytes // row_bytes


def _evicting(rows: RowsSpec, evict: str | None) -> RowsSpec:
    if evict is None:
        return rows
    kind, _, decisions = evict.partition(":")
    if evict in ("lru", "lfu"):
        return msgspec.structs.replace(rows, evict=evict)
    if kind == "ttl" and decisions.isdecimal() and int(decisions) > 0:
        return msgspec.structs.replace(rows, evict=kind, ttl=int(decisions))
    raise BadArgument(f"evict is {evict!r}; expected 'lru', 'lfu', 'ttl:N' with N decisions, or None")


def _admitting(rows: RowsSpec, admit: str | None) -> RowsSpec:
    if admit is None:
        return rows
    kind, _, number = admit.partition(":")
    if kind == "after" and number.isdecimal() and int(number) > 0:
        return msgspec.structs.replace(rows, admit_after=int(number))
    if kind == "probability":
        try:
            return msgspec.structs.replace(rows, admit_probability=float(number))
        except ValueError:
            pass
    raise BadArgument(
        f"admit is {admit!r}; expected 'after:K' with K contributions, 'probability:P' with P in (0, 1], or None"
    )
