"""The way between a device and the store: through pinned memory, bounded and used again, where it is not shorter.

    device       gradient ──copy_out──► ┌───────┬───────┬───────┐ ──frames──►   shard
                                        │ batch │ batch │  ...  │
    device      parameter ◄──copy_in─── └───────┴───────┴───────┘ ◄──frames──   shard

While one batch is copied, those before it are on the wire. A pinned transfer is one direction: it has a queue of its
own on the device, which waits for the callers' streams by fences, and a thread that waits for the copies, so that the
store's loop does not. A push is under way when its copy is done; a pull is over when its copy is queued, and the
caller's stream waits for it. Frames to and from shards that share the device go past the pinned memory (peers.py).
What is pushed in a codec is encoded on the device, and leaves it in the codec's bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from psstore import _core
from psstore.client.arrays import Bytes, Source, converted
from psstore.client.device.arrays import DeviceFloats, Kept, OnDevice
from psstore.client.device.batches import BATCH_BYTES, Batch, PinnedBuffer, TransferBuffer, cut, grouped
from psstore.client.device.peers import LazyBuffer, PeerDirectory, SharedBuffer
from psstore.client.layout import Layout
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Answer

B = TypeVar("B")
T = TypeVar("T")

MOST_PINNED_BYTES = 8 * BATCH_BYTES
"""Pinned memory of a pinned transfer at most. Two batches are enough to copy and to send at once; the others are on
their way to shards, or waiting for their acknowledgements: at 10 GB/s 48 MiB are 5 ms of them."""

Send = Callable[[Sequence[Transfer]], Awaitable[None]]
"""Pushes frames; returns when they are acknowledged."""

Pull = Callable[[Sequence[Transfer]], Awaitable[list[Answer]]]
"""Receives frames into their memory."""

R = TypeVar("R", bound=TransferBuffer)


class SliceEncoder(Protocol):
    """Tells a device how to encode a tensor whose values it holds."""

    def slice(self, index: int) -> tuple[int, int, int, int, int, int, float, int]:
        """Slice `index`, as `Queue.encode_out` takes it."""


class EncodedFrame(Protocol):
    """A frame that is received in codecs, and decoded on a device."""

    @property
    def most_bytes(self) -> int:
        """Bytes that may come."""

    @property
    def num_bytes(self) -> int:
        """Bytes that came."""

    def transfer(self, memory: Bytes | None = None) -> Transfer:
        """Returns the request. `memory`: for `most_bytes`."""

    def decode(self, answer: Answer, decode: Callable[[list[tuple[int, int, int, int, int]]], None]) -> None:
        """Calls `decode` with what came, as `Queue.decode_in` takes it, and notes that it is here."""


class PinnedTransfer:
    """Transfers in one direction between a device and a store. Used on the store's loop only."""

    def __init__(self, device: _core.Device, peers: PeerDirectory) -> None:
        self._device = device
        self._peers = peers
        self._queue = device.make_queue()
        self._pool = _core.PinnedPool(device, max_idle_bytes=MOST_PINNED_BYTES)
        self._free_bytes = MOST_PINNED_BYTES
        self._grouped: WeakKeyDictionary[Layout, tuple[frozenset[int], list[Batch]]] = WeakKeyDictionary()
        """Batches of each layout, and the ways that were near then: layouts are used every round, and most ways stay
        near."""
        self._turn = asyncio.Lock()
        """Held while a batch waits for its buffer, so that later ones do not overtake it."""
        self._freed = asyncio.Event()
        self._waiter = ThreadPoolExecutor(1, "psstore-copies")

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that the transfer holds now."""
        return self._pool.nbytes

    async def push(self, layout: Layout, arrays: Sequence[OnDevice], send: Send) -> None:
        """Sends the layout's frames, each when its part of the arrays is here. Pushes of one tensor go out in the
        order of the calls. Raises what `send` raises, when all were tried."""
        self._wait_for(arrays)

        async def work(batch: Batch, buffer: PinnedBuffer | SharedBuffer) -> None:
            buffer.fill(self._queue, batch, arrays)
            if buffer.hand_over(self._queue):
                self._let_wait(arrays)
            else:
                await self._passed(buffer, arrays)
            await send(buffer.to_send(batch))
            buffer.give_back()

        async def allocate(batch: Batch) -> PinnedBuffer | SharedBuffer:
            return await self._shared(batch, arrays) if batch.is_near else await self._pinned(batch)

        await self._each(await self._batches(layout), allocate, work)
        await self._settled(arrays)

    async def push_encoded(
        self,
        layout: Layout,
        arrays: Sequence[OnDevice],
        encoders: Sequence[SliceEncoder],
        send: Send,
        *,
        encoded: Callable[[], None],
    ) -> None:
        """Pushes in codecs, through pinned memory wherever the shards are: they look at what is encoded. Calls
        `encoded` when the encoders have had all they are to do."""
        self._wait_for(arrays)
        batches = list(grouped(layout.frames, frozenset()))
        left = len(batches)

        async def work(batch: Batch, buffer: PinnedBuffer) -> None:
            nonlocal left
            self._queue.encode_out(buffer.memory, [encoders[position].slice(i) for position, i in batch.slices()])
            left -= 1
            if not left:
                encoded()
            await self._passed(buffer, arrays, encoders)
            await send(buffer.to_send(batch))
            buffer.give_back()

        await self._each(batches, self._pinned, work)
        await self._settled(arrays)

    async def pull(
        self, layout: Layout, arrays: Sequence[OnDevice], pull: Pull, *, newer_than: int | None
    ) -> list[Answer]:
        """Receives the layout's frames into the arrays; returns the answers when all are copied, in the order of the
        arrays' streams."""
        self._wait_for(arrays)

        async def work(batch: Batch, buffer: PinnedBuffer | LazyBuffer) -> list[Answer]:
            answers = await pull(buffer.to_receive(batch, newer_than))
            while answers[0].lease is not None:
                if await self._peers.read_leased(self._queue, answers[0], batch.places(arrays), done=done):
                    return answers
                answers = await pull(buffer.to_receive(batch, newer_than))
            if buffer.memory is None:
                return answers
            if converts:
                self._queue.decode_in(buffer.memory, batch.num_bytes, batch.decoding(layout, arrays, answers))
            else:
                self._queue.copy_in(buffer.memory, batch.came(arrays, answers))
            self._give_back_later(buffer, buffer.memory, arrays)
            return answers

        async def done(peer: object) -> None:
            await self._passed(peer, arrays)

        async def allocate(batch: Batch) -> PinnedBuffer | LazyBuffer:
            return LazyBuffer(self._pool) if batch.is_near else await self._pinned(batch)

        converts = any(one.dtype != dtype for one, dtype in zip(arrays, layout.dtypes, strict=True))
        batches = list(grouped(layout.frames, frozenset())) if converts else await self._batches(layout)
        try:
            answers = await self._each(batches, allocate, work)
        finally:
            self._let_wait(arrays)
        await self._settled(arrays)
        return [answer for some in answers for answer in some]

    async def follow(self, frames: Sequence[EncodedFrame], pull: Pull) -> list[Answer]:
        """Receives deltas of tensors that are followed on the device, and decodes them there."""

        async def work(frame: EncodedFrame, buffer: PinnedBuffer) -> Answer:
            (answer,) = await pull([frame.transfer(np.asarray(memoryview(buffer.memory)))])
            frame.decode(answer, partial(self._queue.decode_in, buffer.memory, frame.num_bytes))
            self._give_back_later(buffer, buffer.memory, frame)
            return answer

        async def allocate(frame: EncodedFrame) -> PinnedBuffer:
            async with self._turn:
                return await self._allocate(frame.most_bytes)

        return await self._each(frames, allocate, work)

    async def give_out(self, floats: Sequence[Kept], arrays: Sequence[OnDevice]) -> None:
        """Copies floats, on the device or in main memory, to arrays on it, in the order of their streams."""
        there = [(one, array) for one, array in zip(floats, arrays, strict=True) if isinstance(one, DeviceFloats)]
        here = [(one, array) for one, array in zip(floats, arrays, strict=True) if isinstance(one, np.ndarray)]
        if here:
            values = [converted(one.view(np.uint8), "float32", array.dtype) for one, array in here]
            await self.deliver(values, [array for _, array in here])
        if there:
            self._wait_for(arrays)
            try:
                self._queue.give_out(
                    [(one.pointer, one.size, array.pointer, _core.DTYPES[array.dtype]) for one, array in there]
                )
            finally:
                self._let_wait(arrays, floats)
            await self._settled(arrays)
        for array in arrays:
            if array.finish is not None:
                array.finish()

    async def fetch(self, arrays: Sequence[OnDevice]) -> list[Source]:
        """Copies of the arrays in main memory."""
        copies = [Source(one.shape, one.dtype, np.empty(one.num_bytes, np.uint8)) for one in arrays]
        self._wait_for(arrays)

        async def work(batch: Batch, buffer: PinnedBuffer) -> None:
            self._queue.copy_out(buffer.memory, batch.pieces(arrays))
            await self._passed(buffer.memory, arrays)
            for one, memory in batch.parts(buffer.memory):
                copies[one.position].data[one.begin : one.end] = memory
            buffer.give_back()

        await self._each(cut(arrays), self._pinned, work)
        return copies

    async def deliver(self, values: Sequence[Bytes], arrays: Sequence[OnDevice]) -> None:
        """Copies bytes in main memory to the arrays, in the order of their streams."""
        self._wait_for(arrays)

        async def work(batch: Batch, buffer: PinnedBuffer) -> None:
            for one, memory in batch.parts(buffer.memory):
                memory[:] = values[one.position][one.begin : one.end]
            self._queue.copy_in(buffer.memory, batch.pieces(arrays))
            self._give_back_later(buffer, buffer.memory, arrays)

        try:
            await self._each(cut(arrays), self._pinned, work)
        finally:
            self._let_wait(arrays)
        await self._settled(arrays)

    # ---- how ----

    async def _batches(self, layout: Layout) -> list[Batch]:
        """The layout's frames in their order: each of a shard that shares the device by itself, the others together."""
        near = await self._peers.ways(self._device)
        known = self._grouped.get(layout)
        if known is None or known[0] != near:
            known = self._grouped[layout] = near, list(grouped(layout.frames, near))
        return known[1]

    async def _pinned(self, batch: Batch) -> PinnedBuffer:
        async with self._turn:
            return await self._allocate(batch.num_bytes)

    async def _shared(self, batch: Batch, arrays: Sequence[OnDevice]) -> PinnedBuffer | SharedBuffer:
        """Memory that the shard shares, or pinned memory if there is none, in the same turn: later pushes must not
        overtake."""
        async with self._turn:
            shared = await self._peers.buffer(batch, self._device, fetch=partial(self._fetch_now, arrays))
            return shared or await self._allocate(batch.num_bytes)

    async def _allocate(self, num_bytes: int) -> PinnedBuffer:
        while self._free_bytes < num_bytes:
            self._freed.clear()
            await self._freed.wait()
        memory = self._pool.allocate(num_bytes)
        self._free_bytes -= num_bytes
        return PinnedBuffer(num_bytes, memory, self._give_back)

    def _give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        self._freed.set()

    def _fetch_now(self, arrays: Sequence[OnDevice], batch: Batch) -> _core.Segments:
        """Copies a batch to main memory and waits for the device: the connection was lost that it was placed for."""
        memory = self._pool.allocate(batch.num_bytes)
        self._queue.copy_out(memory, batch.pieces(arrays))
        self._queue.record().wait()
        return _core.Segments([memoryview(memory)[: batch.num_bytes]])

    async def _each(
        self,
        batches: Iterable[B],
        allocate: Callable[[B], Coroutine[Any, Any, R]],
        work: Callable[[B, R], Coroutine[Any, Any, T]],
    ) -> list[T]:
        """Does the work of all batches, begun in their order, each when it has a buffer. Raises the first failure when
        all have ended; the buffer of one that fails is given back here."""
        tasks: list[asyncio.Task[T]] = []
        try:
            for batch in batches:
                buffer = await allocate(batch)
                task = asyncio.get_running_loop().create_task(work(batch, buffer))
                task.add_done_callback(partial(_after_failure, buffer))
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
        """Orders what is queued from here on after what the callers had queued."""
        for fence in {id(one.ready): one.ready for one in arrays}.values():
            if fence is not None:
                self._queue.wait_for(fence)

    def _let_wait(self, arrays: Sequence[OnDevice], *kept: object) -> None:
        """Orders what the callers queue from here on after what is queued here. Until that is done, the arrays stay."""
        fence = self._queue.record()
        self._waiter.submit(_wait, fence, (arrays, kept))
        for device, stream in {(one.device, one.stream) for one in arrays}:
            if stream is not None:
                device.borrow_queue(stream).wait_for(fence)

    async def _settled(self, arrays: Sequence[OnDevice]) -> None:
        """Waits for the sake of arrays whose stream is not known."""
        if any(one.stream is None for one in arrays):
            await self._passed()

    def _give_back_later(self, buffer: TransferBuffer, *kept: object) -> None:
        """Gives the buffer back when all is done that is queued by now."""
        self._passed(*kept).add_done_callback(partial(_after_copies, buffer))

    def _passed(self, *kept: object) -> asyncio.Future[None]:
        """Returns a future that is done when all is that is queued by now. `kept` lives until then, whatever becomes of
        the future."""
        waiting = asyncio.wrap_future(self._waiter.submit(_wait, self._queue.record(), kept))
        return asyncio.shield(waiting)


def _wait(fence: _core.Fence, kept: object) -> None:
    """Runs in a thread: it may take as long as the device is busy."""
    fence.wait()


def _after_failure(buffer: TransferBuffer, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or task.exception() is not None:
        buffer.give_back()


def _after_copies(buffer: TransferBuffer, copied: asyncio.Future[None]) -> None:
    if not copied.cancelled():
        copied.exception()  # seen: whoever uses the device next hears of its failure
    buffer.give_back()
