"""One run of psstore-server, of which nothing is left when its owner is gone, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from psstore.launch.group import in_group, start_reaper


class ServerProcess:
    """Its output is its owner's. All calls block, and may come from several threads."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._reaper = start_reaper()
        read_fd, write_fd = os.pipe()
        self._ready = os.fdopen(read_fd, "rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "psstore.cli.server", "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                env=dict(environ),
                pass_fds=[write_fd],
                **in_group(self._reaper.pid),
            )
        finally:
            os.close(write_fd)

    def await_ready(self) -> bool:
        """False: it has ended instead."""
        return bool(self._ready.readline())

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
