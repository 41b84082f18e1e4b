"""A process's hosts file, kept as the store's directory has it."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from psstore.errors import StoreUnreachable
from psstore.launch.ray.directory import Hosts
from psstore.net.names import write_hosts


class AsksDirectory(Protocol):
    """The directory as other processes ask it. All block, and raise StoreUnreachable if it is gone for good."""

    def here(self) -> str:
        """The address of the caller's node."""

    def moved(self, own: Mapping[str, str]) -> Hosts: ...
    def news(self, known: Mapping[str, str], own: Mapping[str, str]) -> Hosts | None: ...


class HostNames:
    """Owns a folder with the file and the store's token, until the directory is gone or the process ends in order."""

    def __init__(self, directory: AsksDirectory, *, own: Mapping[str, str], token: str) -> None:
        """`own`: name and address of what runs in this process; none of a worker. Blocks until the file says what the
        directory knows. Raises StoreUnreachable."""
        self._directory = directory
        self._own = dict(own)
        self._hosts: dict[str, str] = {}
        self._changed = threading.Condition()
        self._folder = Path(tempfile.mkdtemp(prefix="psstore-ray-"))
        atexit.register(self.remove)
        self._take(directory.moved(self._own))
        token_file = self._folder / "token"
        token_file.touch(0o600)
        token_file.write_text(token)
        self.environ = {"PSSTORE_TOKEN_FILE": str(token_file), "PSSTORE_HOSTS_FILE": str(self._file)}
        """What programs are told that are to reach the store."""
        threading.Thread(target=self._follow, name="psstore-hosts", daemon=True).start()

    def await_all(self, num_hosts: int) -> None:
        """Blocks until so many names are known."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._hosts) >= num_hosts)

    @property
    def _file(self) -> Path:
        return self._folder / "hosts"

    def _follow(self) -> None:
        with contextlib.suppress(StoreUnreachable, SystemExit):  # which Ray raises where it is shut down
            while (hosts := self._directory.news(self._hosts, self._own)) is not None:
                self._take(hosts)
        self.remove()

    def _take(self, hosts: Hosts) -> None:
        """A directory that was started again does not know all yet."""
        with self._changed:
            self._hosts = {**self._hosts, **hosts}
            write_hosts(self._file, self._hosts)
            self._changed.notify_all()

    def remove(self) -> None:
        """Removes the folder, as whoever follows the directory does at its end, unless the process is killed first."""
        shutil.rmtree(self._folder, ignore_errors=True)
