"""A worker's file: what it hands in for its own next life.

    | header | arrays, those of the largest elements first | hashes |

Arrays are 'array/NUMBER', in pieces of PIECE_BYTES. The header's metadata has the rest as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from psstore.checkpoint.file_reader import TensorFile, Wanted
from psstore.checkpoint.file_writer import TensorFileWriter
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import FORMAT, FileRecord, damaged
from psstore.checkpoint.nested import DTYPE_NAMES, Plain, PlainArray, Tree, flat_bytes, pack, unpack
from psstore.checkpoint.shard_file import FORMAT_KEY
from psstore.checkpoint.storage import Storage
from psstore.checkpoint.tensor_file import HASHES, ITEM_BYTES_OF, NOT_DECODED, FileEntry
from psstore.checkpoint.url import folder_of

PIECE_BYTES = 1 << 20
"""What of an array is hashed at once, so that a large one keeps several threads busy."""

WORKER_KIND = "worker"

_NAMES = {stored: name for name, stored in DTYPE_NAMES.items()}


class WorkerPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of one rank."""

    rank: int
    incarnation: int
    """The life that handed it in."""
    version: int
    """The decision that it had come to. Where each round has all workers that is the checkpoint's."""
    handed: Plain = None
    """Whatever the worker gave to have again: see nested.py."""


class _WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata's JSON."""

    rank: int
    incarnation: int
    version: int
    num_arrays: int
    handed: Tree


def write_worker_file(storage: Storage, part: WorkerPart, *, version: int, attempt: str, pool: HashPool) -> FileRecord:
    """Writes the file of one rank. The arrays are read until this returns. Raises BadArgument, StorageFailed."""
    arrays: list[PlainArray] = []
    tree = pack(part.handed, arrays)
    named = {f"array/{number}": array for number, array in enumerate(arrays)}
    ordered = sorted(named.items(), key=lambda one: -ITEM_BYTES_OF[DTYPE_NAMES[one[1].dtype]])
    pieces = [list(_cut(array.data)) for _, array in ordered]
    entries = [
        FileEntry(name, DTYPE_NAMES[array.dtype], array.shape, tuple(view.nbytes for view in views))
        for (name, array), views in zip(ordered, pieces, strict=True)
    ]
    state = _WorkerState(
        rank=part.rank, incarnation=part.incarnation, version=part.version, num_arrays=len(arrays), handed=tree
    )
    metadata = {FORMAT_KEY: _kind(), WORKER_KIND: msgspec.json.encode(state).decode()}
    path = f"{folder_of(version)}/{WORKER_KIND}-{part.rank:05d}.{attempt}.safetensors"
    with TensorFileWriter(storage, path, entries, metadata, pool=pool) as file:
        for views in pieces:
            file.write(views)
        return file.finish(kind=WORKER_KIND, index=part.rank)


def read_worker_file(file: TensorFile, *, pool: HashPool) -> WorkerPart:
    """All of it, in memory of its own, verified. Raises CheckpointDamaged, StorageFailed."""
    arrays = _read_arrays(file, pool)
    try:
        if file.header.metadata.get(FORMAT_KEY) != _kind():
            raise ValueError(f"its metadata says {file.header.metadata.get(FORMAT_KEY)!r}; expected {_kind()!r}")
        state = msgspec.json.decode(file.header.metadata[WORKER_KIND], type=_WorkerState)
        if state.rank != file.record.index:
            raise ValueError(f"it is that of rank {state.rank}; expected rank {file.record.index}")
        handed = unpack(state.handed, [arrays[f"array/{number}"] for number in range(state.num_arrays)])
    except (ValueError, KeyError, IndexError, TypeError, *NOT_DECODED) as error:
        raise damaged(file.name, f"what its worker handed in can't be made out: {error}") from None
    return WorkerPart(rank=state.rank, incarnation=state.incarnation, version=state.version, handed=handed)


def _read_arrays(file: TensorFile, pool: HashPool) -> dict[str, PlainArray]:
    entries = {name: entry for name, entry in file.header.entries.items() if name != HASHES}
    found = {
        name: PlainArray(_NAMES[entry.dtype], entry.shape, memoryview(bytearray(entry.end - entry.begin)))
        for name, entry in entries.items()
    }
    for _ in file.read(_wanted(file, [(entries[name].begin, one.data) for name, one in found.items()]), pool=pool):
        pass
    return found


def _wanted(file: TensorFile, targets: Sequence[tuple[int, memoryview]]) -> Iterator[Wanted[None]]:
    """The pieces behind the header, each into its part of the entry that it belongs to."""
    whole = iter(targets)
    begin, target = 0, memoryview(b"")
    for index in range(1, len(file)):
        first, last = file.bounds(index)
        while first >= begin + target.nbytes and first < last:
            begin, target = next(whole)
        yield Wanted(index, target[first - begin : last - begin], None)


def _cut(data: memoryview) -> Iterator[memoryview]:
    flat = flat_bytes(data)
    edges = [*range(0, flat.nbytes, PIECE_BYTES), flat.nbytes]
    return (flat[begin:end] for begin, end in pairwise(edges))


def _kind() -> str:
    return f"{WORKER_KIND} {FORMAT}"
