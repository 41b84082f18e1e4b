"""The way between a device and the store: through pinned memory, bounded and used again.

    device       gradient ──copy_out──► ┌───────┬───────┬───────┐ ──frames──►   shard
                                        │ batch │ batch │  ...  │
    device      parameter ◄──copy_in─── └───────┴───────┴───────┘ ◄──frames──   shard

While one batch is copied, those before it are on the wire. A passage is one direction: it has a queue of its own on the
device, which waits for the callers' streams by fences, and a thread that waits for the copies, so that the store's
loop does not. A push is under way when its copy is done; a pull is over when its copy is queued, and the caller's
stream waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes, Source, Target
from psstore.client.device_arrays import OnDevice
from psstore.client.layout import Frame, Layout, Range, asking
from psstore.protocol.client import Transfer
from psstore.protocol.session import Answer

T = TypeVar("T")

BATCH_BYTES = 8 << 20
"""What is copied at once: two full frames. PCIe takes 0.15 to 0.3 ms for it, next to which it is little that the host
is told when it is done; and the first bytes are on the wire as much earlier as it is smaller."""

PASSAGE_BYTES = 8 * BATCH_BYTES
"""Pinned memory of a passage at most. Two batches are enough to copy and to send at once; the others are on their way
to shards, or waiting for their acknowledgements: at 10 GB/s 48 MiB are 5 ms of them."""

Send = Callable[[Sequence[Transfer]], Awaitable[None]]
"""Pushes frames; done when they are acknowledged."""

Pull = Callable[[Sequence[Transfer]], Awaitable[list[Answer]]]
"""Receives frames into their memory."""


class Batch(NamedTuple):
    """Ranges of arrays that lie one after the other in pinned memory, and the frames that they make, if any."""

    ranges: Sequence[Range]
    offsets: Sequence[int]
    """Where each begins there, and where the last one ends."""
    frames: Sequence[Frame] = ()

    @staticmethod
    def of(ranges: Sequence[Range], frames: Sequence[Frame] = ()) -> Batch:
        offsets = [0]
        for one in ranges:
            offsets.append(offsets[-1] + one.end - one.begin)
        return Batch(ranges, offsets, frames)

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def pieces(self, arrays: Sequence[OnDevice]) -> list[tuple[int, int, int]]:
        """(offset, pointer, bytes) of each range, as a queue copies them."""
        return [
            (offset, arrays[one.position].pointer + one.begin, one.end - one.begin)
            for offset, one in zip(self.offsets, self.ranges, strict=False)
        ]


class Room:
    """Pinned memory of a passage, from when it is free to `give_back`."""

    def __init__(self, passage: Passage, num_bytes: int, buffer: _core.Buffer) -> None:
        self.buffer = buffer
        self._passage = passage
        self._num_bytes = num_bytes

    def give_back(self) -> None:
        """Does nothing the second time."""
        self._passage.freed(self._num_bytes)
        self._num_bytes = 0


class Passage:
    """One direction between a device and a store. Used on the store's loop only."""

    def __init__(self, device: _core.Device) -> None:
        self._queue = device.make_queue()
        self._pool = _core.PinnedPool(device, max_idle_bytes=PASSAGE_BYTES)
        self._free_bytes = PASSAGE_BYTES
        self._turn = asyncio.Lock()
        """Whoever came first gets room first."""
        self._freed = asyncio.Event()
        self._waiter = ThreadPoolExecutor(1, "psstore-copies")

    @property
    def pinned_bytes(self) -> int:
        """What it holds now."""
        return self._pool.nbytes

    async def push(self, layout: Layout, arrays: Sequence[OnDevice], send: Send) -> None:
        """Sends the layout's frames, each when its part of the arrays is here. Pushes of one tensor go out in the
        order of the calls. Raises what `send` raises, when all were tried."""
        self._wait_for(arrays)

        async def work(batch: Batch, room: Room) -> None:
            self._queue.copy_out(room.buffer, batch.pieces(arrays))
            await self._passed(room.buffer, arrays)
            await send(_departing(batch, room.buffer))
            room.give_back()

        await self._each(_batches(layout.frames), work)

    async def pull(
        self, layout: Layout, arrays: Sequence[OnDevice], pull: Pull, *, newer_than: int | None
    ) -> list[Answer]:
        """Receives the layout's frames into the arrays; returns the answers when all are copied, in the order of the
        arrays' streams."""
        self._wait_for(arrays)

        async def work(batch: Batch, room: Room) -> list[Answer]:
            answers = await pull(_arriving(batch, room.buffer, newer_than))
            self._land(batch, _came(batch, arrays, answers), arrays, room)
            return answers

        try:
            answers = await self._each(_batches(layout.frames), work)
        finally:
            self._let_wait(arrays)
        await self._settled(arrays)
        return [answer for some in answers for answer in some]

    async def fetch(self, arrays: Sequence[OnDevice]) -> list[Source]:
        """Copies of the arrays in main memory."""
        copies = [Source(one.shape, one.dtype, np.empty(one.num_bytes, np.uint8)) for one in arrays]
        self._wait_for(arrays)

        async def work(batch: Batch, room: Room) -> None:
            self._queue.copy_out(room.buffer, batch.pieces(arrays))
            await self._passed(room.buffer, arrays)
            for one, memory in _parts(batch, room.buffer):
                copies[one.position].data[one.begin : one.end] = memory
            room.give_back()

        await self._each(_cut(arrays), work)
        return copies

    async def deliver(self, values: Sequence[Bytes], arrays: Sequence[OnDevice]) -> None:
        """Copies bytes in main memory to the arrays, in the order of their streams."""
        self._wait_for(arrays)

        async def work(batch: Batch, room: Room) -> None:
            for one, memory in _parts(batch, room.buffer):
                memory[:] = values[one.position][one.begin : one.end]
            self._land(batch, batch.pieces(arrays), arrays, room)

        try:
            await self._each(_cut(arrays), work)
        finally:
            self._let_wait(arrays)
        await self._settled(arrays)

    def freed(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        self._freed.set()

    # ---- how ----

    async def _room(self, num_bytes: int) -> Room:
        async with self._turn:
            while self._free_bytes < num_bytes:
                self._freed.clear()
                await self._freed.wait()
            buffer = self._pool.allocate(num_bytes)
            self._free_bytes -= num_bytes
        return Room(self, num_bytes, buffer)

    async def _each(self, batches: Iterable[Batch], work: Callable[[Batch, Room], Coroutine[Any, Any, T]]) -> list[T]:
        """The work of all, begun in their order, each when it has room. Raises the first failure when all have ended;
        what fails gives its room back here."""
        tasks: list[asyncio.Task[T]] = []
        try:
            for batch in batches:
                room = await self._room(batch.num_bytes)
                task = asyncio.get_running_loop().create_task(work(batch, room))
                task.add_done_callback(partial(_after_failure, room))
                tasks.append(task)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        results: list[T] = []
        for one in ended:
            if isinstance(one, BaseException):
                raise one
            results.append(one)
        return results

    def _wait_for(self, arrays: Sequence[OnDevice]) -> None:
        """What is queued from here on comes after what the callers had queued."""
        for fence in {id(one.ready): one.ready for one in arrays}.values():
            if fence is not None:
                self._queue.wait_for(fence)

    def _let_wait(self, arrays: Sequence[OnDevice]) -> None:
        """What the callers queue from here on comes after what is queued here."""
        fence = self._queue.record()
        for device, stream in {(one.device, one.stream) for one in arrays}:
            if stream is not None:
                device.borrow_queue(stream).wait_for(fence)

    async def _settled(self, arrays: Sequence[OnDevice]) -> None:
        """Waits for the sake of arrays whose stream is not known."""
        if any(one.stream is None for one in arrays):
            await self._passed()

    def _land(self, batch: Batch, pieces: list[tuple[int, int, int]], arrays: Sequence[OnDevice], room: Room) -> None:
        self._queue.copy_in(room.buffer, pieces)
        self._passed(room.buffer, arrays).add_done_callback(partial(_after_landing, room))

    def _passed(self, *kept: object) -> asyncio.Future[None]:
        """Done when all is that is queued by now. `kept` lives until then, whatever becomes of the future."""
        waiting = asyncio.wrap_future(self._waiter.submit(_wait, self._queue.record(), kept))
        return asyncio.shield(waiting)


class Departure(NamedTuple):
    """What is pushed from one device: the layout's arrays, to be sent by somebody else's means."""

    passage: Passage
    layout: Layout
    arrays: Sequence[OnDevice]

    async def sent(self, send: Send) -> None:
        await self.passage.push(self.layout, self.arrays, send)


class Arrival(NamedTuple):
    """What is pulled onto one device."""

    passage: Passage
    layout: Layout
    arrays: Sequence[OnDevice]
    newer_than: int | None

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.passage.pull(self.layout, self.arrays, pull, newer_than=self.newer_than)


class Passages:
    """Of one store, by device: made when they are first needed. Used on its loop only."""

    def __init__(self) -> None:
        self._passages: dict[tuple[_core.Device, str], Passage] = {}

    def out_of(self, device: _core.Device) -> Passage:
        """For what is pushed."""
        return self._passage(device, "out")

    def into(self, device: _core.Device) -> Passage:
        """For what is pulled."""
        return self._passage(device, "in")

    def _passage(self, device: _core.Device, direction: str) -> Passage:
        passage = self._passages.get((device, direction))
        if passage is None:
            passage = self._passages[device, direction] = Passage(device)
        return passage


def in_main_memory(array: OnDevice) -> Target:
    """Memory to receive into in place of the array's own, for `deliver`."""
    return Target(array.shape, array.dtype, np.empty(array.num_bytes, np.uint8), array.result, None)


def _wait(fence: _core.Fence, kept: object) -> None:
    """In a thread: it may take as long as the device is busy."""
    fence.wait()


def _after_failure(room: Room, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or task.exception() is not None:
        room.give_back()


def _after_landing(room: Room, landed: asyncio.Future[None]) -> None:
    if not landed.cancelled():
        landed.exception()  # seen: whoever uses the device next hears of its failure
    room.give_back()


def _batches(frames: Iterable[Frame]) -> Iterator[Batch]:
    """Frames in their order, with about BATCH_BYTES to each batch."""
    together: list[Frame] = []
    num_bytes = 0
    for frame in frames:
        frame_bytes = sum(one.end - one.begin for one in frame.ranges)
        if together and num_bytes + frame_bytes > BATCH_BYTES:
            yield Batch.of([one for frame in together for one in frame.ranges], together)
            together, num_bytes = [], 0
        together.append(frame)
        num_bytes += frame_bytes
    if together:
        yield Batch.of([one for frame in together for one in frame.ranges], together)


def _cut(arrays: Sequence[OnDevice]) -> Iterator[Batch]:
    """All bytes of the arrays in their order, BATCH_BYTES to each batch."""
    ranges: list[Range] = []
    room = BATCH_BYTES
    for position, array in enumerate(arrays):
        begin = 0
        while begin < array.num_bytes:
            end = min(array.num_bytes, begin + room)
            ranges.append(Range(position, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield Batch.of(ranges)
                ranges, room = [], BATCH_BYTES
    if ranges:
        yield Batch.of(ranges)


def _parts(batch: Batch, buffer: _core.Buffer) -> Iterator[tuple[Range, Bytes]]:
    memory = np.asarray(memoryview(buffer))
    for one, (begin, end) in zip(batch.ranges, pairwise(batch.offsets), strict=True):
        yield one, memory[begin:end]


def _departing(batch: Batch, buffer: _core.Buffer) -> list[Transfer]:
    """A frame's slices lie one after the other: one piece of memory."""
    memory, begin, transfers = memoryview(buffer), 0, []
    for frame in batch.frames:
        end = begin + sum(one.end - one.begin for one in frame.ranges)
        transfers.append(Transfer(frame.shard, frame.table, _core.Segments([memory[begin:end]])))
        begin = end
    return transfers


def _arriving(batch: Batch, buffer: _core.Buffer, newer_than: int | None) -> list[Transfer]:
    """A piece of memory for each slice, as some may not come."""
    parts = iter([memory for _, memory in _parts(batch, buffer)])
    return [
        Transfer(
            frame.shard,
            asking(frame.table, newer_than),
            _core.Segments([next(parts) for _ in frame.ranges], writable=True),
        )
        for frame in batch.frames
    ]


def _came(batch: Batch, arrays: Sequence[OnDevice], answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
    """The pieces of the slices that came."""
    sizes = [size for answer in answers for size in answer.table.num_bytes()]
    return [piece for piece, size in zip(batch.pieces(arrays), sizes, strict=True) if size]
