"""Standard output of a program, where the system refuses what is written: a disk is full, who read it has ended, or its
encoding has no such letter."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from psstore.exit_codes import EXIT_FAILED


@contextlib.contextmanager
def refusals_said_by(program: str) -> Iterator[None]:
    """What the system refuses within, as a full disk does, is said in a sentence, and ends the program. Quietly, where
    who reads its output has read enough, as `head` has. What its encoding can't say becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        drop_output()
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                print(f"{program}: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def drop_output() -> None:
    """Lets go of what standard output holds and the system refuses: Python would try again at its end, say so in its
    own words, and make the exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
