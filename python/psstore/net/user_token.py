"""The token of a store that listens on loopback and was given none: every user of the machine can connect there, and
only the store's own can read the file with it. Programs of that user find it by the address that they connect to.

    /tmp/psstore-1000/                 for its owner only; $XDG_RUNTIME_DIR/psstore where that can't be had
        4026531840-127.0.0.1-5700      the token; a name for each address of a store, all of one file

A name begins with the network namespace, since containers may share /tmp and not their ports. A file counts while its
server holds a lock on it: what a server that was killed has left is passed over, and the next server removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from psstore.config import check_private, token_directories
from psstore.errors import BadArgument
from psstore.net.address import Address, TcpAddress, is_loopback, parse_address

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600

KEPT = stat.S_ISVTX
"""Mode of a file that programs that clean up /tmp leave alone (XDG Base Directory Specification)."""

LOCK_S, POLL_S = 5.0, 0.01
"""How long another server may take to add or remove its names, which takes milliseconds; and how often it is asked."""

NETWORK = Path("/proc/self/ns/net")

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Why a file that is there may not be opened."""


class UserToken:
    """A server's: `secret` can be found by its user's clients from now on, until `close`."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """`addresses`: that the store is bound to, and that its clients are told. Raises BadArgument if there is no
        place for a file."""
        self.secret = secrets.token_hex(32).encode()
        self._names = _names(addresses)
        problems = []
        for directory in token_directories():
            try:
                self._publish(directory)
                return
            except OSError as error:
                problems.append(f"{directory}: {error.strerror}")
        raise BadArgument(
            "a store on loopback needs a file with a token that only its user can read, and there is no place for one"
            f" ({'; '.join(problems)}); make one and give it with --token-file, or listen on a unix socket with --uds"
        )

    def close(self) -> None:
        """Removes the names that are still this file's: another server may have the ports by now."""
        own = os.fstat(self._file).st_ino
        with contextlib.suppress(OSError), _locked(self._directory):
            for path in (self._directory / name for name in self._names):
                if path.exists() and path.stat().st_ino == own:
                    path.unlink()
        os.close(self._file)

    def also(self, addresses: Sequence[Address]) -> None:
        """The store is found at these, too. Raises OSError. Some of them may be names of before, which another store
        has had since."""
        more = _names(addresses)
        with _locked(self._directory):
            for name in more:
                (self._directory / name).unlink(missing_ok=True)
                os.link(self._directory / self._names[0], self._directory / name)
        self._names = list(dict.fromkeys([*self._names, *more]))

    def _publish(self, directory: Path) -> None:
        """Puts the token under each name. A server that has one does not serve that address any more: it is ours."""
        _make_private(directory)
        with _locked(directory):
            _remove_stale(directory)
            new = directory / f".{os.getpid()}"
            new.unlink(missing_ok=True)
            self._directory, self._file = directory, _write(new, self.secret)
            for path in (directory / name for name in self._names):
                path.unlink(missing_ok=True)
                os.link(new, path)
            new.unlink()


def find(address: str) -> bytes | None:
    """The token of the store of this user that serves `address` now; None: there is none, or it is not on this machine.
    Raises BadArgument if others could have read it, OSError if this process has no room for a file."""
    for meant in _meanings(parse_address(address)):
        for directory in token_directories():
            token = _read(directory / name_of(meant))
            if token is not None:
                return token
    return None


def _names(addresses: Sequence[Address]) -> list[str]:
    return list(dict.fromkeys(name_of(meant) for one in addresses for meant in _meanings(one)))


def _meanings(address: Address) -> list[Address]:
    """The addresses on this machine that it stands for."""
    if not isinstance(address, TcpAddress):
        return [address]
    if address.host == "localhost":
        return [TcpAddress("127.0.0.1", address.port), TcpAddress("::1", address.port)]
    return [address] if is_loopback(address.host) else []


def name_of(address: Address) -> str:
    """The name of the file for a store that is bound to `address`."""
    if not isinstance(address, TcpAddress):
        return f"unix-{hashlib.sha256(os.path.realpath(address.path).encode()).hexdigest()[:32]}"
    network = os.stat(NETWORK).st_ino if NETWORK.exists() else 0
    return f"{network}-{address.host}-{address.port}"


# ---- files ----


def _make_private(directory: Path) -> None:
    """Raises OSError if it is not this user's alone: in /tmp anybody may have been there first."""
    directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    there = os.lstat(directory)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        raise PermissionError(0, "not a directory of this user alone")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock: one server at a time changes names. Raises OSError if another takes too long."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_S
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TimeoutError(0, f"locked by another server for {LOCK_S:g} s")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, secret: bytes) -> int:
    """Returns the descriptor that holds the lock. No client looks for `path`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        _try_lock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, secret)
        os.fchmod(descriptor, PRIVATE_FILE | KEPT)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale(directory: Path) -> None:
    for entry in list(os.scandir(directory)):
        with contextlib.suppress(OSError), open(entry.path, "rb") as file:
            if _is_stale(file.fileno()):
                os.unlink(entry.path)


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return None
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        check_private(path, descriptor)
        return None if _is_stale(descriptor) else file.read()


def _is_stale(descriptor: int) -> bool:
    """True if no server holds the file's lock."""
    return _try_lock(descriptor, fcntl.LOCK_SH)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
