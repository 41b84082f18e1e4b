"""What a figure was measured on, and TCP's congestion control, which is to be the same for all contestants."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CLONE_NEWNET = 0x40000000
"""linux/sched.h: unshare the network namespace."""

CONGESTION_CONTROL = "cubic"
"""Which all contestants' connections are to have."""


def machine(*packages: str) -> dict[str, str | int]:
    """What is worth telling beside figures: `packages` are those whose versions matter."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "congestion control": congestion_control(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("psstore", "numpy", *packages)},
    }


def isolate_network() -> str | None:
    """Gives this process, and those that it starts from now on, a loopback of its own on which every connection is
    under CONGESTION_CONTROL, whoever opens it. Needs root and `ip`; else all stays as it is, and why is returned."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return _not_isolated("another needs root and `ip`")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        return _not_isolated(os.strerror(ctypes.get_errno()))
    _ip("link", "set", "lo", "up")
    for destination in ("127.0.0.0/8", "127.0.0.1"):
        route = f"local {destination} dev lo table local proto kernel scope host src 127.0.0.1"
        _ip("route", "replace", *route.split(), "congctl", CONGESTION_CONTROL)
    return None


def _not_isolated(why: str) -> str:
    return (
        f"all connections are under {congestion_control()}, and over the machine's own loopback, with what else goes"
        f" over that: {why}"
    )


def congestion_control() -> str:
    """Of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        name = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _processor() -> str:
    names: Sequence[str] = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].partition(": ")[2] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
