"""A store's transfers to and from devices, one for each device and direction, and what is pushed and pulled by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from psstore import _core
from psstore.client.arrays import Floats
from psstore.client.device.arrays import DeviceFloats, Kept, OnDevice
from psstore.client.device.peers import PeerDirectory
from psstore.client.device.pinned_transfer import EncodedFrame, PinnedTransfer, Pull, Send, SliceEncoder
from psstore.client.layout import Layout
from psstore.protocol.client import Client
from psstore.protocol.requests import Answer


class Upload(NamedTuple):
    """A push of arrays on one device: the frames of a layout."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]

    async def sent(self, send: Send) -> None:
        await self.pinned.push(self.layout, self.arrays, send)


class EncodedUpload(NamedTuple):
    """A push of arrays on one device, in codecs."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]
    encoders: Sequence[SliceEncoder]
    """One for each array."""
    encoded: Callable[[], None]
    """Called when the encoders have had all they are to do."""

    async def sent(self, send: Send) -> None:
        await self.pinned.push_encoded(self.layout, self.arrays, self.encoders, send, encoded=self.encoded)


class Download(NamedTuple):
    """A pull into arrays on one device."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]
    newer_than: int | None

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.pinned.pull(self.layout, self.arrays, pull, newer_than=self.newer_than)


class FollowedDownload(NamedTuple):
    """A pull of deltas of tensors that are followed on one device."""

    pinned: PinnedTransfer
    frames: Sequence[EncodedFrame]

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.pinned.follow(self.frames, pull)


class Transfers:
    """The pinned transfers of one store, by device and direction: made when first needed. Used on the store's loop
    only."""

    def __init__(self, client: Client) -> None:
        self._peers = PeerDirectory(client)
        self._transfers: dict[tuple[_core.Device, str], PinnedTransfer] = {}

    def out_of(self, device: _core.Device) -> PinnedTransfer:
        """Returns the transfer of what is pushed from the device."""
        return self._pinned(device, "out")

    def into(self, device: _core.Device) -> PinnedTransfer:
        """Returns the transfer of what is pulled onto the device."""
        return self._pinned(device, "in")

    async def brought(self, floats: Sequence[Kept], place: _core.Device | None) -> list[Kept]:
        """Returns copies of floats, all on that device, or all in main memory. Raises OutOfMemory."""
        copies: list[Floats] = []
        for one in floats:
            if isinstance(one, DeviceFloats):
                (fetched,) = await self.out_of(one.device).fetch([one.as_array()])
                copies.append(fetched.data.view(np.float32))
            else:
                copies.append(one)
        if place is None:
            return list(copies)
        there = DeviceFloats.together(place, [one.size for one in copies])
        memories = [one.view(np.uint8) for one in copies]
        await self.into(place).deliver(memories, [one.as_array() for one in there])
        return list(there)

    async def near(self, device: _core.Device) -> frozenset[int]:
        """Returns the ways to shards that share the device."""
        return await self._peers.ways(device)

    def _pinned(self, device: _core.Device, direction: str) -> PinnedTransfer:
        pinned = self._transfers.get((device, direction))
        if pinned is None:
            pinned = self._transfers[device, direction] = PinnedTransfer(device, self._peers)
        return pinned
