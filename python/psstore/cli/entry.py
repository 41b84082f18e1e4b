"""Where `psstore` and `psstore-server` begin, so that Ctrl-C ends them without a traceback at any time.

What they import takes up to half a second, and what an exception would do in the middle of it is anybody's guess. Hence
a handler that needs nothing, and no import here that takes any time.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from psstore.exit_codes import EXIT_OK, EXIT_SIGNAL


def psstore() -> None:
    _run("psstore.cli.main", EXIT_SIGNAL + signal.SIGINT)


def server() -> None:
    _run("psstore.cli.server", EXIT_OK)


def _run(program: str, exit_interrupted: int) -> None:
    _open_standard_files()

    def end(*_: object) -> None:
        os._exit(exit_interrupted)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in a job that a shell runs in the background
        signal.signal(signal.SIGINT, end)
    main = import_module(program).main
    try:
        signal.signal(signal.SIGINT, before)
        main()
    except KeyboardInterrupt:
        sys.exit(exit_interrupted)


def _open_standard_files() -> None:
    """Opens those that a program was started without, as by `>&-`: what it opened first would take their numbers, and
    what is meant for them would go there."""
    for name, mode, fd in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:  # another one that is closed has been opened first
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))
