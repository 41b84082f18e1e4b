"""Writes a shard's file of a checkpoint, on a thread beside the one that serves.

The bytes are read as of the decision that a reader holds, some MiB at a time, so that what is kept beside the values is
what changes meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from psstore import _core
from psstore.checkpoint.hash_pool import HashPool, give_way, room_for_thread
from psstore.checkpoint.place import open_place
from psstore.checkpoint.shard_file import ShardPiece
from psstore.checkpoint.slots import SlotTable
from psstore.checkpoint.state import ShardState, TensorRecord
from psstore.checkpoint.writer import ShardFileWriter
from psstore.errors import PsstoreError, StorageFailed, VersionGone
from psstore.types import Tensor
from psstore.wire.messages import SaveFact

BATCH_BYTES = 16 << 20
"""What is read and hashed at a time: enough for all threads of the pool, and little beside a shard."""

APPLY_S = 60.0
"""How long slices may wait for contributions to the decision: a round that was committed early is being pushed."""

LOOK_S = 0.02
"""How often that is looked at."""

_log = logging.getLogger("psstore.server")


class ShardSaver:
    """One file at a time. The `protocol.saving.Saver` of a shard."""

    def __init__(self, shard: _core.Shard, *, index: int, num_shards: int) -> None:
        self._shard = shard
        self._index = index
        self._num_shards = num_shards
        self._job: _Job | None = None

    def save(self, fact: SaveFact, tensors: Mapping[int, Tensor]) -> bytes | None:
        """See protocol/saving.py."""
        if self._job is None or self._job.fact.attempt != fact.attempt:
            if self._job is not None and self._job.thread.is_alive():
                return None  # what came to nothing is still being written
            self._job = _Job(self, fact, _records(tensors, fact))
        return self._job.result()

    def write(self, fact: SaveFact, tensors: Sequence[TensorRecord]) -> bytes:
        """The whole of it; blocks."""
        image = self._image(fact)
        ids = {tensor.id for tensor in tensors}
        slots = SlotTable.of(slot for slot in SlotTable(image.slots) if slot.key >> _core.SLICE_INDEX_BITS in ids)
        changed = None if fact.since is None else self._choose_changed(image, slots, fact.since)
        state = ShardState(index=self._index, num_shards=self._num_shards, version=fact.version)
        storage = open_place(fact.url).place.storage
        with (
            HashPool(yielding=True) as pool,
            ShardFileWriter(
                storage, attempt=fact.attempt, state=state, tensors=tensors, table=slots, pool=pool, changed=changed
            ) as writer,
        ):
            for batch in _batches(writer.pieces):
                read = self._shard.read_image(image, [(piece.slot.key, piece.part) for piece in batch])
                writer.write(list(_views(read, batch)))
            return msgspec.json.encode(writer.finish())

    def _choose_changed(self, image: _core.TableImage, slots: SlotTable, since: int) -> dict[int, int]:
        """How many rows of each partition have changed, by key: those that the image has from here on."""
        return {slot.key: self._shard.choose_changed(image, slot.key, since) for slot in slots if slot.num_rows}

    def _image(self, fact: SaveFact) -> _core.TableImage:
        until = time.monotonic() + APPLY_S
        while (image := self._shard.image(fact.reader, fact.version)) is None:
            if time.monotonic() > until:
                raise VersionGone(
                    f"version {fact.version} lacks contributions still, after {APPLY_S:g} s: a round that was committed"
                    " early is not pushed"
                )
            time.sleep(LOOK_S)
        return image


class _Job:
    """An attempt, on its thread."""

    def __init__(self, saver: ShardSaver, fact: SaveFact, tensors: Sequence[TensorRecord]) -> None:
        self.fact = fact
        self._record: bytes | None = None
        self._error: PsstoreError | None = None
        self.thread = threading.Thread(target=self._run, args=(saver, tensors), name="psstore-saver", daemon=True)
        try:
            with room_for_thread():
                self.thread.start()
        except StorageFailed as error:
            self._error = error

    def result(self) -> bytes | None:
        """None: not yet. Raises what it failed with."""
        if self._error is not None:
            raise type(self._error)(self._error.message, **self._error.details)
        return self._record

    def _run(self, saver: ShardSaver, tensors: Sequence[TensorRecord]) -> None:
        give_way()
        try:
            self._record = saver.write(self.fact, tensors)
        except PsstoreError as error:
            self._error = error
        except Exception as error:
            _log.exception("a bug in psstore; version %d is not written", self.fact.version)
            self._error = StorageFailed(f"writing version {self.fact.version} failed: {error!r}")


def _records(tensors: Mapping[int, Tensor], fact: SaveFact) -> list[TensorRecord]:
    """The tensors that the checkpoint has."""
    return [
        TensorRecord(id=number, spec=tensors[number].spec, slice_elems=tensors[number].slice_elems)
        for first, last in fact.tensors
        for number in range(first, last + 1)
        if number in tensors
    ]


def _batches(pieces: Sequence[ShardPiece]) -> Iterator[list[ShardPiece]]:
    batch: list[ShardPiece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _views(read: Sequence[memoryview], batch: Sequence[ShardPiece]) -> Iterator[memoryview]:
    """What was read, cut into the pieces that it has one after the other."""
    whole = iter(read)
    view, begin = memoryview(b""), 0
    for piece in batch:
        if begin == view.nbytes and piece.num_bytes:
            view, begin = next(whole), 0
        yield view[begin : begin + piece.num_bytes]
        begin += piece.num_bytes
