"""What a shard's file holds, and in which order: its table of slots, then the arrays of each tensor.

    | header | slots | value/w exp_avg/w … (float64) | value/a exp_avg/a … | value/b … (float32) | hashes |

An array has all slices of one tensor that the shard holds, one after the other: 'value/NAME', and 'STATE/NAME' for each
of its rule's state buffers. Each slice of it is a piece. If the shard holds all of the tensor the array has its shape,
else it is flat. Of a table the array is 'rows/NAME', a record of bytes for each row: its id (u64), its value (in the
table's dtype) and its state (float32), and, where rows are evicted, 4 bytes that eviction goes by; each partition that
has rows is a piece. If rows are admitted after some contributions, 'counted/NAME' has what each partition has counted.
Elements of 8 bytes come first, and those of 2 last, so that all are aligned; tensors by their id.

A delta's file has what has changed since another checkpoint, its base: in the place of 'rows/NAME' it has 'delta/NAME',
of which each partition that has rows is a piece: the ids of all of its rows (u64), in the order in which they lie, and
then, in that order, the records of those that changed. How many these are is in the metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from psstore import _core
from psstore.checkpoint.slots import ROWS_SHIFT, SLOT_WORDS, ZEROS, SlotRecord, SlotTable
from psstore.checkpoint.state import ShardState, TensorRecord
from psstore.checkpoint.tensor_file import NOT_DECODED, FileEntry
from psstore.types import ITEM_BYTES, slice_index

SLOTS = "slots"

FILE_DTYPES: Mapping[str, str] = {"float32": "F32", "float64": "F64"}
"""safetensors' names of what the store keeps."""

FORMAT_KEY, STATE_KEY, CHANGED_KEY = "psstore", "shard", "changed"
"""Entries of the file's metadata: what kind of file this is, the ShardState as JSON, and, of a delta, how many rows of
which partitions have changed."""

DELTA = "delta"
"""What the array of a delta is named that has changes of a table."""

ID_BYTES = 8

SHARD_KIND = "shard"


class ShardPiece(NamedTuple):
    """One slice of one array."""

    slot: SlotRecord
    part: int
    """0: the value; i: state buffer i."""
    num_bytes: int


class ShardFilePlan(NamedTuple):
    """A shard's file before its first byte."""

    entries: Sequence[FileEntry]
    """Without the hashes."""
    pieces: Sequence[ShardPiece]
    """Slices of the entries behind the slots, as they follow one another in the file."""
    table: SlotTable


FIRST_PIECE = 2
"""Pieces before those of the plan: the header, and the slots."""


def plan_shard_file(
    tensors: Iterable[TensorRecord], table: SlotTable, changed: Mapping[int, int] | None = None
) -> ShardFilePlan:
    """What a file with these slots is. `changed`: of a delta, how many rows of each partition have changed, by key.
    Raises ValueError for a slot that no tensor of the catalogue has."""
    by_id = {tensor.id: tensor for tensor in tensors}
    held = [(_tensor_of(number, by_id), list(slots)) for number, slots in groupby(table, _tensor_id)]
    held.sort(key=lambda one: -ITEM_BYTES[one[0].spec.dtype])
    entries = [FileEntry(SLOTS, "U64", (len(table), SLOT_WORDS), (table.content.nbytes,))]
    pieces: list[ShardPiece] = []
    for tensor, slots in held:
        for entry, some in _arrays(tensor, slots, changed):
            entries.append(entry)
            pieces += some
    return ShardFilePlan(entries, pieces, table)


def _arrays(
    tensor: TensorRecord, slots: Sequence[SlotRecord], changed: Mapping[int, int] | None
) -> Iterator[tuple[FileEntry, list[ShardPiece]]]:
    if tensor.spec.rows is not None:
        yield from _rows(tensor, slots, changed)
        return
    names = tensor.part_names
    for slot in slots:
        _check(tensor, slot, num_parts=len(names))
    for part, name in enumerate(names):
        pieces = [ShardPiece(slot, part, tensor.slice_bytes(slice_index(slot.key))) for slot in slots if slot.has(part)]
        if pieces:
            sizes = tuple(piece.num_bytes for piece in pieces)
            flat = (sum(sizes) // ITEM_BYTES[tensor.spec.dtype],)
            shape = tensor.spec.shape if len(pieces) == tensor.num_slices else flat
            yield FileEntry(f"{name}/{tensor.spec.name}", FILE_DTYPES[tensor.spec.dtype], shape, sizes), pieces


def _rows(
    tensor: TensorRecord, slots: Sequence[SlotRecord], changed: Mapping[int, int] | None
) -> Iterator[tuple[FileEntry, list[ShardPiece]]]:
    counted_bytes = tensor.counted_bytes
    for slot in slots:
        _check_index(tensor, slot)
        counted = slot.parts & 1 << 1 if counted_bytes else 0
        if slot.parts & (1 << ROWS_SHIFT) - 1 != (slot.num_rows > 0) | counted:
            raise ValueError(f"partition {slot.key:#x} of table {tensor.spec.name!r} has parts {slot.parts:#x}")
    rows, counts = (f"{name}/{tensor.spec.name}" for name in tensor.part_names)
    size = tensor.record_bytes
    if changed is None:
        yield from _equal(rows, size, [ShardPiece(slot, 0, slot.num_rows * size) for slot in slots if slot.num_rows])
    else:
        pieces = [
            ShardPiece(slot, 0, slot.num_rows * ID_BYTES + _changed_of(slot, changed) * size)
            for slot in slots
            if slot.num_rows
        ]
        yield from _equal(f"{DELTA}/{tensor.spec.name}", 1, pieces)
    yield from _equal(counts, counted_bytes, [ShardPiece(slot, 1, counted_bytes) for slot in slots if slot.has(1)])


def _equal(name: str, size: int, pieces: list[ShardPiece]) -> Iterator[tuple[FileEntry, list[ShardPiece]]]:
    """An array of as many bytes as the pieces have, (number, size); none without pieces."""
    if pieces:
        sizes = tuple(piece.num_bytes for piece in pieces)
        yield FileEntry(name, "U8", (sum(sizes) // size, size), sizes), pieces


def _changed_of(slot: SlotRecord, changed: Mapping[int, int]) -> int:
    number = changed.get(slot.key, 0)
    if not 0 <= number <= slot.num_rows:
        raise ValueError(f"of the {slot.num_rows} rows of partition {slot.key:#x} {number} have changed")
    return number


def _check_index(tensor: TensorRecord, slot: SlotRecord) -> None:
    if slice_index(slot.key) >= tensor.num_slices:
        raise ValueError(f"slot {slot.key:#x} is slice {slice_index(slot.key)} of {tensor.spec.name!r}, which has none")


def _check(tensor: TensorRecord, slot: SlotRecord, *, num_parts: int) -> None:
    _check_index(tensor, slot)
    known = ZEROS | (1 << num_parts) - 1
    if slot.parts & ~known or (slot.parts & ZEROS and slot.has(0)):
        raise ValueError(
            f"slot {slot.key:#x} of {tensor.spec.name!r}, rule {tensor.spec.rule}, has parts {slot.parts:#x}"
        )


def _tensor_id(slot: SlotRecord) -> int:
    return slot.key >> _core.SLICE_INDEX_BITS


def _tensor_of(number: int, by_id: Mapping[int, TensorRecord]) -> TensorRecord:
    if number not in by_id:
        raise ValueError(f"its table of slots has tensor {number}, which the catalogue lacks")
    return by_id[number]


def metadata_of(state: ShardState, changed: Mapping[int, int] | None = None, *, format_number: int) -> dict[str, str]:
    metadata = {
        FORMAT_KEY: f"{SHARD_KIND} {format_number}",
        STATE_KEY: msgspec.json.encode(state, order="sorted").decode(),
    }
    if changed is not None:
        metadata[CHANGED_KEY] = msgspec.json.encode(sorted(changed.items())).decode()
    return metadata


def changed_in(metadata: Mapping[str, str]) -> dict[int, int]:
    """How many rows of which partitions a delta has. Raises ValueError if it does not say so."""
    try:
        return dict(msgspec.json.decode(metadata.get(CHANGED_KEY, ""), type=list[tuple[int, int]]))
    except NOT_DECODED as error:
        raise ValueError(f"its metadata does not say how many rows have changed: {error}") from None


def state_in(metadata: Mapping[str, str], *, format_number: int) -> ShardState:
    """Raises ValueError if it is no shard's file, or of another format."""
    expected = f"{SHARD_KIND} {format_number}"
    if metadata.get(FORMAT_KEY) != expected:
        raise ValueError(f"its metadata says {metadata.get(FORMAT_KEY)!r}; expected {expected!r}")
    try:
        return msgspec.json.decode(metadata.get(STATE_KEY, ""), type=ShardState)
    except NOT_DECODED as error:
        raise ValueError(f"its metadata has no state of a shard: {error}") from None
