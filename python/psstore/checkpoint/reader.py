"""Reads a checkpoint of any number of shards into any number: whoever reads names the slices that it wants.

What is handed out is verified. What is only looked at costs little: opening reads the manifest, asking for slots reads
the tables of slots, and slices are read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

from psstore.checkpoint.delta import read_over
from psstore.checkpoint.file_reader import TensorFile, verify_file
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BaseRecord,
    FileRecord,
    Manifest,
    damaged,
    decode_manifest,
    manifest_digest,
)
from psstore.checkpoint.shard_file import SHARD_KIND
from psstore.checkpoint.shard_reader import ReadSlice, ShardFile, Target
from psstore.checkpoint.slots import SlotRecord
from psstore.checkpoint.state import StoreState, TensorRecord
from psstore.checkpoint.storage import Storage, read_all, where
from psstore.checkpoint.tensor_file import NOT_DECODED
from psstore.checkpoint.url import folder_of
from psstore.checkpoint.worker_file import WORKER_KIND, WorkerPart, read_worker_file
from psstore.errors import BadArgument, CheckpointDamaged, CheckpointNotFound


class Checkpoint:
    """One complete checkpoint, opened. Close it, or use it in a `with`. Thread-safe; every call blocks."""

    def __init__(self, storage: Storage, version: int, *, pool: HashPool | None = None) -> None:
        """Reads the manifest, and that of its base. Raises CheckpointNotFound if there is none, CheckpointDamaged,
        CheckpointUnsupported and StorageFailed. `pool`: whose threads verify; None makes one."""
        self._storage = storage
        self._folder = folder_of(version)
        self.manifest = read_manifest(storage, version)
        if self.manifest.base is not None:
            read_base(storage, self.manifest.base, version=version)
        self.pool = HashPool() if pool is None else pool
        self._owns_pool = pool is None
        self._files: dict[str, TensorFile] = {}

    @property
    def version(self) -> int:
        """The decision that it is at."""
        return self.manifest.version

    @property
    def store(self) -> StoreState:
        """The coordinator's part."""
        return self.manifest.store

    @cached_property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The catalogue, by name."""
        return {tensor.spec.name: tensor for tensor in self.store.tensors}

    @cached_property
    def base(self) -> Checkpoint | None:
        """What it is to be read with, if it is a delta."""
        base = self.manifest.base
        return None if base is None else Checkpoint(self._storage, base.version, pool=self.pool)

    @cached_property
    def shards(self) -> Sequence[ShardFile]:
        """Files of the shards that wrote it, as many as they were."""
        return [
            ShardFile(self.file(record), self.store.tensors, is_delta=self.manifest.base is not None)
            for record in self.manifest.of_kind(SHARD_KIND)
        ]

    def file(self, record: FileRecord) -> TensorFile:
        """A file of the manifest, with header and hashes verified."""
        if record.name not in self._files:
            self._files[record.name] = TensorFile(self._storage, f"{self._folder}/{record.name}", record)
        return self._files[record.name]

    def slots(self) -> Iterator[SlotRecord]:
        """All slots, shard by shard. Raises CheckpointDamaged for one that two shards have."""
        seen: set[int] = set()
        for record, shard in zip(self.manifest.of_kind(SHARD_KIND), self.shards, strict=True):
            for slot in shard.table:
                if slot.key in seen:
                    raise damaged(
                        where(self._storage, f"{self._folder}/{record.name}"), f"slot {slot.key:#x} is also in another"
                    )
                seen.add(slot.key)
                yield slot

    def read(self, keys: Collection[int] | None, into: Target) -> Iterator[ReadSlice]:
        """Reads what there is of the slices with these keys, of all if None: values and rule state, straight into the
        memory that `into` gives for each. Yields each once it is verified, in the order of the files; `into` is asked
        up to 32 MiB ahead. Raises CheckpointDamaged: what has been yielded is right, nothing else is."""
        wanted = None if keys is None else frozenset(keys)
        for shard in self.shards:
            if self.base is None:
                yield from shard.read(wanted, into, pool=self.pool)
            else:
                yield from read_over(self.base.read, shard, self.store.tensors, wanted, into, pool=self.pool)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Workers that have handed something in."""
        return tuple(record.index for record in self.manifest.of_kind(WORKER_KIND))

    def worker(self, rank: int) -> WorkerPart:
        """What a rank has handed in, in memory of its own. Raises BadArgument if it has not."""
        for record in self.manifest.of_kind(WORKER_KIND):
            if record.index == rank:
                return read_worker_file(self.file(record), pool=self.pool)
        raise BadArgument(f"rank {rank} has handed nothing in for version {self.version}; ranks {self.ranks} have")

    def close(self) -> None:
        if self._owns_pool:
            self.pool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_manifest(storage: Storage, version: int) -> Manifest:
    """Raises CheckpointNotFound, CheckpointDamaged, CheckpointUnsupported, StorageFailed."""
    return _decoded(storage, version, _manifest_content(storage, version))


def read_base(storage: Storage, base: BaseRecord, *, version: int) -> Manifest:
    """The manifest of what that version is a delta of. Raises CheckpointDamaged if it is not there, or another one."""
    path = f"{folder_of(base.version)}/{MANIFEST}"
    delta = f"version {version} has what changed since version {base.version}, and can't be read without it"
    try:
        content = _manifest_content(storage, base.version)
        found = manifest_digest(content)
    except CheckpointNotFound:
        raise damaged(where(storage, path), f"it is missing; {delta}") from None
    except NOT_DECODED as error:
        raise damaged(where(storage, path), f"{error}; {delta}") from None
    if found != base.digest:
        raise damaged(where(storage, path), f"its digest is {found}; {delta}", expected=base.digest)
    return _decoded(storage, base.version, content)


def _decoded(storage: Storage, version: int, content: bytes) -> Manifest:
    return decode_manifest(content, name=where(storage, f"{folder_of(version)}/{MANIFEST}"), version=version)


def _manifest_content(storage: Storage, version: int) -> bytes:
    path = f"{folder_of(version)}/{MANIFEST}"
    try:
        return read_all(storage, path, at_most=MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointNotFound(
            f"{storage.url} has no complete checkpoint of version {version}: {where(storage, path)} is not there; list"
            " those there are with `psstore checkpoint ls`",
            url=storage.url,
            version=version,
        ) from None


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Whether the files of a manifest, and of its base's, are there and as long as it says, without reading them.
    Raises CheckpointDamaged."""
    if manifest.base is not None:
        check_sizes(storage, read_base(storage, manifest.base, version=manifest.version))
    for record in manifest.files:
        path = f"{folder_of(manifest.version)}/{record.name}"
        try:
            size = storage.size(path)
        except FileNotFoundError:
            raise damaged(where(storage, path), "it is missing", expected=f"{record.num_bytes} bytes") from None
        if size != record.num_bytes:
            raise damaged(where(storage, path), f"it has {size} bytes", expected=str(record.num_bytes))


Found = Manifest | CheckpointDamaged


def verify(
    storage: Storage,
    version: int,
    *,
    progress: Callable[[int], None] = lambda _: None,
    found: dict[int, Found] | None = None,
) -> Manifest:
    """Reads every byte of a checkpoint, and of its base, and holds it against its manifest. Raises what opening and
    reading raise; CheckpointDamaged names the first file that is wrong. `progress` is told of bytes as they are
    verified. `found`: what has come of the versions of this place that were verified before, to which this one and its
    base are added: what is there is not read again."""
    found = {} if found is None else found
    if version not in found:
        try:
            found[version] = _verified(storage, version, progress, found)
        except CheckpointDamaged as error:
            found[version] = error
    result = found[version]
    if isinstance(result, CheckpointDamaged):
        raise result
    return result


def _verified(storage: Storage, version: int, progress: Callable[[int], None], found: dict[int, Found]) -> Manifest:
    with Checkpoint(storage, version) as checkpoint:
        check_sizes(storage, checkpoint.manifest)
        if checkpoint.manifest.base is not None:
            verify(storage, checkpoint.manifest.base.version, progress=progress, found=found)
        for record in checkpoint.manifest.files:
            verify_file(checkpoint.file(record), pool=checkpoint.pool, progress=progress)
        for _ in checkpoint.slots():
            pass
        for shard in checkpoint.shards:
            _ = shard.state, shard.pieces
        for rank in checkpoint.ranks:
            checkpoint.worker(rank)
        return checkpoint.manifest
