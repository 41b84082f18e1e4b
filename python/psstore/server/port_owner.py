"""Who listens on a TCP port, as far as /proc tells this user: for one error message."""

from __future__ import annotations

import contextlib
import glob
import os

LISTEN = "0A"
"""TCP_LISTEN in the fourth column of /proc/net/tcp (Linux, include/net/tcp_states.h)."""


def describe_owner(port: int) -> str:
    """'python (process 123)', or 'another process'."""
    inodes = _listening_inodes(port)
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm") as comm:
                    return f"{comm.read().strip()} (process {pid})"
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    """As file descriptors show them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in list(lines)[1:]:
                columns = line.split()
                if columns[3] == LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{columns[9]}]")
    return found
