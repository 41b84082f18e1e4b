"""Gives a shard that has just begun what a checkpoint has for it, whatever number of shards wrote that."""

from __future__ import annotations

from collections.abc import Sequence

from psstore import _core
from psstore.checkpoint.handed import pack_handed
from psstore.checkpoint.place import open_place
from psstore.checkpoint.reader import Checkpoint
from psstore.checkpoint.slots import SlotRecord
from psstore.checkpoint.worker_file import WorkerPart
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.hand_ins import HandedIn
from psstore.protocol.shard_facts import ShardFacts
from psstore.server.store_state import placed, restore_coordinator
from psstore.types import Tensor


def restore(
    url: str,
    version: int,
    facts: ShardFacts,
    coordinator: Coordinator | None,
    *,
    index: int,
    num_shards: int,
    goes_on: bool,
) -> None:
    """Reads what is the shard's, and on shard 0 the coordinator's part; blocks. `goes_on`: the store has the workers
    that it had. Raises StorageError, OutOfMemory."""
    with open_place(url).place.open(version) as checkpoint:
        restore_from(checkpoint, facts, coordinator, index=index, num_shards=num_shards, goes_on=goes_on)


def restore_from(
    checkpoint: Checkpoint,
    facts: ShardFacts,
    coordinator: Coordinator | None,
    *,
    index: int,
    num_shards: int,
    goes_on: bool,
) -> None:
    """As `restore`, of one that is open."""
    tensors = placed(checkpoint.store, num_shards=num_shards)
    facts.shard.set_version(checkpoint.version)
    for tensor in tensors:
        facts.define_tensor(tensor)
    mine = {tensor.key(part) for tensor in tensors for part, shard in enumerate(tensor.shards) if shard == index}
    _load(checkpoint, facts.shard, mine)
    if coordinator is not None:
        without_value = _without_value(checkpoint, tensors)
        restore_coordinator(coordinator, checkpoint.store, tensors, without_value=without_value, goes_on=goes_on)
        coordinator.rounds.hand_ins.restore({rank: _handed(checkpoint.worker(rank)) for rank in checkpoint.ranks})


def _load(checkpoint: Checkpoint, shard: _core.Shard, mine: set[int]) -> None:
    """A slot is loaded once all of its parts are here: those of one tensor lie together in a file."""
    for slot in checkpoint.slots():
        if slot.key in mine and not slot.parts & _HAS_BYTES and slot.version | slot.steps:
            shard.load(slot.key, slot.version, slot.steps, [])
    parts: dict[int, dict[int, _core.Buffer]] = {}

    def into(slot: SlotRecord, part: int, num_bytes: int) -> memoryview:
        buffer = shard.allocate(num_bytes)
        parts.setdefault(slot.key, {})[part] = buffer
        return memoryview(buffer)

    left: dict[int, int] = {}
    for one in checkpoint.read(mine, into):
        slot = one.slot
        left[slot.key] = left.get(slot.key, (slot.parts & _HAS_BYTES).bit_count()) - 1
        if left[slot.key] == 0:
            del left[slot.key]
            read = parts.pop(slot.key)
            one.target.release()
            buffers = [read.get(part) for part in range(max(read) + 1)]
            shard.load(slot.key, slot.version, slot.steps, buffers, slot.num_rows)


_HAS_BYTES = 0xFF
"""Bits of `SlotRecord.parts` that stand for arrays in the file."""


def _handed(part: WorkerPart) -> HandedIn:
    return HandedIn(incarnation=part.incarnation, version=part.version, state=pack_handed(part.handed))


def _without_value(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> list[int]:
    """Ids of the tensors that a slice of has no value."""
    have = {slot.key for slot in checkpoint.slots() if slot.parts}
    return [
        tensor.id
        for tensor in tensors
        if not tensor.spec.zeros and any(tensor.key(part) not in have for part in range(len(tensor.shards)))
    ]
