"""Checkpoints on a mounted file system, by the system's own calls: durable, atomic, and read into given memory.

A file is written under a temporary name of its own, brought to the disk (fsync), renamed, and its folder brought to the
disk: after a power cut it is there whole, or it is not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from psstore.checkpoint.storage import PARTIAL_SUFFIX, Listed, storage_errors
from psstore.errors import BadArgument

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

UNSUPPORTED = frozenset({errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What file systems say to hard links, and to a folder that is to be brought to the disk, that know of no such thing:
FAT, SMB, and many in user space, as clouds' drives are."""

MAX_VIEWS = 1024
"""Buffers that one call of the system takes: Linux's IOV_MAX."""

SYNC_FILE_RANGE_WRITE = 2
"""linux/fs.h: begin to write what is dirty and not being written yet."""

_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)

PARTIAL_S = 3600.0
"""How old what a small file is written as has to be for its writer to be dead."""

SEND_BYTES = 4 << 20
"""What a disk is given to write at once: large against a seek, small against a file."""


class LocalStorage:
    """The files below one folder."""

    gap_bytes = 0

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Raises BadArgument for a path below the home of a user that has none here."""
        try:
            self.root = Path(root).expanduser().absolute()
        except RuntimeError:
            raise BadArgument(f"{root}: nobody knows whose home that is; give the folder itself") from None
        self.url = str(self.root)

    def create(self, path: str) -> LocalSink:
        with storage_errors(self, path, "created"):
            return LocalSink(self, path)

    def size(self, path: str) -> int:
        with storage_errors(self, path, "looked at", missing=True):
            return os.stat(self.root / path).st_size

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> int:
        with storage_errors(self, path, "read", missing=True):
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read(fd, begin, targets)
            finally:
                os.close(fd)

    def entries(self, folder: str) -> list[Listed]:
        with storage_errors(self, folder, "listed"):
            try:
                with os.scandir(self.root / folder) as found:
                    return sorted(_listed(entry) for entry in found)
            except FileNotFoundError:
                return []

    def remove(self, path: str) -> None:
        with storage_errors(self, path, "removed"), suppress(FileNotFoundError):
            os.unlink(self.root / path)

    def remove_folder(self, path: str) -> None:
        with storage_errors(self, path, "removed"), suppress(FileNotFoundError):
            try:
                os.rmdir(self.root / path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def claim(self, path: str, content: bytes) -> bool:
        """Atomic: the file appears under its name with its content, or another one was there first. Where the file
        system has no hard links it appears before its content. What dead writers of that file have left is removed."""
        target = self.root / path
        with storage_errors(self, path, "created"):
            _make_folder(target.parent)
            _sweep(target)
            partial = _partial(target)
            _write_new(partial, content)
            try:
                _link(partial, target, content)
            except FileExistsError:
                return False
            finally:
                with suppress(OSError):  # what counts is told by then
                    os.unlink(partial)
            _sync_folder(target.parent)
            return True


class LocalSink:
    """A file under a temporary name."""

    def __init__(self, storage: LocalStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._target = storage.root / path
        _make_folder(self._target.parent)
        self._partial = _partial(self._target)
        self._fd = os.open(self._partial, NEW_FILE, 0o666)
        self._num_bytes = self._num_sent_bytes = 0

    def write(self, views: Sequence[memoryview]) -> None:
        with storage_errors(self._storage, self._path, "written"):
            for some in _batches(views):
                _write(self._fd, some)
                self._num_bytes += sum(view.nbytes for view in some)
            self._send()

    def commit(self) -> None:
        with storage_errors(self._storage, self._path, "brought to the disk"):
            os.fsync(self._fd)
            self._close()
            os.rename(self._partial, self._target)
            _sync_folder(self._target.parent)

    def abandon(self) -> None:
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self._partial)

    def _send(self) -> None:
        """Has the disk work while others hash, so that fsync has less to wait for."""
        if self._num_bytes - self._num_sent_bytes >= SEND_BYTES:
            _begin_writeback(self._fd, self._num_sent_bytes, self._num_bytes - self._num_sent_bytes)
            self._num_sent_bytes = self._num_bytes

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _begin_writeback(fd: int, begin: int, num_bytes: int) -> None:
    """Asks the system to begin to write these bytes to the disk, and waits for nothing (sync_file_range(2), which
    Python's os lacks). Where it does not, all is left to fsync."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, ctypes.c_int64(begin), ctypes.c_int64(num_bytes), SYNC_FILE_RANGE_WRITE)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def _sweep(target: Path) -> None:
    for partial in target.parent.glob(f".{target.name}.*{PARTIAL_SUFFIX}"):
        with suppress(OSError):
            if time.time() - os.stat(partial).st_mtime > PARTIAL_S:
                os.unlink(partial)


def _link(partial: Path, target: Path, content: bytes) -> None:
    """Gives a file with that content its name, unless that is another one's. Raises FileExistsError, OSError."""
    try:
        os.link(partial, target)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    _write_new(target, content)


def _write_new(path: Path, content: bytes) -> None:
    """A file with that content, which is on the disk. Raises FileExistsError, OSError; then there is none of it."""
    fd = os.open(path, NEW_FILE, 0o666)
    try:
        _write(fd, [memoryview(content)])
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """With those above it, each of them durable."""
    if os.path.isdir(folder):
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):  # another shard was first
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def _listed(entry: os.DirEntry[str]) -> Listed:
    try:
        return Listed(entry.name, entry.is_dir(), entry.stat().st_size)
    except FileNotFoundError:  # renamed or removed since
        return Listed(entry.name, False, 0)


def _batches(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    full = [view for view in views if view.nbytes]
    for begin in range(0, len(full), MAX_VIEWS):
        yield full[begin : begin + MAX_VIEWS]


def _write(fd: int, views: list[memoryview]) -> None:
    while views:
        views = _after(views, os.writev(fd, views))


def _read(fd: int, begin: int, targets: Sequence[memoryview]) -> int:
    got = 0
    for views in _batches(targets):
        while views:
            some = os.preadv(fd, views, begin + got)
            if some == 0:
                return got
            got += some
            views = _after(views, some)
    return got


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views behind so many bytes."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
