"""Where checkpoints of a run go: the store's own keeper, and in place of storage this. Nothing blocks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from psstore import _core
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart
from psstore.types import Tensor
from psstore.wire.messages import SaveFact

from .world import World

SLOW_S = 0.2
"""Mean time that storage takes for what comes last."""

Values = Mapping[int, bytes]
"""Value of each slot that has one, by key; b'' stands for zeros."""


@dataclass(frozen=True)
class Archived:
    """A checkpoint."""

    state: StoreState
    parts: Sequence[WorkerPart]
    shards: Mapping[int, Values]


@dataclass
class Archive:
    """All there is."""

    files: dict[str, tuple[int, Values]] = field(default_factory=dict)
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

    def is_ready(self) -> bool:
        return True

    def begin(self, version: int) -> str:
        return f"{version}.{next(self._numbers)}"

    def keep(
        self, name: str, state: StoreState, parts: Sequence[WorkerPart], records: Sequence[FileRecord]
    ) -> Future[None]:
        future: Future[None] = Future()

        def done() -> None:
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
    """A `protocol.saving.Saver`: each time that it is asked it writes another slot, and training goes on between."""

    def __init__(self, archive: Archive, shard: _core.Shard, index: int) -> None:
        self._archive = archive
        self._shard = shard
        self._index = index
        self._attempt = ""
        self._image: _core.TableImage | None = None
        self._left: list[SlotRecord] = []
        self._written: dict[int, bytes] = {}

    def save(self, fact: SaveFact, tensors: Mapping[int, Tensor]) -> bytes | None:
        """See protocol/saving.py."""
        if fact.attempt != self._attempt:
            self._attempt, self._image, self._written = fact.attempt, None, {}
        if self._image is None:
            self._image = self._shard.image(fact.reader, fact.version)
            self._left = [] if self._image is None else list(SlotTable(self._image.slots))
            return None
        if self._left:
            slot = self._left.pop()
            read = self._shard.read_image(self._image, [(slot.key, 0)]) if slot.has(0) else []
            if slot.parts:
                self._written[slot.key] = b"".join(read)
            return None
        name = f"{self._index}.{fact.attempt}"
        self._archive.files[name] = self._index, self._written
        return msgspec.json.encode(FileRecord(name=name, kind="shard", index=self._index, num_bytes=0, digest="0" * 64))
