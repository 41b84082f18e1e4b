"""Stores as they might be at a decision, without a store: slots with random values and rule state, placed on shards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from psstore import _core
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import FileRecord, Manifest
from psstore.checkpoint.reader import Checkpoint
from psstore.checkpoint.slots import ZEROS, SlotRecord, SlotTable
from psstore.checkpoint.state import (
    ClientRecord,
    ClosedRecord,
    HyperRecord,
    NormsRecord,
    RankRecord,
    RefusalRecord,
    ShardState,
    StoreState,
    TensorRecord,
    WorkerRecord,
    WriteWindowRecord,
)
from psstore.checkpoint.storage import Storage
from psstore.checkpoint.writer import ShardFileWriter, commit
from psstore.partition.placement import place
from psstore.types import Consistency, TensorSpec, complete_hyper, slice_index

Parts = dict[int, bytes]
"""Bytes by part: 0 the value, i state buffer i."""


@dataclass
class Model:
    """A store's content: what a checkpoint of it must bring back."""

    state: StoreState
    slots: dict[int, SlotRecord] = field(default_factory=dict)
    """By key."""
    parts: dict[int, Parts] = field(default_factory=dict)

    def tensor(self, key: int) -> TensorRecord:
        return next(tensor for tensor in self.state.tensors if tensor.id == key >> _core.SLICE_INDEX_BITS)

    def keys_on(self, num_shards: int) -> list[list[int]]:
        """The keys of each shard of so many, as a store places them."""
        keys = sorted(self.slots)
        sizes = [self.tensor(key).slice_bytes(slice_index(key)) for key in keys]
        owners = place(sizes, [0] * num_shards)
        return [[key for key, owner in zip(keys, owners, strict=True) if owner == n] for n in range(num_shards)]


def specs_of_every_rule(*, elems: int = 300) -> list[TensorSpec]:
    """Tensors of each rule and dtype: several slices, one slice, a scalar, nothing at all."""
    shapes = [(3, elems), (7,), (), (0, 4)]
    return [
        TensorSpec(name=f"{rule}/{dtype} {position}", shape=shape, dtype=dtype, rule=rule, group=group, zeros=False)
        for group, rule in enumerate(_core.RULES)
        for dtype in ("float32", "float64")
        for position, shape in enumerate(shapes)
    ]


def make_model(
    specs: Sequence[TensorSpec], *, decision: int = 1234, slice_elems: int = 128, seed: int = 0, whole: bool = False
) -> Model:
    """`whole`: every slot has all its rule's state. Else any may have none, or no value."""
    rng = random.Random(seed)
    tensors = tuple(TensorRecord(id=number, spec=spec, slice_elems=slice_elems) for number, spec in enumerate(specs, 1))
    model = Model(_store_state(tensors, decision))
    for tensor in tensors:
        num_states = len(tensor.part_names) - 1
        for index in range(tensor.num_slices):
            size = tensor.slice_bytes(index)
            parts = 1 | sum(1 << i for i in range(1, num_states + 1) if whole or rng.random() < 0.8)
            if not whole and rng.random() < 0.1:
                parts = rng.choice([0, ZEROS])
            key = tensor.key(index)
            model.slots[key] = SlotRecord(key, rng.randrange(decision + 2), rng.randrange(1000), parts)
            model.parts[key] = {part: rng.randbytes(size) for part in range(4) if parts >> part & 1}
    return model


def _store_state(tensors: tuple[TensorRecord, ...], decision: int) -> StoreState:
    groups = {tensor.spec.group: tensor.spec.rule for tensor in tensors}
    refused = RefusalRecord(rank=1, norm=9e9, median=1.5, limit=15.0)
    closed = ClosedRecord(incarnation=2, round=41, decision=decision, refused=refused)
    return StoreState(
        decision=decision,
        consistency=Consistency(num_workers=2, quorum=2),
        tensors=tensors,
        next_tensor_id=len(tensors) + 7,
        hypers={group: HyperRecord(rule=rule, values=complete_hyper(rule, {})) for group, rule in groups.items()},
        workers=(WorkerRecord(rank=1, incarnation=2, client="c" * 32, clock=41, state="LIVE", closed=closed),),
        incarnations={0: 1, 1: 2},
        left=(0,),
        norms=(NormsRecord(present=((1, 2), (5, 5)), norms=(1.5, 1e300)),),
        num_refused={1: 3},
        clients=(ClientRecord(client="d" * 32, answers=((7, b"\x00\xff"), (3, b""))),),
    )


def shard_state(model: Model, index: int, num_shards: int) -> ShardState:
    return ShardState(
        index=index,
        num_shards=num_shards,
        version=model.state.decision,
        windows=(
            WriteWindowRecord(
                client="c" * 32,
                channel=index,
                sequence=9 + index,
                forgotten=index,
                refused=((8, 0, 2, 34), (8, 5, 6, 38)),
            ),
        ),
        ranks=(RankRecord(rank=1, incarnation=2, decided_round=41),),
        dropped=((2, 3),) if index else (),
    )


def write_shard(
    storage: Storage, model: Model, keys: Iterable[int], state: ShardState, *, pool: HashPool, attempt: str
) -> FileRecord:
    table = SlotTable.of(model.slots[key] for key in keys)
    with ShardFileWriter(
        storage, attempt=attempt, state=state, tensors=model.state.tensors, table=table, pool=pool
    ) as writer:
        for some in batches([memoryview(model.parts[piece.slot.key][piece.part]) for piece in writer.pieces], 5):
            writer.write(some)
        return writer.finish()


def write_model(storage: Storage, model: Model, num_shards: int, *, attempt: str = "0a1b2c3d") -> Manifest:
    with HashPool(2) as pool:
        records = [
            write_shard(storage, model, keys, shard_state(model, index, num_shards), pool=pool, attempt=attempt)
            for index, keys in enumerate(model.keys_on(num_shards))
        ]
    return commit(storage, attempt=attempt, store=model.state, files=records, created=1e9)


def batches(views: Sequence[memoryview], size: int) -> Iterator[Sequence[memoryview]]:
    for begin in range(0, len(views), size):
        yield views[begin : begin + size]


def read_model(checkpoint: Checkpoint, num_shards: int) -> Model:
    """Read by so many shards, each asking for its own slices only."""
    model = Model(checkpoint.store, slots={slot.key: slot for slot in checkpoint.slots()})
    for keys in model.keys_on(num_shards):
        for key, parts in read_parts(checkpoint, frozenset(keys)).items():
            model.parts.setdefault(key, {}).update(parts)
    return model


def read_parts(checkpoint: Checkpoint, keys: frozenset[int] | None) -> dict[int, Parts]:
    found: dict[int, Parts] = {}
    for one in checkpoint.read(keys, lambda slot, part, num_bytes: memoryview(bytearray(num_bytes))):
        assert one.part not in found.setdefault(one.slot.key, {}), "a part came twice"
        found[one.slot.key][one.part] = bytes(one.target)
    assert keys is None or set(found) <= keys
    return found


def sha256(model: Model) -> str:
    """Of all that there is of the slots."""
    digest = hashlib.sha256()
    for key in sorted(model.slots):
        digest.update(repr(model.slots[key]).encode())
        for part, content in sorted(model.parts.get(key, {}).items()):
            digest.update(part.to_bytes(1, "little") + content)
    return digest.hexdigest()


def differences(first: Mapping[int, Parts], second: Mapping[int, Parts]) -> list[int]:
    return sorted(key for key in {*first, *second} if first.get(key, {}) != second.get(key, {}))
