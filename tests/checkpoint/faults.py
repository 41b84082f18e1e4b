"""File systems that fail on purpose, at the call that they are told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]


class Faults:
    """Counts calls and fails one of them; as a killed process does, all that follow, or that one alone."""

    def __init__(self, fail_at: int | None = None, *, killed: bool = True, error: int = errno.EIO) -> None:
        self.num_calls = 0
        self._fail_at = fail_at
        self._killed = killed
        self._error = error

    @property
    def has_failed(self) -> bool:
        return self._fail_at is not None and self.num_calls > self._fail_at

    def count(self, what: str) -> None:
        at, self.num_calls = self.num_calls, self.num_calls + 1
        if self._fail_at is not None and (at == self._fail_at or (self._killed and at > self._fail_at)):
            raise OSError(self._error, os.strerror(self._error), what)


class FailingSystem:
    """The `os` of local_storage.py: the calls that reach the disk, counted."""

    COUNTED = ("open", "writev", "preadv", "fsync", "mkdir", "rename", "link", "unlink", "rmdir", "scandir", "stat")

    def __init__(self, faults: Faults, *, disk_bytes: int | None = None) -> None:
        """`disk_bytes`: what the disk has room for; the write that goes beyond is cut short, and the next refused."""
        self._faults = faults
        self._room = disk_bytes

    def __getattr__(self, name: str) -> Any:
        return self._counted(name) if name in self.COUNTED else getattr(os, name)

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._faults.count(name)
            if name == "writev" and self._room is not None:
                return self._write_into_room(*args)
            return getattr(os, name)(*args, **named)

        return call

    def _write_into_room(self, fd: int, views: list[memoryview]) -> int:
        assert self._room is not None
        if self._room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, views[0][: self._room])
        self._room -= written
        return written


COUNTED = ("open", "info", "ls", "cat_file", "cp_file", "rm_file", "pipe_file", "makedirs", "exists", "rmdir")
"""Calls of a file system of fsspec's that reach storage."""


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory, whose every call may fail. What is in it is the class's: fresh instances see it."""

    cachable = False
    protocol = "failing"
    faults = Faults()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in (
            "open",
            "info",
            "ls",
            "cat_file",
            "cp_file",
            "rm_file",
            "pipe_file",
            "makedirs",
            "exists",
            "rmdir",
        ):
            return found

        def call(*args: Any, **named: Any) -> Any:
            type(self).faults.count(name)
            return FailingFile(found(*args, **named), type(self)) if name == "open" else found(*args, **named)

        return call


class FailingFile:
    """A file of it."""

    def __init__(self, file: Any, system: type[FailingFileSystem]) -> None:
        self._file = file
        self._system = system

    def write(self, content: bytes) -> int:
        self._system.faults.count("write")
        return int(self._file.write(content))

    def close(self) -> None:
        self._system.faults.count("close")
        self._file.close()

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._file.closed = closed


class Upload:
    """A file that is there once it is closed, by its finaliser too: as fsspec's files of object stores are."""

    def __init__(self, system: FailingFileSystem, path: str) -> None:
        self.closed = False
        self._content = bytearray()
        self._target = system, path

    def write(self, content: bytes) -> int:
        self._content += content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            system, path = self._target
            MemoryFileSystem._open(system, path, "wb", data=bytes(self._content))
        self.closed = True

    def __del__(self) -> None:
        self.close()


class UploadingFileSystem(FailingFileSystem):
    """A stand-in for an object store: a file is there when it is closed, and a move would be a copy."""

    protocol = "s3"

    def _open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        if mode == "wb" and "data" not in named:
            return Upload(self, path)
        return super()._open(path, mode, **named)


class RenamingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A stand-in for HDFS: files are seen while they are written, a rename never replaces, nothing is created
    exclusively. No HDFS: that needs a cluster and Java."""

    cachable = False
    protocol = "renaming"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **named: Any) -> None:
        if self.exists(path2):
            raise OSError(f"rename {path1} to {path2}: the destination exists")
        self.cp_file(path1, path2)
        self.rm_file(path1)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **named: Any) -> None:
        if mode != "overwrite":
            raise NotImplementedError(mode)
        super().pipe_file(path, value, **named)
