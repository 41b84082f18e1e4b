"""The way to shards that live on the device where the caller's arrays are: device to device, not through the host.

     array ──copy──► room in the shard's push arena ··frame says where··► shard
     array ◄──copy── where the shard's value lies   ◄··frame says where·· shard

One connection shares with its shard what `DevicePeer` holds, and loses it when it ends. What one process has the device
do the other can't wait for on the device; so a frame is sent when the host has seen its copy done, and a value is
given back when the host has seen it read. Where both are one process the device waits, and the host goes on
(near_shards.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from psstore import _core
from psstore.client.near_shards import DevicePeer, InProcessPeer, IpcPeer
from psstore.protocol.client import Client
from psstore.protocol.session import Session
from psstore.protocol.sharing import Lease, Near

SMALLEST_ARENA_BYTES = 1 << 20
"""To push through, at first. It is of the device's memory, and gets more by half when a frame finds no room."""

NEAR_BYTES = 64 << 10
"""A frame of less goes over the stream, as the shard's answers do: it is no slower, and has no block to itself."""


class PlacedFrame:
    """A frame's payload in its room; `fetch` makes a copy in main memory, of what it was copied from."""

    def __init__(self, near: DevicePeer, room: _core.PushRoom, fetch: Callable[[], _core.Segments]) -> None:
        self._near = near
        self._room = room
        self._fetch = fetch

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def told(self, near: Near | None, table: _core.SliceTable, request: int) -> _core.SliceTable | None:
        return self._room.send(table, request) if near is self._near else None

    def in_main_memory(self) -> _core.Segments:
        return self._fetch()


class PeerDirectory:
    """The shards of a store, as far as they share devices with us. Used on the store's loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asking = asyncio.Lock()

    async def near(self, way: int, device: _core.Device) -> DevicePeer | None:
        """What is shared on that device with the shard of that way; None: nothing: its values go over the stream."""
        session = self._client.sessions[way]
        if session.device != device.identity:
            return None
        if session.near is None:
            async with self._asking:
                if session.near is None:
                    await self._ask(session, device, SMALLEST_ARENA_BYTES)
        return session.near if isinstance(session.near, DevicePeer) else None

    async def ways(self, device: _core.Device) -> frozenset[int]:
        """The ways to shards that share the device."""
        near = [await self.near(way, device) for way in range(len(self._client.sessions))]
        return frozenset(way for way, shared in enumerate(near) if shared is not None)

    async def room(self, way: int, device: _core.Device, num_bytes: int) -> tuple[DevicePeer, _core.PushRoom] | None:
        """Room for a frame; None: there is none."""
        near = await self.near(way, device)
        if near is None:
            return None
        room = near.take(num_bytes)
        if room is None:
            await near.settle()
            room = near.take(num_bytes)
        if room is None and not near.is_full:
            async with self._asking:
                await self._ask(self._client.sessions[way], device, max(near.num_bytes // 2, num_bytes))
            room = near.take(num_bytes)
        return (near, room) if room is not None else None

    def shared_with(self, lease: Lease) -> DevicePeer | None:
        """What the values that are lent lie in; None: it is lost."""
        session = self._client.lender(lease)
        if lease.connection != session.connection or not isinstance(session.near, DevicePeer):
            return None
        return session.near

    def end_lease(self, lease: Lease) -> bool:
        """See `Session.end_lease`."""
        return self._client.end_leases([lease])

    async def _ask(self, session: Session, device: _core.Device, push_bytes: int) -> None:
        """For an arena to push through, or another one. If there is none, all stays as it is, and is not asked for
        again."""
        near = session.near if isinstance(session.near, DevicePeer) else self._found(session, device)
        connection = session.connection
        grew = await near.grow(push_bytes)
        if connection != session.connection:
            return
        if grew:
            session.near = near
        elif session.near is None:
            session.device = b""
        else:
            near.is_full = True

    def _found(self, session: Session, device: _core.Device) -> DevicePeer:
        if session.own_shard is not None:
            return InProcessPeer(device, session.own_shard)
        return IpcPeer(device, lambda push_bytes: self._client.share(session, push_bytes=push_bytes))
