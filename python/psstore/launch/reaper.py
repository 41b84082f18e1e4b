"""Leads a process group and outlives its owner by moments: when the owner is gone, it ends the group.

A program of its own (see group.py), which imports nothing of psstore so that it starts in milliseconds.
Standard input is a pipe whose other end only the owner holds: the kernel closes it however the owner dies.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 2.0
"""Between the request to end and the end. Nobody waits for results any more, so it is short."""


def main() -> None:
    for request_to_end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(request_to_end, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
