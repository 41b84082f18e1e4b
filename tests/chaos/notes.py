"""What each worker notes before and after everything it does: a line at a time is with the kernel before the next thing
happens, whoever is killed then."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SENDS, STEPPED = "sends", "stepped"
"""A plain write of that step is about to be sent; the step is taken."""
BEGINS = "begins"
"""It goes on from that version: as it comes, or as the store went back."""
HANDED = "handed"
"""A session's state as of that version, acknowledged. Of which life of the store, and whether that had asked for it."""
FOUND = "found"
"""A session that begins, or goes on, finds what was handed in as of that version; NOTHING; or WRONG. In which life of
the store, and which version that life began with."""

NOTHING, WRONG = -1, -2


@dataclass(frozen=True)
class Note:
    what: str
    number: int
    """A step, or a version."""
    at: float
    of: tuple[str, ...]


class Notes:
    """One worker's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = os.open(folder / f"notes-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, number: int, *of: object) -> None:
        words = (what, number, f"{time.monotonic():.6f}", *of)
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def end(self, **found: Any) -> None:
        """What this worker reads in the store when all steps are taken."""
        (self._folder / f"end-{self._rank}").write_text(json.dumps(found))


def notes_of(folder: Path, rank: int) -> Sequence[Note]:
    """In their order, of all the worker's lives."""
    path = folder / f"notes-{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [Note(what, int(number), float(at), tuple(of)) for what, number, at, *of in lines]


def end_of(folder: Path, rank: int) -> Any:
    """What that worker has read at its end; None: nothing."""
    path = folder / f"end-{rank}"
    return json.loads(path.read_text()) if path.exists() else None
