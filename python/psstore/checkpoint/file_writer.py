"""Writes one file of a checkpoint as a stream of pieces, each hashed while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import TracebackType

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.nested import flat_bytes
from psstore.checkpoint.storage import Storage
from psstore.checkpoint.tensor_file import FileEntry, Hashes, digest_of, encode_header
from psstore.errors import InternalError

INLINE_BYTES = 128 << 10
"""What is less is hashed by the caller's thread: to hand it over takes as long."""


class TensorFileWriter:
    """One file, from its header to its hashes. Not thread-safe; each file has a writer, and they run side by side.

    Use it in a `with`: left without `finish`, it leaves no file behind.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        entries: Sequence[FileEntry],
        metadata: Mapping[str, str],
        *,
        pool: HashPool,
    ) -> None:
        """`path`: in the place; its last part becomes the record's name. Raises StorageFailed."""
        header = encode_header(entries, metadata)
        self._name = path.rpartition("/")[2]
        self._pool = pool
        self._expected = list(chain.from_iterable(entry.pieces for entry in entries))
        self._hashes = bytearray()
        self._num_pieces = 0
        self._num_bytes = 0
        self._sink = storage.create(path)
        try:
            self._append([memoryview(header)])
        except BaseException:
            self._sink.abandon()
            raise

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends the next pieces, one view each, of any format but contiguous. Returns when the buffers are the
        caller's again. Large calls are hashed on several threads: some MiB are good. Raises StorageFailed."""
        done = self._num_pieces - 1
        sizes = [view.nbytes for view in views]
        if sizes != self._expected[done : done + len(sizes)]:
            raise InternalError(
                f"{self._name}: pieces of {sizes[:8]} bytes came as number {done} and on; expected"
                f" {self._expected[done : done + min(8, len(sizes))]}"
            )
        self._append([flat_bytes(view) for view in views])

    def finish(self, *, kind: str, index: int) -> FileRecord:
        """Writes the hashes and makes the file durable. Nothing refers to it before a manifest does."""
        if self._num_pieces != 1 + len(self._expected):
            raise InternalError(f"{self._name}: {self._num_pieces - 1} of {len(self._expected)} pieces were written")
        hashes = bytes(self._hashes)
        self._sink.write([memoryview(hashes)])
        self._sink.commit()
        return FileRecord(
            name=self._name,
            kind=kind,
            index=index,
            num_bytes=self._num_bytes + len(hashes),
            digest=digest_of(hashes).hex(),
        )

    def abandon(self) -> None:
        """Removes what was written, unless it is finished."""
        self._sink.abandon()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.abandon()

    def _append(self, views: Sequence[memoryview]) -> None:
        num_bytes = sum(view.nbytes for view in views)
        if num_bytes < INLINE_BYTES:
            digests = [digest_of(view) for view in views]
            self._sink.write(views)
        else:
            pending = self._pool.digests(views)
            try:
                self._sink.write(views)
            finally:
                digests = pending.result()  # in any case: the buffers are the caller's again
        for view, digest in zip(views, digests, strict=True):
            self._hashes += Hashes.encode(view.nbytes, digest)
        self._num_pieces += len(views)
        self._num_bytes += num_bytes
