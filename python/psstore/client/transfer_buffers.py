"""Where a batch lies on its way between a device and the store: in pinned memory, or in what its shard shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from psstore import _core
from psstore.client.batches import Batch
from psstore.client.device_arrays import OnDevice
from psstore.client.layout import asking
from psstore.client.near import PlacedFrame
from psstore.client.near_shards import DevicePeer
from psstore.protocol.client import Transfer
from psstore.protocol.sharing import Landing


class PinnedBuffer:
    """Pinned memory of a pinned transfer, from when it is free to `give_back`."""

    def __init__(self, num_bytes: int, buffer: _core.Buffer, freed: Callable[[int], None]) -> None:
        self.buffer = buffer
        self._num_bytes = num_bytes
        self._freed = freed

    def fill(self, queue: _core.Queue, batch: Batch, arrays: Sequence[OnDevice]) -> None:
        """Queues copies of what is to be sent."""
        queue.copy_out(self.buffer, batch.pieces(arrays))

    def hand_over(self, queue: _core.Queue) -> bool:
        """The host sends it."""
        return False

    def departing(self, batch: Batch) -> list[Transfer]:
        return batch.departing(self.buffer)

    def arriving(self, batch: Batch, newer_than: int | None) -> list[Transfer]:
        return batch.arriving(self.buffer, newer_than)

    def give_back(self) -> None:
        """Does nothing the second time."""
        self._freed(self._num_bytes)
        self._num_bytes = 0


class SharedBuffer:
    """Room for a frame in what its shard shares, and nothing of the host's."""

    def __init__(self, near: DevicePeer, room: _core.PushRoom, fetch: Callable[[Batch], _core.Segments]) -> None:
        self._near = near
        self._room = room
        self._fetch = fetch

    def fill(self, queue: _core.Queue, batch: Batch, arrays: Sequence[OnDevice]) -> None:
        self._room.write(queue, batch.places(arrays))

    def hand_over(self, queue: _core.Queue) -> bool:
        return self._near.hand_over(queue)

    def departing(self, batch: Batch) -> list[Transfer]:
        (frame,) = batch.frames
        return [Transfer(frame.way, frame.table, PlacedFrame(self._near, self._room, partial(self._fetch, batch)))]

    def give_back(self) -> None:
        """The shard says when it is free."""


class LazyBuffer:
    """Memory for the answer of a shard that may lend it: there is some only if it comes over the stream after all."""

    def __init__(self, pool: _core.PinnedPool) -> None:
        self.buffer: _core.Buffer | None = None
        self._pool = pool

    def arriving(self, batch: Batch, newer_than: int | None) -> list[Transfer]:
        (frame,) = batch.frames
        return [Transfer(frame.way, asking(frame.table, newer_than), Landing(partial(self._find, batch)))]

    def _find(self, batch: Batch, _: _core.SliceTable) -> _core.Segments:
        self.buffer = self._pool.allocate(batch.num_bytes)
        return _core.Segments([memory for _, memory in batch.parts(self.buffer)], writable=True)

    def give_back(self) -> None:
        """The pool sees when it is free."""


class TransferBuffer(Protocol):
    """Memory for a batch, wherever it is."""

    def give_back(self) -> None: ...
