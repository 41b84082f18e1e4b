"""Checkpoints on whatever fsspec opens: object stores, HDFS, memory.

On an object store a file is there once its upload is complete, so it is written under its own name. On any other file
system it would be seen half-written, so it is written under another name and then moved.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from psstore.checkpoint.storage import PARTIAL_SUFFIX, Listed, storage_errors
from psstore.errors import BadArgument, StorageFailed

OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "ocilake", "tos", "obs", "hf", "r2"}
)
"""Protocols whose files appear whole, when they are closed, and that have no renaming: there it is a copy."""

INSTALL = "pip install 'psstore[storage]', and the library of that kind of storage: s3fs, gcsfs, adlfs, pyarrow"


def open_remote(url: str, **options: Any) -> RemoteStorage:
    """`options`: fsspec's, of that kind of storage. Raises BadArgument for what fsspec can't open, and StorageFailed
    where a kind of storage that is connected to at once, as FTP, is not there."""
    try:
        core = import_module("fsspec.core")
        fs, root = core.url_to_fs(url, **options)
    except (ImportError, ValueError, TypeError) as error:
        raise BadArgument(f"{url} can't be opened: {error}; {INSTALL}") from error
    except Exception as error:  # its library's own classes, too
        raise StorageFailed(f"{url} could not be opened: {type(error).__name__}: {error}", file=url) from error
    return RemoteStorage(fs, root, url)


class RemoteStorage:
    """The files below one URL of an fsspec file system, an `AbstractFileSystem`."""

    gap_bytes = 512 << 10  # a request of 10 ms, four under way, at 200 MB/s

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._root = root.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        self._appears_whole = not OBJECT_STORES.isdisjoint(protocols)

    def create(self, path: str) -> RemoteSink:
        target = self._path(path)
        with storage_errors(self, path, "created"):
            if self._appears_whole:
                return RemoteSink(self, path, self._fs, written_as=target, target=target)
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            return RemoteSink(self, path, self._fs, written_as=_partial(target), target=target)

    def size(self, path: str) -> int:
        with storage_errors(self, path, "looked at", missing=True):
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(path))["size"])

    def read(self, path: str, begin: int, targets: Sequence[memoryview]) -> int:
        """The one copy is here: from what the file system returns into the targets."""
        wanted = sum(target.nbytes for target in targets)
        if wanted == 0:
            return 0
        with storage_errors(self, path, "read", missing=True):
            came = memoryview(self._fs.cat_file(self._path(path), start=begin, end=begin + wanted))
        got = 0
        for target in targets:
            some = came[got : got + target.nbytes]
            target[: some.nbytes] = some
            got += some.nbytes
        return got

    def entries(self, folder: str) -> list[Listed]:
        with storage_errors(self, folder, "listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
            listed = (
                Listed(one["name"].rstrip("/").rpartition("/")[2], one["type"] == "directory", int(one["size"] or 0))
                for one in found
            )
            return sorted(one for one in listed if one.name)

    def remove(self, path: str) -> None:
        with storage_errors(self, path, "removed"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def remove_folder(self, path: str) -> None:
        with suppress(Exception):  # object stores have no folders, each in its own way
            self._fs.rmdir(self._path(path))

    def claim(self, path: str, content: bytes) -> bool:
        """Exclusive where fsspec's file system is: on S3 by a conditional PUT. Elsewhere two that come at the same time
        may both be told True: whoever claims reads the file again afterwards."""
        target = self._path(path)
        with storage_errors(self, path, "created"):
            if not self._appears_whole:
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self._fs.pipe_file(target, content, mode="create")
            except FileExistsError:
                return False
            except (TypeError, ValueError, NotImplementedError):  # a file system older than that mode
                self._fs.invalidate_cache()
                if self._fs.exists(target):
                    return False
                self._fs.pipe_file(target, content)
        return True

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class RemoteSink:
    """A file that fsspec writes."""

    def __init__(self, storage: RemoteStorage, path: str, fs: Any, *, written_as: str, target: str) -> None:
        self._storage = storage
        self._path = path
        self._fs = fs
        self._written_as = written_as
        self._target = target
        self._committed = False
        self._file = fs.open(written_as, "wb")

    def write(self, views: Sequence[memoryview]) -> None:
        with storage_errors(self._storage, self._path, "written"):
            for view in views:
                self._file.write(view)

    def commit(self) -> None:
        with storage_errors(self._storage, self._path, "written"):
            self._file.close()
            if self._written_as != self._target:
                self._move()
        self._committed = True

    def abandon(self) -> None:
        """Without closing an upload: to close it is to complete it, and so would its finaliser."""
        if self._committed:
            return
        with suppress(Exception):
            self._file.discard() if hasattr(self._file, "discard") else None
        with suppress(Exception):
            if self._written_as != self._target:
                self._file.close()
        with suppress(Exception):
            self._file.closed = True
        if self._written_as != self._target:
            with suppress(Exception):
                self._fs.rm_file(self._written_as)

    def _move(self) -> None:
        """Over a file of that name, if there is one: some file systems replace it, others refuse. There it has another
        name until the new one is in its place, and comes back if that fails."""
        try:
            self._rename(self._written_as, self._target)
            return
        except Exception:
            self._fs.invalidate_cache()
            if not self._fs.exists(self._target) or not self._fs.exists(self._written_as):
                raise
        aside = _partial(self._target)
        try:
            self._rename(self._target, aside)
            self._rename(self._written_as, self._target)
        except Exception:
            with suppress(Exception):
                self._fs.invalidate_cache()
                if not self._fs.exists(self._target):
                    self._rename(aside, self._target)
            raise
        with suppress(Exception):
            self._fs.rm_file(aside)

    def _rename(self, path: str, to: str) -> None:
        """fsspec's own `mv` copies, and takes brackets in names for patterns; file systems that rename have theirs."""
        if _renames(self._fs):
            self._fs.mv(path, to)
        else:
            self._fs.cp_file(path, to)
            self._fs.rm_file(path)


def _partial(target: str) -> str:
    """A name for what is not, or not any more, the file of that name."""
    folder, _, name = target.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"


def _renames(fs: Any) -> bool:
    inherited = import_module("fsspec").AbstractFileSystem.mv
    return type(fs).mv is not inherited
