"""Writes a checkpoint: each shard and worker its own file, beside the others, and then one of them the manifest.

Until the manifest is there, there is no checkpoint. Whoever commits needs the files' records only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from psstore.checkpoint.file_writer import TensorFileWriter
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import (
    DELTA_FORMAT,
    FORMAT,
    MANIFEST,
    BaseRecord,
    FileRecord,
    Manifest,
    check_manifest,
    encode_manifest,
)
from psstore.checkpoint.shard_file import SHARD_KIND, ShardPiece, metadata_of, plan_shard_file
from psstore.checkpoint.slots import SlotTable
from psstore.checkpoint.state import ShardState, StoreState, TensorRecord
from psstore.checkpoint.storage import Storage, where, write_all
from psstore.checkpoint.url import folder_of
from psstore.errors import CheckpointDamaged, InternalError
from psstore.release import __version__


def new_attempt() -> str:
    """A name for one attempt at one version: whoever begins it draws it, and all its writers are told."""
    return secrets.token_hex(4)


class ShardFileWriter:
    """One shard's file. `pieces` says what `write` expects, in its order; else as `TensorFileWriter`."""

    def __init__(
        self,
        storage: Storage,
        *,
        attempt: str,
        state: ShardState,
        tensors: Sequence[TensorRecord],
        table: SlotTable,
        pool: HashPool,
        changed: Mapping[int, int] | None = None,
    ) -> None:
        """`tensors`: the catalogue, as the manifest will have it. `changed`: of a delta, how many rows of each
        partition have changed since its base, by key. Raises ValueError for slots that do not fit it, and
        StorageFailed."""
        plan = plan_shard_file(tensors, table, changed)
        self.pieces: Sequence[ShardPiece] = plan.pieces
        self._index = state.index
        name = f"{SHARD_KIND}-{state.index:05d}-of-{state.num_shards:05d}.{attempt}.safetensors"
        metadata = metadata_of(state, changed, format_number=FORMAT if changed is None else DELTA_FORMAT)
        self._file = TensorFileWriter(storage, f"{folder_of(state.version)}/{name}", plan.entries, metadata, pool=pool)
        try:
            self._file.write([table.content])
        except BaseException:
            self._file.abandon()
            raise

    def write(self, views: Sequence[memoryview]) -> None:
        """The next of `pieces`."""
        self._file.write(views)

    def finish(self) -> FileRecord:
        return self._file.finish(kind=SHARD_KIND, index=self._index)

    def abandon(self) -> None:
        self._file.abandon()

    def __enter__(self) -> ShardFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def commit(
    storage: Storage,
    *,
    attempt: str,
    store: StoreState,
    files: Sequence[FileRecord],
    created: float | None = None,
    base: BaseRecord | None = None,
    check: Callable[[], object] = lambda: None,
) -> Manifest:
    """Makes the files a checkpoint, once and for all. `base`: of a delta, what it is to be read with. `check`: called
    just before; what it raises leaves no checkpoint. Raises CheckpointDamaged if one of the files is not there as its
    writer said, StorageFailed, and InternalError for what can't be one, as when a shard's is missing."""
    manifest = Manifest(
        format=FORMAT if base is None else DELTA_FORMAT,
        psstore=__version__,
        version=store.decision,
        attempt=attempt,
        created=time.time() if created is None else created,
        files=tuple(sorted(files, key=lambda file: (file.kind, file.index))),
        store=store,
        base=base,
    )
    try:
        check_manifest(manifest, version=store.decision)
    except ValueError as error:
        raise InternalError(f"what was to be committed can't be a checkpoint: {error}") from None
    folder = folder_of(store.decision)
    for file in manifest.files:
        _check_there(storage, f"{folder}/{file.name}", file)
    write_all(storage, f"{folder}/{MANIFEST}", encode_manifest(manifest), check=check)
    return manifest


def _check_there(storage: Storage, path: str, file: FileRecord) -> None:
    try:
        found = storage.size(path)
    except FileNotFoundError:
        found = -1
    if found != file.num_bytes:
        came = "is not there" if found < 0 else f"has {found} bytes"
        raise CheckpointDamaged(
            f"{where(storage, path)} {came}; its writer has written {file.num_bytes} bytes: the checkpoint was not"
            " committed; write it again",
            file=path,
        )
