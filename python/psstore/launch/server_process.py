"""One run of psstore-server, of which nothing is left when its owner is gone, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from psstore.launch.group import in_group, start_reaper
from psstore.launch.store import StoreUrl


class ServerProcess:
    """Its output is its owner's. All calls block, and may come from several threads."""

    def __init__(self, environ: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        self._reaper = start_reaper()
        read_fd, write_fd = os.pipe()
        self._ready = os.fdopen(read_fd, "rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "psstore.cli.server", *arguments, "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                env=dict(environ),
                pass_fds=[write_fd],
                **in_group(self._reaper.pid),
            )
        finally:
            os.close(write_fd)

    def await_ready(self, *, ready_fd: int | None = None) -> str | None:
        """The URL of the store; None: it has ended instead. `ready_fd`: a descriptor to which its line is written, too,
        and which is closed then. Raises OSError for one that is not open."""
        line = self._ready.readline()
        if line and ready_fd is not None:
            with os.fdopen(ready_fd, "wb") as pipe:
                pipe.write(line)
        return msgspec.json.decode(line, type=StoreUrl).url if line else None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """Until it has ended, with this exit code, and all that it started is gone."""
        code = self._process.wait()
        self._ready.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._reaper.pid, signal.SIGKILL)
        self._reaper.communicate()
        return code

    def tell_to_end(self) -> None:
        """As Ctrl-C does."""
        self._process.terminate()
