"""A small file system of its own, which can be filled up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

SIZE_BYTES = 4 << 20
"""A few checkpoints, and room for one that is being written."""

FILLER = "filler"


def why_not() -> str | None:
    """Why nothing can be mounted here, or None."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with SmallDisk(Path(folder)):
                return None
        except (OSError, subprocess.CalledProcessError) as error:
            return f"a small file system can't be mounted here: {error}"


class SmallDisk:
    """`with SmallDisk(folder):` is a tmpfs of SIZE_BYTES at that empty folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> SmallDisk:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "psstore-chaos", str(self._folder)]
        subprocess.run(command, check=True, capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True, capture_output=True)

    def fill(self) -> None:
        """Until not another byte fits."""
        file = os.open(self._folder / FILLER, os.O_WRONLY | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):
                while os.write(file, bytes(4096)):
                    pass
        finally:
            os.close(file)

    def empty(self) -> None:
        """Of what filled it."""
        (self._folder / FILLER).unlink(missing_ok=True)
