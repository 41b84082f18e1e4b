"""What one connection shares of a device with its shard: memory to push through, and the blocks in which values lie.

`IpcPeer` is a shard in another process: neither can wait on the device for what the other has it do, so that the host
sees each copy done before the other side hears of it. `InProcessPeer` is a shard in this process: fences order its
work and ours, and the host goes on.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from psstore import _core
from psstore.errors import OutOfMemory, PsstoreError
from psstore.net.fd_client import borrow_pushes
from psstore.protocol.sharing import OwnShard
from psstore.wire.messages import Block, Shared

_log = logging.getLogger("psstore.client")


class DevicePeer(ABC):
    """What one connection shares of a device with its shard."""

    def __init__(self, device: _core.Device) -> None:
        self.device = device
        self.blocks = _core.BorrowedDevice(device)
        self.arenas: list[_core.DevicePushes] = []
        """To push through."""
        self.is_full = False
        """There is no more to be had."""

    @property
    def num_bytes(self) -> int:
        """Size of the arenas together."""
        return sum(arena.nbytes for arena in self.arenas)

    def take(self, num_bytes: int) -> _core.PushRoom | None:
        return next((room for arena in self.arenas if (room := arena.take(num_bytes)) is not None), None)

    @abstractmethod
    async def settle(self) -> None:
        """Waits, if there is no room, for what will make some, before more memory is taken."""

    @abstractmethod
    async def grow(self, push_bytes: int) -> bool:
        """One more arena. False: there is none to be had."""

    @abstractmethod
    def learn(self, blocks: Sequence[Block]) -> bool:
        """Values lie there, too. False: they are out of reach, and so is all of it from now on."""

    @abstractmethod
    def catch_up(self, queue: _core.Queue) -> None:
        """What is queued from here on finds the values that the shard has said are there."""

    @abstractmethod
    def hand_over(self, queue: _core.Queue) -> bool:
        """The shard may use the memory that the queue writes or reads by now. False: when the host has seen it done."""


class IpcPeer(DevicePeer):
    """A shard in another process."""

    def __init__(self, device: _core.Device, ask: Callable[[int], Awaitable[Shared]]) -> None:
        """`ask`: the shard, for an arena of so many bytes."""
        super().__init__(device)
        self._ask = ask

    async def settle(self) -> None:
        """Nothing: whoever is told of new values may count on it that what it had pushed is free."""

    async def grow(self, push_bytes: int) -> bool:
        arena = borrow_pushes(await self._ask(push_bytes), self.blocks)
        if arena is not None:
            self.arenas.append(arena)
        return arena is not None

    def learn(self, blocks: Sequence[Block]) -> bool:
        try:
            for block in blocks:
                self.blocks.add_block(block.address, block.num_bytes, block.handle)
        except PsstoreError as error:
            _log.warning("no shared memory with the shard: %s; its socket is used instead", error)
            return False
        return True

    def catch_up(self, queue: _core.Queue) -> None:
        """Nothing to do: the shard has waited."""

    def hand_over(self, queue: _core.Queue) -> bool:
        return False


class InProcessPeer(DevicePeer):
    """A shard in this process."""

    def __init__(self, device: _core.Device, own: OwnShard) -> None:
        super().__init__(device)
        self._shard, self._protocol = own
        self._last_block = 0

    async def settle(self) -> None:
        """The host is a step ahead of the device, which still reads what was pushed for the one before."""
        await asyncio.to_thread(self._shard.work_so_far().wait)
        self._shard.flush()

    async def grow(self, push_bytes: int) -> bool:
        try:
            arena, address = self._shard.make_push_arena(push_bytes)
        except OutOfMemory:
            return False
        self._protocol.share(arena)
        self._look_around()
        _, control = arena.filenos()
        self.arenas.append(_core.DevicePushes(self.blocks, control=control, address=address, num_bytes=arena.nbytes))
        return True

    def learn(self, blocks: Sequence[Block]) -> bool:
        """Never called: it looks for itself."""
        return True

    def catch_up(self, queue: _core.Queue) -> None:
        self._look_around()
        queue.wait_for(self._shard.work_so_far())

    def hand_over(self, queue: _core.Queue) -> bool:
        self._shard.work_after(queue.record())
        return True

    def _look_around(self) -> None:
        for block in self._shard.shared_blocks(self._last_block):
            self.blocks.add_own_block(block)
            self._last_block = block.number
