"""A checkpoint as whole arrays in the host's memory: what exports are made of, and imports make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from psstore import _core
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import Manifest
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import take
from psstore.checkpoint.place import CheckpointPlace
from psstore.checkpoint.reader import Checkpoint
from psstore.checkpoint.slots import ZEROS, SlotRecord, SlotTable
from psstore.checkpoint.state import HyperRecord, ShardState, StoreState, TensorRecord
from psstore.checkpoint.url import LAST_VERSION
from psstore.checkpoint.writer import ShardFileWriter
from psstore.errors import BadArgument
from psstore.partition.slicing import slice_elems
from psstore.types import Consistency, TensorSpec, slice_index

AnyArray: TypeAlias = NDArray[Any]

GRADIENT_RULE = "reduce"
"""Tensors of this rule hold reduced gradients, and no parameters: the workers took the step."""

WRITE_BYTES = 8 << 20
"""Handed to a writer at once."""


@dataclass
class WholeTensor:
    """A tensor of a store."""

    spec: TensorSpec
    value: AnyArray
    """An array of the spec's shape and dtype, as are all of its state."""
    state: dict[str, AnyArray] = field(default_factory=dict)
    """By torch's names."""
    steps: int = 0


@dataclass
class WholeModel:
    """All parameters and buffers, in the order in which they were made."""

    tensors: list[WholeTensor]
    hypers: Mapping[int, HyperRecord]
    """By parameter group."""
    version: int = 0


def read_whole_model(checkpoint: Checkpoint, *, with_state: bool = True) -> WholeModel:
    """Reads all but gradients and tables of rows, straight into arrays. Raises BadArgument for a tensor without a
    value, and what reading raises."""
    records = {
        record.id: record
        for record in checkpoint.store.tensors
        if record.spec.rule != GRADIENT_RULE and record.spec.rows is None
    }
    parts: dict[tuple[int, int], AnyArray] = {}
    found = {number: WholeTensor(record.spec, _empty(record)) for number, record in records.items()}
    for number, tensor in found.items():
        parts[number, 0] = tensor.value
    keys = []
    for slot in checkpoint.slots():
        number = slot.key >> _core.SLICE_INDEX_BITS
        if number not in records:
            continue
        record, tensor = records[number], found[number]
        if not slot.parts & (1 | ZEROS):
            raise BadArgument(
                f"tensor {record.spec.name!r} has no value in version {checkpoint.version}; it has never had"
            )
        tensor.steps = max(tensor.steps, slot.steps)
        for part, name in enumerate(record.part_names[1:], 1):
            if with_state and slot.has(part) and name not in tensor.state:
                parts[number, part] = tensor.state[name] = _empty(record)
        keys.append(slot.key)

    def into(slot: SlotRecord, part: int, num_bytes: int) -> memoryview:
        number = slot.key >> _core.SLICE_INDEX_BITS
        if (number, part) not in parts:
            return memoryview(bytearray(num_bytes))
        begin, end = records[number].bounds(slice_index(slot.key))
        return memoryview(parts[number, part].reshape(-1)[begin:end]).cast("B")

    for _ in checkpoint.read(frozenset(keys), into):
        pass
    return WholeModel(list(found.values()), checkpoint.store.hypers, checkpoint.version)


def write_whole_model(place: CheckpointPlace, model: WholeModel) -> Manifest:
    """Writes a checkpoint of one shard, as whose owner meanwhile. Raises BadArgument if the place has that version or a
    newer one, CheckpointPlaceTaken, StorageFailed."""
    if model.version > LAST_VERSION:
        raise BadArgument(f"what is imported would be version {model.version}; versions go up to {LAST_VERSION}")
    tensors = tuple(
        TensorRecord(id=number, spec=tensor.spec, slice_elems=_cut(tensor.spec))
        for number, tensor in enumerate(model.tensors, 1)
    )
    there = [version for version in place.folders() if place.has(version)]
    if there and there[-1] >= model.version:
        raise BadArgument(
            f"{place.storage.url} has version {there[-1]}, and what is imported would be version {model.version}:"
            " choose another place, or a higher version"
        )
    ownership = take(place.storage)
    try:
        owned = OwnedPlace(place, ownership, keep=1)
        attempt = owned.begin(model.version)
        state = StoreState(
            decision=model.version,
            consistency=Consistency(),
            tensors=tensors,
            next_tensor_id=len(tensors) + 1,
            hypers=model.hypers,
        )
        with HashPool() as pool, _writer(place, state, model, attempt, pool) as writer:
            for views in _batches(writer, tensors, model):
                writer.write(views)
            return owned.commit(state, [writer.finish()])
    finally:
        ownership.release()


def _writer(
    place: CheckpointPlace, state: StoreState, model: WholeModel, attempt: str, pool: HashPool
) -> ShardFileWriter:
    slots = [
        SlotRecord(record.key(index), model.version, tensor.steps, _parts(record, tensor))
        for record, tensor in zip(state.tensors, model.tensors, strict=True)
        for index in range(record.num_slices)
    ]
    return ShardFileWriter(
        place.storage,
        attempt=attempt,
        state=ShardState(index=0, num_shards=1, version=model.version),
        tensors=state.tensors,
        table=SlotTable.of(slots),
        pool=pool,
    )


def _batches(
    writer: ShardFileWriter, tensors: tuple[TensorRecord, ...], model: WholeModel
) -> Iterator[list[memoryview]]:
    by_id = {record.id: (record, tensor) for record, tensor in zip(tensors, model.tensors, strict=True)}
    some: list[memoryview] = []
    some_bytes = 0
    for piece in writer.pieces:
        record, tensor = by_id[piece.slot.key >> _core.SLICE_INDEX_BITS]
        array = tensor.state[record.part_names[piece.part]] if piece.part else tensor.value
        begin, end = record.bounds(slice_index(piece.slot.key))
        some.append(memoryview(np.ascontiguousarray(array).reshape(-1)[begin:end]).cast("B"))
        some_bytes += piece.num_bytes
        if some_bytes >= WRITE_BYTES:
            yield some
            some, some_bytes = [], 0
    if some:
        yield some


def _parts(record: TensorRecord, tensor: WholeTensor) -> int:
    return sum(1 << part for part, name in enumerate(record.part_names) if part == 0 or name in tensor.state)


def _empty(record: TensorRecord) -> AnyArray:
    return np.zeros(record.spec.shape, record.spec.dtype)


def _cut(spec: TensorSpec) -> int:
    spec.check()
    return slice_elems(spec)


def as_stored(array: AnyArray) -> AnyArray:
    """The array in the dtype that a store keeps it in: float32 of half precision, float64 of whole numbers and bools,
    which holds them exactly up to 2**53. Raises BadArgument for what is none of these."""
    if array.dtype in (np.float32, np.float64):
        return np.ascontiguousarray(array)
    if array.dtype == np.float16:
        return array.astype(np.float32)
    if array.dtype.kind in "iub":
        return array.astype(np.float64)
    raise BadArgument(f"an array of {array.dtype} can't be imported; a store keeps real numbers")
