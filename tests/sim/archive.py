"""Where checkpoints of a run go: the store's own keeper, and in place of storage this. Nothing blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from psstore import _core
from psstore.checkpoint.bases import BaseChoice, Retention
from psstore.checkpoint.manifest import BaseRecord, FileRecord
from psstore.checkpoint.shard_reader import ReadSlice, Target
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart
from psstore.errors import CheckpointDamaged, PsstoreError
from psstore.types import Tensor
from psstore.wire.messages import SaveFact

from .world import World

SLOW_S = 0.2
"""Mean time that storage takes for what comes last."""

MOST_ASKED = 36
"""How often a shard is asked to go on writing: one that stands still is to be there again before clients give it up."""


@dataclass(frozen=True)
class SavedSlot:
    """A slot, and the bytes of what it has: 0 its value, i state buffer i. In a delta's file its value is what has
    changed, if it has rows."""

    record: SlotRecord
    parts: Mapping[int, bytes]


Saved = Mapping[int, SavedSlot]
"""By key."""


@dataclass(frozen=True)
class Archived:
    """A checkpoint. What of a `checkpoint.reader.Checkpoint` a store is restored from. A delta is here as it was
    read when its base was there."""

    store: StoreState
    workers: Sequence[WorkerPart]
    shards: Mapping[int, Saved]
    record: BaseRecord
    """As the base of others."""
    base: BaseRecord | None
    assigned: Mapping[str, int]
    """Table -> number of the last assignment of its rows that has to be in it: somebody was told of it before the
    checkpoint began, and before a later decision than the checkpoint's was made."""

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


@dataclass(frozen=True)
class BegunAttempt:
    """What is known of a checkpoint when it begins; see `Archived`."""

    base: BaseRecord | None
    assigned: Mapping[str, int]


@dataclass
class Archive:
    """All there is."""

    last_assigned: Callable[[int], Mapping[str, int]]
    """Decision -> table -> number of the last assignment of its rows that must be there by now, and as of that."""
    files: dict[str, tuple[int, Saved]] = field(default_factory=dict)
    """Name of a shard's file -> (shard, what is in it)."""
    attempts: Iterator[int] = field(default_factory=itertools.count)
    """Their numbers: none is another process's, too."""
    checkpoints: list[Archived] = field(default_factory=list)
    """All that there ever were."""
    there: dict[int, Archived] = field(default_factory=dict)
    """Those that are there still, by version."""

    def add(
        self, begun: BegunAttempt, state: StoreState, parts: Sequence[WorkerPart], names: Iterable[str]
    ) -> Archived:
        """Raises CheckpointDamaged if it is a delta, and can't be read."""
        shards = dict(self.files[name] for name in names)
        if begun.base is not None:
            shards = {shard: self._read_over(begun.base, saved, state) for shard, saved in shards.items()}
        record = BaseRecord(version=state.decision, digest=f"{len(self.checkpoints)}")
        one = self.there[record.version] = Archived(state, parts, shards, record, begun.base, begun.assigned)
        self.checkpoints.append(one)
        return one

    def tidy_up(self, retention: Retention) -> None:
        """Removes what is not to stay. Whatever stays can be read."""
        for version, one in sorted(self.there.items(), reverse=True):
            if retention.may_stay(version):
                retention.stays(is_complete=True, base=one.base)
            else:
                del self.there[version]
        for version, one in self.there.items():
            assert one.base is None or self._has(one.base), f"version {version} has lost its base"

    def _has(self, base: BaseRecord) -> bool:
        return base.version in self.there and self.there[base.version].record == base

    def _read_over(self, base: BaseRecord, saved: Saved, state: StoreState) -> Saved:
        """As `checkpoint.delta.read_over`."""
        if not self._has(base):
            raise CheckpointDamaged(f"version {base.version}, which {state.decision} is a delta of, is not there")
        before = self.there[base.version]
        assert before.base is None, f"version {base.version} is the base of another, and has not all rows"
        sizes = {tensor.id: tensor.record_bytes for tensor in state.tensors if tensor.spec.rows is not None}

        def whole(key: int, slot: SavedSlot) -> SavedSlot:
            size = sizes.get(key >> _core.SLICE_INDEX_BITS, 0)
            if not size or 0 not in slot.parts:
                return slot
            records = bytearray(slot.record.num_rows * size)
            _core.overlay_rows(before.value(key) or b"", slot.parts[0], size, records)
            return SavedSlot(slot.record, {**slot.parts, 0: bytes(records)})

        return {key: whole(key, slot) for key, slot in saved.items()}


class SimulatedPlace:
    """A `KeptPlace`."""

    url = "sim://archive"
    has_failed = False

    def __init__(self, world: World, archive: Archive, *, keep: int, full_every: int) -> None:
        """`keep`, `full_every`: as of an `OwnedPlace`."""
        self._world = world
        self._archive = archive
        self._keep = keep
        self._choice = BaseChoice(full_every)
        self._under_way: dict[int, BegunAttempt] = {}
        """By version."""
        self.is_gone = False
        """The process that writes there is dead."""

    def is_ready(self) -> bool:
        return True

    def begin(self, version: int, *, has_rows: bool) -> tuple[str, int | None]:
        base = self._choice.base_for(version, has_rows=has_rows)
        self._under_way[version] = BegunAttempt(base, self._archive.last_assigned(version))
        return f"{version}.{next(self._archive.attempts)}", None if base is None else base.version

    def keep(
        self, name: str, state: StoreState, parts: Sequence[WorkerPart], records: Sequence[FileRecord]
    ) -> Future[None]:
        future: Future[None] = Future()
        version = state.decision

        def done() -> None:
            if self.is_gone:
                return
            begun = self._under_way[version]
            one = self._archive.add(begun, state, parts, [record.name for record in records])
            del self._under_way[version]
            self._choice.written(one.record, begun.base)
            self._archive.tidy_up(Retention(self._keep, (one.base for one in self._under_way.values())))
            future.set_result(None)

        self._world.after(self._world.rng.expovariate(1.0 / SLOW_S), done)
        return future

    def abandon(self, version: int) -> None:
        self._under_way.pop(version, None)

    def leave(self) -> None:
        """See KeptPlace."""

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
        self._is_chosen = False
        """Which rows of the image a delta is to have."""
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
            self._is_chosen = False
            return None
        if fact.since is not None and not self._is_chosen:
            self._choose_changed(self._image, fact.since)
            return None
        if self._left:
            for _ in range(min(self._num_at_once, len(self._left))):
                slot = self._left.pop()
                self._written[slot.key] = self._read(self._image, slot)
            return None
        name = f"{self._index}.{fact.attempt}"
        self._archive.files[name] = self._index, self._written
        return msgspec.json.encode(FileRecord(name=name, kind="shard", index=self._index, num_bytes=0, digest="0" * 64))

    def _choose_changed(self, image: _core.TableImage, since: int) -> None:
        for slot in self._left:
            if slot.num_rows:
                self._shard.choose_changed(image, slot.key, since)
        self._is_chosen = True

    def _read(self, image: _core.TableImage, slot: SlotRecord) -> SavedSlot:
        parts = {part: self._shard.read_image(image, [(slot.key, part)]) for part in range(8) if slot.has(part)}
        return SavedSlot(slot, {part: b"".join(read) for part, read in parts.items()})
