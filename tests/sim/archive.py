"""Where checkpoints of a run go: the store's own keeper, and in place of storage this. Nothing blocks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from psstore import _core
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.shard_reader import ReadSlice, Target
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart
from psstore.errors import PsstoreError
from psstore.types import Tensor
from psstore.wire.messages import SaveFact

from .world import World

SLOW_S = 0.2
"""Mean time that storage takes for what comes last."""

MOST_ASKED = 36
"""How often a shard is asked to go on writing: one that stands still is to be there again before clients give it up."""


@dataclass(frozen=True)
class SavedSlot:
    """A slot, and the bytes of what it has: 0 its value, i state buffer i."""

    record: SlotRecord
    parts: Mapping[int, bytes]


Saved = Mapping[int, SavedSlot]
"""By key."""


@dataclass(frozen=True)
class Archived:
    """A checkpoint. What of a `checkpoint.reader.Checkpoint` a store is restored from."""

    store: StoreState
    workers: Sequence[WorkerPart]
    shards: Mapping[int, Saved]

    @property
    def version(self) -> int:
        return self.store.decision

    def value(self, key: int) -> bytes | None:
        """b'' stands for zeros; None: it has none."""
        slot = next((slots[key] for slots in self.shards.values() if key in slots), None)
        return slot.parts.get(0, b"") if slot is not None and slot.record.parts else None

    def slots(self) -> Iterator[SlotRecord]:
        return (slot.record for shard in self.shards.values() for slot in shard.values())

    def read(self, keys: Collection[int], into: Target) -> Iterator[ReadSlice]:
        for shard in self.shards.values():
            for key, slot in shard.items():
                for part, data in slot.parts.items() if key in keys else ():
                    target = into(slot.record, part, len(data))
                    target[:] = data
                    yield ReadSlice(slot.record, part, target)

    @property
    def ranks(self) -> list[int]:
        return [part.rank for part in self.workers]

    def worker(self, rank: int) -> WorkerPart:
        return next(part for part in self.workers if part.rank == rank)


@dataclass
class Archive:
    """All there is."""

    files: dict[str, tuple[int, Saved]] = field(default_factory=dict)
    """Name of a shard's file -> (shard, what is in it)."""
    checkpoints: list[Archived] = field(default_factory=list)


class SimulatedPlace:
    """A `KeptPlace`."""

    url = "sim://archive"
    has_failed = False

    def __init__(self, world: World, archive: Archive) -> None:
        self._world = world
        self._archive = archive
        self._numbers = itertools.count()
        self.is_gone = False
        """The process that writes there is dead."""

    def is_ready(self) -> bool:
        return True

    def begin(self, version: int, *, has_rows: bool) -> tuple[str, int | None]:
        return f"{version}.{next(self._numbers)}", None

    def keep(
        self, name: str, state: StoreState, parts: Sequence[WorkerPart], records: Sequence[FileRecord]
    ) -> Future[None]:
        future: Future[None] = Future()

        def done() -> None:
            if self.is_gone:
                return
            shards = dict(self._archive.files[record.name] for record in records)
            self._archive.checkpoints.append(Archived(state, parts, shards))
            future.set_result(None)

        self._world.after(self._world.rng.expovariate(1.0 / SLOW_S), done)
        return future

    def abandon(self, version: int) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedSaver:
    """A `protocol.saving.Saver`: each time that it is asked it writes another slot, or a few where there are many, and
    training goes on between."""

    def __init__(self, archive: Archive, shard: _core.Shard, index: int) -> None:
        self._archive = archive
        self._shard = shard
        self._index = index
        self._attempt = ""
        self._image: _core.TableImage | None = None
        self._left: list[SlotRecord] = []
        self._num_at_once = 1
        self._written: dict[int, SavedSlot] = {}
        self._error: PsstoreError | None = None

    def save(self, fact: SaveFact, tensors: Mapping[int, Tensor]) -> bytes | None:
        """See protocol/saving.py."""
        if fact.attempt != self._attempt:
            self._attempt, self._image, self._written, self._error = fact.attempt, None, {}, None
        if self._error is not None:
            raise self._error
        try:
            return self._write(fact)
        except PsstoreError as error:
            self._error = error
            raise

    def _write(self, fact: SaveFact) -> bytes | None:
        if self._image is None:
            self._image = self._shard.image(fact.reader, fact.version)
            self._left = [] if self._image is None else list(SlotTable(self._image.slots))
            self._num_at_once = 1 + len(self._left) // MOST_ASKED
            return None
        if self._left:
            for _ in range(min(self._num_at_once, len(self._left))):
                slot = self._left.pop()
                self._written[slot.key] = self._read(self._image, slot)
            return None
        name = f"{self._index}.{fact.attempt}"
        self._archive.files[name] = self._index, self._written
        return msgspec.json.encode(FileRecord(name=name, kind="shard", index=self._index, num_bytes=0, digest="0" * 64))

    def _read(self, image: _core.TableImage, slot: SlotRecord) -> SavedSlot:
        parts = {part: self._shard.read_image(image, [(slot.key, part)]) for part in range(8) if slot.has(part)}
        return SavedSlot(slot, {part: b"".join(read) for part, read in parts.items()})
