"""Values that are read where they lie in the shards' memory, for as long as they are borrowed.

A shard lends a value until it is told that it was read, and takes steps elsewhere meanwhile. What a loan's arrays lie
in is a view (csrc/shm/value_view.h) that shows each slice at its place in its tensor. What a shard does not lend, as
it is on another machine, or small, is received into the view: to the reader it is all the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from psstore import _core
from psstore.client.context import Context
from psstore.client.layout import Layout, OneVersion
from psstore.client.reading import Reading
from psstore.errors import StoreUnreachable
from psstore.protocol.client import Transfer
from psstore.protocol.holds import Hold
from psstore.protocol.sharing import Borrower, Lease

Borrowed = dict[str, npt.NDArray[Any]]
"""Read-only arrays, by name."""

MAPPED_FROM_BYTES = 64 << 10
"""Bytes from which on a tensor begins at a page, as what is mapped does. Smaller values are not lent
(csrc/table/gather.h)."""

GAP_BYTES = 64
"""Smaller ones begin at a cache line."""

MOST_IDLE = 2
"""Views of a layout that are kept. Who borrows again and again while steps are taken finds each value in one of two
places (csrc/table/slot.h): mapping 100 MB anew takes about as long as copying them, 20 ms, and finding them 2."""


class View:
    """Memory that shows a layout's tensors, for one loan at a time."""

    def __init__(self, layout: Layout) -> None:
        begins = _begins(layout)
        parts = [
            (begins[one.position] + one.begin, one.end - one.begin) for frame in layout.frames for one in frame.ranges
        ]
        self.values = _core.ValueView(parts)
        whole = np.frombuffer(self.values, np.uint8)
        self.arrays: Borrowed = {
            tensor.spec.name: np.ndarray(tensor.spec.shape, tensor.spec.dtype, whole, begin)
            for tensor, begin in zip(layout.tensors, begins, strict=True)
        }


class BorrowedPull:
    """The values that one pull brings to borrow."""

    def __init__(self, layout: Layout, idle: list[View]) -> None:
        """`idle`: views of the layout. The loan takes one, and gives it back."""
        self.leases: list[Lease] = []
        self.is_whole = False
        """True if all has come: nothing will be received into the view any more."""
        self._layout = layout
        self._idle = idle
        self._view: View | None = None
        self._is_over = False

    @property
    def view(self) -> View:
        """The loan's view."""
        if self._view is None:
            self._view = self._idle.pop() if self._idle else View(self._layout)
        return self._view

    def transfers(self) -> list[Transfer]:
        transfers, first = [], 0
        for frame in self._layout.frames:
            transfers.append(Transfer(frame.way, frame.table, Place(self, first, len(frame.ranges))))
            first += len(frame.ranges)
        return transfers

    def show(self, memory: _core.ClientMemory, table: _core.SliceTable, first: int, lease: Lease) -> bool:
        """Shows leased values in the view. False: the loan is over."""
        if self._is_over:
            return False
        if self._view is None:
            self._view = self._most_like(memory, table, first)
        self.view.values.show(memory, table, first)
        self.leases.append(lease)
        return True

    def _most_like(self, memory: _core.ClientMemory, table: _core.SliceTable, first: int) -> View:
        """The view that shows most of this already. A new one, if none shows any and there may be more."""
        self._idle.sort(key=lambda view: view.values.shown(memory, table, first))
        is_like = self._idle and self._idle[-1].values.shown(memory, table, first) > 0
        return self._idle.pop() if is_like or len(self._idle) == MOST_IDLE else View(self._layout)

    def end(self) -> list[Lease]:
        """Ends the loan. Returns the leases to be ended, too."""
        self._is_over = True
        if self._view is not None and self.is_whole:
            self._idle[:] = [*self._idle, self._view][-MOST_IDLE:]
        leases, self.leases, self._view = self.leases, [], None
        return leases


class Place(Borrower):
    """The place of one frame in a loan's view."""

    def __init__(self, loan: BorrowedPull, first: int, count: int) -> None:
        self._loan = loan
        self._first = first
        self._count = count

    def __call__(self, table: _core.SliceTable) -> _core.Segments:
        return self._loan.view.values.own(self._first, self._count)

    def borrow(self, memory: _core.ClientMemory, table: _core.SliceTable, lease: Lease) -> bool:
        return self._loan.show(memory, table, self._first, lease)


class Debt:
    """The loan of one caller, if it has one."""

    def __init__(self) -> None:
        self.loan: BorrowedPull | None = None


class Borrowing:
    """The loans of one store. Used on the store's loop only."""

    def __init__(self, context: Context, reading: Reading) -> None:
        self._context = context
        self._reading = reading
        self._idle: WeakKeyDictionary[Layout, list[View]] = WeakKeyDictionary()

    async def layout(self, names: Sequence[str]) -> Layout:
        """The layout of what is borrowed by these names. Raises UnknownTensor."""
        tensors = await self._context.schema.find(names)
        dtypes = [tensor.spec.dtype for tensor in tensors]
        return await self._context.layout(tensors, dtypes, pull=True, place=None)

    async def borrow(
        self, debt: Debt, layout: Layout, wait_s: float | None, hold: Hold | OneVersion | None = None
    ) -> Borrowed:
        """Returns arrays that are borrowed until `end`, which the caller calls also if this fails; what the debt was of
        before is over. All are of one connection to each shard: if one is lost on the way, the loan is begun again.

        `hold`: borrow as of that decision, or find out whether all that comes is of one; None: each as it is."""
        while True:
            self.end(debt)
            loan = debt.loan = BorrowedPull(layout, self._idle.setdefault(layout, []))
            await self._reading.receive(layout, loan.transfers(), wait_s, hold)
            loan.is_whole = True
            if self._lost(loan) is None:
                return dict(loan.view.arrays)

    async def settle(self, debt: Debt) -> None:
        """Ends a loan. Raises StoreUnreachable if the values may have changed while they were borrowed."""
        lost = None if debt.loan is None else self._lost(debt.loan)
        self.end(debt)
        if lost is not None:
            raise StoreUnreachable(
                f"the connection to the shard at {lost} was lost while its values were borrowed: they may have changed"
                " since, and what was made of them may be wrong; borrow them again",
                address=lost,
            )

    def end(self, debt: Debt) -> None:
        """Ends a loan. Does nothing the second time."""
        if debt.loan is not None:
            self._context.client.end_leases(debt.loan.end())
            debt.loan = None

    def _lost(self, loan: BorrowedPull) -> str | None:
        """Returns the address of a shard that may have taken steps in what it lent; None: there is none."""
        for lease in loan.leases:
            lender = self._context.client.lender(lease)
            if not lender.holds(lease):
                return lender.address
        return None


def _begins(layout: Layout) -> list[int]:
    """Returns the offset of each tensor in the view: one after the other."""
    sizes = [int(np.prod(t.spec.shape, dtype=np.int64)) * np.dtype(t.spec.dtype).itemsize for t in layout.tensors]
    begins, end = [], 0
    for size in sizes:
        gap = mmap.PAGESIZE if size >= MAPPED_FROM_BYTES else GAP_BYTES
        begins.append(-(-end // gap) * gap if size else end)  # behind a gap it would begin beyond the memory's end
        end = begins[-1] + size
    return begins
