"""Reads pieces of one file of a checkpoint into given memory, and hands out only what its hash says is right.

Verified from the manifest down: the record's digest is that of the file's hashes, those say what its header is, and
what each piece is. So a reader of a few slices reads those, the header and the hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from psstore.checkpoint.hash_pool import MAX_READS, HashPool
from psstore.checkpoint.manifest import FileRecord, damaged
from psstore.checkpoint.nested import flat_bytes
from psstore.checkpoint.storage import Storage, where
from psstore.checkpoint.tensor_file import (
    HASHED_BYTES,
    HASHES,
    MAX_HEADER_BYTES,
    NOT_DECODED,
    FoundEntry,
    Hashes,
    Header,
    decode_header,
    digest_of,
)
from psstore.errors import BadArgument

BATCH_BYTES = 8 << 20
"""Read by one call, and verified together: as much as hashing takes on eight threads at 1 MiB each."""

BATCHES_AHEAD = MAX_READS - 1
"""Batches that are read while one is verified: together 32 MiB."""

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Wanted(Generic[Tag]):
    """A piece, where it is to go, and what the caller knows it by."""

    index: int
    target: memoryview
    tag: Tag


@dataclass(frozen=True)
class _Run(Generic[Tag]):
    """Pieces that one read brings. `targets` also has memory for what lies between them."""

    begin: int
    targets: Sequence[memoryview]
    pieces: Sequence[Wanted[Tag]]


class TensorFile:
    """One file, its header and hashes verified. Thread-safe."""

    def __init__(self, storage: Storage, path: str, record: FileRecord) -> None:
        """Reads header and hashes. Raises CheckpointDamaged, StorageFailed."""
        self.name = where(storage, path)
        self.record = record
        self._storage = storage
        self._path = path
        with self._damage():
            self._check_size()
            header, self.header = self._read_header()
            self._hashes = self._read_hashes()
            if self._hashes.bounds(0) != (0, len(header)) or self._hashes.digest(0) != digest_of(header):
                raise ValueError("its header is not the one that was written")

    def __len__(self) -> int:
        """How many pieces it has."""
        return len(self._hashes)

    def bounds(self, index: int) -> tuple[int, int]:
        """[begin, end) of a piece in the file."""
        return self._hashes.bounds(index)

    def read(self, wanted: Iterable[Wanted[Tag]], *, pool: HashPool) -> Iterator[Wanted[Tag]]:
        """Fills the target of each piece, which must be contiguous and of its size, and yields it once it is verified.
        `wanted`: ascending by index, and asked for no further ahead than is read. Raises CheckpointDamaged: what has
        been yielded is right, all other targets may hold anything."""
        under_way: deque[tuple[_Run[Tag], Future[None]]] = deque()
        try:
            for run in self._runs(wanted):
                under_way.append((run, pool.read(self._fill, run)))
                if len(under_way) > BATCHES_AHEAD:
                    yield from self._verified(*under_way.popleft(), pool)
            while under_way:
                yield from self._verified(*under_way.popleft(), pool)
        finally:
            for _, reading in under_way:  # targets are the caller's again
                reading.cancel() or reading.exception()

    def read_piece(self, index: int) -> bytearray:
        """One piece, in memory of its own."""
        begin, end = self.bounds(index)
        content = bytearray(end - begin)
        run = _Run(begin, [memoryview(content)], [Wanted(index, memoryview(content), None)])
        self._fill(run)
        self._check(run, [digest_of(content)])
        return content

    def piece_of(self, name: str) -> int:
        """Index of the piece that is the whole of an entry, or its first one. Raises CheckpointDamaged."""
        with self._damage():
            entry = self._entry(name)
            low, high = 0, len(self)
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if self.bounds(middle)[0] < entry.begin else (low, middle)
            if low == len(self) or self.bounds(low)[0] != entry.begin:
                raise ValueError(f"no piece begins with its entry {name!r}")
            return low

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """What is wrong with the content becomes CheckpointDamaged."""
        try:
            yield
        except FileNotFoundError:
            raise damaged(self.name, "it is missing", expected=f"{self.record.num_bytes} bytes") from None
        except (ValueError, *NOT_DECODED) as error:
            raise damaged(self.name, str(error)) from None

    # ---- header and hashes ----

    def _check_size(self) -> None:
        size = self._storage.size(self._path)
        if size != self.record.num_bytes:
            raise ValueError(f"it has {size} bytes; its manifest says {self.record.num_bytes}")

    def _read_header(self) -> tuple[bytes, Header]:
        length = self._read_bytes(0, 8)
        num_bytes = int.from_bytes(length, "little")
        if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, self.record.num_bytes - 8):
            raise ValueError(f"its header claims {num_bytes} bytes")
        text = self._read_bytes(8, num_bytes)
        return length + text, decode_header(text, file_bytes=self.record.num_bytes)

    def _read_hashes(self) -> Hashes:
        entry = self._entry(HASHES)
        if entry.end != self.record.num_bytes:
            raise ValueError(f"its hashes end at byte {entry.end} of {self.record.num_bytes}")
        content = self._read_bytes(entry.begin, entry.end - entry.begin)
        found = digest_of(content).hex()
        if found != self.record.digest:
            raise ValueError(f"its hashes have the digest {found}; its manifest says {self.record.digest}")
        hashes = Hashes(content)
        if hashes.end != entry.begin or entry.shape != (len(hashes), HASHED_BYTES):
            raise ValueError(f"its pieces end at byte {hashes.end}; expected {entry.begin}")
        return hashes

    def _entry(self, name: str) -> FoundEntry:
        if name not in self.header.entries:
            raise ValueError(f"it has no entry {name!r}")
        return self.header.entries[name]

    def _read_bytes(self, begin: int, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        got = self._storage.read(self._path, begin, [memoryview(content)])
        if got != num_bytes:
            raise ValueError(f"it ends at byte {begin + got}")
        return bytes(content)

    # ---- pieces ----

    def _runs(self, wanted: Iterable[Wanted[Tag]]) -> Iterator[_Run[Tag]]:
        """One for each read: pieces that follow one another, or nearly so where a request costs more than bytes."""
        pieces: list[Wanted[Tag]] = []
        targets: list[memoryview] = []
        first = last = 0
        for piece in wanted:
            begin, end = self.bounds(piece.index)
            if piece.target.nbytes != end - begin:
                raise BadArgument(f"{self.name}: memory of {piece.target.nbytes} bytes for a piece of {end - begin}")
            gap = begin - last
            if pieces and (not 0 <= gap <= self._storage.gap_bytes or end - first > BATCH_BYTES):
                yield _Run(first, targets, pieces)
                pieces, targets = [], []
            if not pieces:
                first, gap = begin, 0
            targets += [memoryview(bytearray(gap))] if gap else []
            targets.append(flat_bytes(piece.target))
            pieces.append(piece)
            last = end
        if pieces:
            yield _Run(first, targets, pieces)

    def _fill(self, run: _Run[Tag]) -> None:
        with self._damage():
            got = self._storage.read(self._path, run.begin, run.targets)
            if got != sum(target.nbytes for target in run.targets):
                raise ValueError(f"it ends at byte {run.begin + got}")

    def _verified(self, run: _Run[Tag], reading: Future[None], pool: HashPool) -> Sequence[Wanted[Tag]]:
        reading.result()
        self._check(run, pool.digests([piece.target for piece in run.pieces]).result())
        return run.pieces

    def _check(self, run: _Run[Tag], digests: Sequence[bytes]) -> None:
        for piece, digest in zip(run.pieces, digests, strict=True):
            if digest != self._hashes.digest(piece.index):
                begin, end = self.bounds(piece.index)
                what = f"bytes {begin} to {end} have the SHA-256 {digest.hex()}"
                raise damaged(self.name, what, expected=self._hashes.digest(piece.index).hex())


def verify_file(file: TensorFile, *, pool: HashPool, progress: Callable[[int], None] = lambda _: None) -> None:
    """Reads all of a file. Raises CheckpointDamaged. `progress` is told of the bytes of each piece."""
    wanted = (Wanted(index, _room(file.bounds(index)), index) for index in range(1, len(file)))
    for piece in file.read(wanted, pool=pool):
        progress(piece.target.nbytes)


def _room(bounds: tuple[int, int]) -> memoryview:
    return memoryview(bytearray(bounds[1] - bounds[0]))
