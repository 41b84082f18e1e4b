"""The memory of a host on which all processes run: what a shard hands to its clients, and to its standby, comes at
once."""

from __future__ import annotations

from psstore import _core
from psstore.net.fd_server import MemoryServer, Wrapped
from psstore.wire.messages import Shared

PUSH_BYTES = 8 * (64 << 10)
"""Of one connection: so few frames have room there that some go over the stream."""

SHARED_FROM_BYTES = 1


class HostMemory:
    def __init__(self) -> None:
        self._values = _core.ValueArena()
        """No value is large enough to lie there."""
        self._lenders: dict[str, MemoryServer] = {}

    def lender(self) -> MemoryServer:
        """Of a process."""
        made = MemoryServer(self._values, push_bytes=PUSH_BYTES)
        self._lenders[made.name] = made
        return made

    def ended(self, lender: MemoryServer) -> None:
        """Its process is gone."""
        self._lenders.pop(lender.name, None)

    def borrow(self, offer: Shared) -> _core.ClientMemory | None:
        wrapped = self._visit(offer)
        if wrapped is None:
            return None
        values, pushes, control = wrapped.files
        memory = _core.ClientMemory(values=values, pushes=pushes, control=control)
        wrapped.mapped()
        return memory

    def see(self, offer: Shared, address: int) -> _core.SeenMemory | None:
        wrapped = self._visit(offer)
        if wrapped is None:
            return None
        memory = _core.SeenMemory(wrapped.files[0], address=address)
        wrapped.mapped()
        return memory

    def _visit(self, offer: Shared) -> Wrapped | None:
        lender = self._lenders.get(offer.address)
        taken = None if lender is None else lender.take(offer.ticket)
        return None if taken is None else taken.wrap()
