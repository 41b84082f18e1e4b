"""The GPU paths between processes: device to device, to and from shards that live on the device of the caller's arrays.

     array ──copy──► memory in the shard's push arena ··frame says where··► shard
     array ◄──copy── where the shard's value lies     ◄··frame says where·· shard

A connection shares a device with its shard in a `DevicePeer`, and loses that when it ends. A shard in another process
is an `IpcPeer`: neither process can wait on the device for what the other has it do. So a frame is sent when the host
has seen its copy done, and a value is given back when the host has seen it read. A shard in this process is an
`InProcessPeer`: fences order its work and ours, and the host goes on.

Only psstore.client.device uses this file, which tests/test_imports.py holds.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from psstore import _core
from psstore.client.device.arrays import OnDevice
from psstore.client.device.batches import Batch
from psstore.client.layout import asking
from psstore.errors import OutOfMemory, PsstoreError
from psstore.net.fd_client import borrow_pushes
from psstore.protocol.client import Client, Transfer
from psstore.protocol.requests import Answer
from psstore.protocol.session import Session
from psstore.protocol.sharing import Landing, Lease, Near, OwnShard
from psstore.wire.messages import Block, Shared

_log = logging.getLogger("psstore.client")

SMALLEST_ARENA_BYTES = 1 << 20
"""First arena to push through. It is of the device's memory, and gets more by half when a frame finds no room."""


class PeerDirectory:
    """The shards of a store that share devices with this process. Used on the store's loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asking = asyncio.Lock()

    async def ways(self, device: _core.Device) -> frozenset[int]:
        """The ways to shards that share the device."""
        peers = [await self._peer(way, device) for way in range(len(self._client.sessions))]
        return frozenset(way for way, peer in enumerate(peers) if peer is not None)

    async def buffer(
        self, batch: Batch, device: _core.Device, *, fetch: Callable[[Batch], _core.Segments]
    ) -> SharedBuffer | None:
        """Memory that the batch's shard shares, for its one frame; None: there is none. `fetch`: copies the batch to
        main memory, and waits for the device."""
        way = batch.frames[0].way
        peer = await self._peer(way, device)
        if peer is None:
            return None
        room = peer.take(batch.num_bytes)
        if room is None:
            await peer.settle()
            room = peer.take(batch.num_bytes)
        if room is None and not peer.is_full:
            async with self._asking:
                await self._ask(self._client.sessions[way], device, max(peer.num_bytes // 2, batch.num_bytes))
            room = peer.take(batch.num_bytes)
        return SharedBuffer(peer, room, fetch) if room is not None else None

    async def read_leased(
        self,
        queue: _core.Queue,
        answer: Answer,
        places: Sequence[tuple[int, int]],
        *,
        done: Callable[[object], Awaitable[None]],
    ) -> bool:
        """Queues copies of an answer's values, from where they lie to `places`, and ends the lease, also if it fails or
        is cancelled. False: they are out of reach, or may have changed meanwhile, and have to be asked for again.
        `done`: waits until all that is queued is done; its argument lives until then."""
        lease = answer.lease
        assert lease is not None, "the values came otherwise"
        session = self._client.lender(lease)
        peer = session.near if lease.connection == session.connection else None
        try:
            if isinstance(peer, DevicePeer):
                peer.wait_for_values(queue)
                peer.blocks.read(queue, answer.table, places)
                if not peer.hand_over(queue):
                    await done(peer)
        finally:
            # Also of a read that is given up: the shard cuts a connection that keeps values for long.
            is_held = self.end_lease(lease)
        return is_held and isinstance(peer, DevicePeer)

    def end_lease(self, lease: Lease) -> bool:
        """See `Session.end_lease`."""
        return self._client.end_leases([lease])

    # ---- how ----

    async def _peer(self, way: int, device: _core.Device) -> DevicePeer | None:
        """What that device shares with the shard of that way; None: nothing, its values go over the stream."""
        session = self._client.sessions[way]
        if session.device != device.identity:
            return None
        if session.near is None:
            async with self._asking:
                if session.near is None:
                    await self._ask(session, device, SMALLEST_ARENA_BYTES)
        return session.near if isinstance(session.near, DevicePeer) else None

    async def _ask(self, session: Session, device: _core.Device, push_bytes: int) -> None:
        """Asks a shard for one more arena to push through. If there is none, all stays as it is, and no more is asked
        for."""
        peer = session.near if isinstance(session.near, DevicePeer) else self._made(session, device)
        connection = session.connection
        grew = await peer.grow(push_bytes)
        if connection != session.connection:
            return
        if grew:
            session.near = peer
        elif session.near is None:
            session.device = b""
        else:
            peer.is_full = True

    def _made(self, session: Session, device: _core.Device) -> DevicePeer:
        if session.own_shard is not None:
            return InProcessPeer(device, session.own_shard)
        return IpcPeer(device, lambda push_bytes: self._client.share(session, push_bytes=push_bytes))


# ---- peers ------------------------------------------------------------------------------------------


class DevicePeer(ABC):
    """What one connection shares of a device with its shard: arenas to push through, and blocks in which values lie."""

    def __init__(self, device: _core.Device) -> None:
        self.device = device
        self.blocks = _core.BorrowedDevice(device)
        self.arenas: list[_core.DevicePushes] = []
        """Memory to push through."""
        self.is_full = False
        """True once the shard has no more arenas to give."""

    @property
    def num_bytes(self) -> int:
        """Size of the arenas together."""
        return sum(arena.nbytes for arena in self.arenas)

    def take(self, num_bytes: int) -> _core.PushRoom | None:
        """Room for a frame in one of the arenas; None: all are in use."""
        return next((room for arena in self.arenas if (room := arena.take(num_bytes)) is not None), None)

    @abstractmethod
    async def settle(self) -> None:
        """Waits for what will free some room, before more memory is asked for."""

    @abstractmethod
    async def grow(self, push_bytes: int) -> bool:
        """Adds an arena. False: there is none to be had."""

    @abstractmethod
    def learn(self, blocks: Sequence[Block]) -> bool:
        """Adds blocks in which values lie, too. False: they are out of reach, and so is the whole peer from now on."""

    @abstractmethod
    def wait_for_values(self, queue: _core.Queue) -> None:
        """Makes what is queued from here on find the values that the shard has said are there."""

    @abstractmethod
    def hand_over(self, queue: _core.Queue) -> bool:
        """Lets the shard use the memory that the queue writes or reads by now. False: it may when the host has seen
        the queue done."""


class IpcPeer(DevicePeer):
    """The peer of a shard in another process."""

    def __init__(self, device: _core.Device, ask: Callable[[int], Awaitable[Shared]]) -> None:
        """`ask`: asks the shard for an arena of so many bytes."""
        super().__init__(device)
        self._ask = ask

    async def settle(self) -> None:
        """Does nothing: a client that is told of new values may count on it that what it had pushed is free."""

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

    def wait_for_values(self, queue: _core.Queue) -> None:
        """Does nothing: the shard has waited."""

    def hand_over(self, queue: _core.Queue) -> bool:
        return False


class InProcessPeer(DevicePeer):
    """The peer of a shard in this process."""

    def __init__(self, device: _core.Device, own: OwnShard) -> None:
        super().__init__(device)
        self._shard, self._protocol = own
        self._last_block = 0

    async def settle(self) -> None:
        """Waits for the shard: the host is a step ahead of the device, which still reads the pushes of the last one."""
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
        """Never called: the peer finds blocks itself."""
        return True

    def wait_for_values(self, queue: _core.Queue) -> None:
        self._look_around()
        queue.wait_for(self._shard.work_so_far())

    def hand_over(self, queue: _core.Queue) -> bool:
        self._shard.work_after(queue.record())
        return True

    def _look_around(self) -> None:
        for block in self._shard.shared_blocks(self._last_block):
            self.blocks.add_own_block(block)
            self._last_block = block.number


# ---- buffers ----------------------------------------------------------------------------------------


class SharedBuffer:
    """Room for one frame in a peer's arena, and none in the host's memory."""

    def __init__(self, peer: DevicePeer, room: _core.PushRoom, fetch: Callable[[Batch], _core.Segments]) -> None:
        self._peer = peer
        self._room = room
        self._fetch = fetch

    def fill(self, queue: _core.Queue, batch: Batch, arrays: Sequence[OnDevice]) -> None:
        """Queues copies of what is to be sent."""
        self._room.write(queue, batch.places(arrays))

    def hand_over(self, queue: _core.Queue) -> bool:
        """See `DevicePeer.hand_over`."""
        return self._peer.hand_over(queue)

    def to_send(self, batch: Batch) -> list[Transfer]:
        (frame,) = batch.frames
        return [Transfer(frame.way, frame.table, PlacedFrame(self._peer, self._room, partial(self._fetch, batch)))]

    def give_back(self) -> None:
        """Does nothing: the shard says when the room is free."""


class PlacedFrame:
    """The payload of a frame in a peer's arena. `fetch`: copies it to main memory, from what it was copied from."""

    def __init__(self, peer: DevicePeer, room: _core.PushRoom, fetch: Callable[[], _core.Segments]) -> None:
        self._peer = peer
        self._room = room
        self._fetch = fetch

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def told(self, near: Near | None, table: _core.SliceTable, request: int) -> _core.SliceTable | None:
        return self._room.send(table, request) if near is self._peer else None

    def in_main_memory(self) -> _core.Segments:
        return self._fetch()


class LazyBuffer:
    """Memory for the answer of a shard that may lease its values: allocated only if the answer comes over the stream
    after all."""

    def __init__(self, pool: _core.PinnedPool) -> None:
        self.memory: _core.Buffer | None = None
        self._pool = pool

    def to_receive(self, batch: Batch, newer_than: int | None) -> list[Transfer]:
        (frame,) = batch.frames
        return [Transfer(frame.way, asking(frame.table, newer_than), Landing(partial(self._allocate, batch)))]

    def _allocate(self, batch: Batch, _: _core.SliceTable) -> _core.Segments:
        self.memory = self._pool.allocate(batch.num_bytes)
        return _core.Segments([memory for _, memory in batch.parts(self.memory)], writable=True)

    def give_back(self) -> None:
        """Does nothing: the pool sees when the memory is free."""
