"""What checkpoints need of a file system, and what its errors become. Two of them: the host's own, and fsspec's.

Paths are relative to the place's URL and have forward slashes. A file is written under another name, or is invisible,
until it is committed: whoever lists or reads sees whole files only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from psstore.errors import StorageFailed

PARTIAL_SUFFIX = ".partial"
"""Ends the names of files that are being written, where the file system shows them."""

ADVICE = {
    errno.ENOSPC: "free space there, or write fewer checkpoints with --keep",
    errno.EDQUOT: "free space in the quota there, or write fewer checkpoints with --keep",
    errno.EACCES: "give this user the right to it, or choose another URL",
    errno.EPERM: "give this user the right to it, or choose another URL",
    errno.EROFS: "choose a URL that can be written to",
}
"""What to do, by the system's error number."""


class Listed(NamedTuple):
    """An entry of a folder."""

    name: str
    is_folder: bool
    num_bytes: int


class Sink(Protocol):
    """A file that is being written. Not thread-safe; blocks."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends the bytes of all views, which are flat. The buffers are the caller's again afterwards. Raises
        StorageFailed."""

    def commit(self) -> None:
        """Makes the file be there, whole and durable, in place of one of that name. Raises StorageFailed."""

    def abandon(self) -> None:
        """Leaves nothing behind, as far as storage lets it. Raises nothing; after `commit` it does nothing."""


class Storage(Protocol):
    """The files below one URL. Thread-safe; every call blocks. Raises StorageFailed, and FileNotFoundError for a file
    that is to be read and is not there."""

    url: str
    gap_bytes: int
    """Bytes nobody wants that one read takes along rather than being two: what a request costs in time."""

    def create(self, path: str) -> Sink:
        """A new file; folders that it needs are made."""

    def size(self, path: str) -> int: ...

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> int:
        """Fills the targets, which are flat, one after the other, with the file's bytes from `begin` on. Returns how
        many bytes came: fewer only where the file ends."""

    def entries(self, folder: str) -> list[Listed]:
        """What is in the folder; nothing if it is not there. '' is the place itself."""

    def remove(self, path: str) -> None:
        """Removes a file; no error if it is not there."""

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder, where folders exist; no error otherwise."""

    def claim(self, path: str, content: bytes) -> bool:
        """Creates a small file unless one is there. False: one is there. Exclusive where the file system can be."""


def read_all(storage: Storage, path: str, *, at_most: int) -> bytes:
    """A small file. Raises FileNotFoundError, and StorageFailed for one of more than `at_most` bytes."""
    size = storage.size(path)
    if size > at_most:
        raise StorageFailed(f"{where(storage, path)} has {size} bytes; expected at most {at_most}", file=path)
    content = bytearray(size)
    got = storage.read(path, 0, [memoryview(content)])
    return bytes(content[:got])


def write_all(storage: Storage, path: str, content: bytes, *, check: Callable[[], object] = lambda: None) -> None:
    """A small file, whole or not at all. `check`: called when all is written, just before the file appears; what it
    raises leaves nothing behind."""
    sink = storage.create(path)
    try:
        sink.write([memoryview(content)])
        check()
        sink.commit()
    finally:
        sink.abandon()


def where(storage: Storage, path: str) -> str:
    """The file's whole name, for messages."""
    return f"{storage.url.rstrip('/')}/{path}" if path else storage.url


@contextmanager
def storage_errors(storage: Storage, path: str, doing: str, *, missing: bool = False) -> Iterator[None]:
    """Turns what a file system raises into StorageFailed, which names the file and what was being done. `missing`:
    FileNotFoundError goes through, since the caller knows what it means."""
    try:
        yield
    except StorageFailed:
        raise
    except FileNotFoundError as error:
        if missing:
            raise
        raise _failed(storage, path, doing, error) from error
    except Exception as error:  # file systems raise their libraries' own classes: botocore's, pyarrow's, aiohttp's
        raise _failed(storage, path, doing, error) from error


def _failed(storage: Storage, path: str, doing: str, error: Exception) -> StorageFailed:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    number = error.errno if isinstance(error, OSError) else None
    advice = f"; {ADVICE[number]}" if number in ADVICE else ""
    return StorageFailed(f"{where(storage, path)} could not be {doing}: {reason}{advice}", file=path)
