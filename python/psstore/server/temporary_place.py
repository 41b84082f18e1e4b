"""The folder where a store is written down on its way to another number of shards, if it has no place for checkpoints.

Its supervisor holds a lock on it. A folder without one is of a supervisor that was killed: what is not whole there is
good for nothing, and the next one that starts removes it; what is whole is all that there may be of that store.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from psstore.errors import StorageError

MEMORY = Path("/dev/shm")
"""Where files are memory."""

PREFIX = "psstore-reshard-"

_log = logging.getLogger("psstore.supervisor")


class TemporaryPlace:
    """A new one. To be ended by `remove`, unless it is to stay."""

    def __init__(self, needed_bytes: int) -> None:
        """In memory, if there is room for so many bytes. Raises OSError."""
        has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed_bytes and os.access(MEMORY, os.W_OK)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY if has_room else None))
            with suppress(FileNotFoundError):  # who starts just now has found it without its lock
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        self.clear()
        os.close(self._lock)

    def clear(self) -> None:
        """Removes what is there, once more."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Removes what supervisors of this user have left that were killed, and says what it leaves."""
    parents = {MEMORY}
    with suppress(OSError):  # there is none that can be written to, and a store may do without
        parents.add(Path(tempfile.gettempdir()))
    for parent in parents:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError, StorageError):  # it is another user's, or in use
                _see_to(folder)


def _see_to(folder: Path) -> None:
    """Raises OSError, StorageError."""
    from psstore.checkpoint.local_storage import LocalStorage
    from psstore.checkpoint.place import COMPLETE, CheckpointPlace

    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(found.status == COMPLETE for found in CheckpointPlace(LocalStorage(folder)).list()):
            _log.warning("%s has a store whose supervisor was killed: --restore %s, or remove it", folder, folder)
            return
        shutil.rmtree(folder, ignore_errors=True)
        _log.info("removed %s, which a supervisor has left that was killed", folder)
    finally:
        os.close(lock)
