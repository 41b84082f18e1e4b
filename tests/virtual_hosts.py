"""Hosts of their own on one machine: network namespaces that a bridge joins, as a switch joins machines.

    pst<pid>   (bridge, in a namespace of its own)
      ├── veth ── eth0 10.77.0.1  in pst<pid>-0, known to all as host0
      └── veth ── eth0 10.77.0.2  in pst<pid>-1, known to all as host1

Each has its own loopback, ports and routes: what listens on 127.0.0.1 of one is out of reach for the other. Names are
this process's, so that several runs don't meet. Needs root and `ip` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

NETWORK = "10.77.0"

ETC = Path("/etc/netns")
"""`ip netns exec NAME` shows the files of /etc/netns/NAME in place of those in /etc: here, hosts."""


def why_not() -> str | None:
    """Why there can be no virtual hosts here, or None."""
    if shutil.which("ip") is None:
        return "virtual hosts need `ip` (iproute2)"
    if os.geteuid() != 0:
        return "virtual hosts need root"
    probe = f"pst{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None if made.returncode == 0 else f"network namespaces can't be made here: {made.stderr.strip()}"


class VirtualHosts:
    """`with VirtualHosts(4) as hosts:` are host0 to host3; afterwards nothing of them is left."""

    def __init__(self, count: int) -> None:
        self.names = [f"host{index}" for index in range(count)]
        self._switch = f"pst{os.getpid()}"
        self._spaces = [f"{self._switch}-{index}" for index in range(count)]
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> VirtualHosts:
        with contextlib.ExitStack() as ends:
            self._add_space(self._switch, ends)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for index, space in enumerate(self._spaces):
                self._add_space(space, ends)
                self._plug_in(index, space)
                self._write_hosts(space, ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()
        with contextlib.suppress(OSError):  # another run's, or not empty
            ETC.rmdir()

    def on(self, index: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` there."""
        return ["ip", "netns", "exec", self._spaces[index], *command]

    @contextlib.contextmanager
    def unplugged(self, index: int) -> Iterator[None]:
        """Its cable is pulled meanwhile: nobody is told, packets are lost."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "down")
        try:
            yield
        finally:
            _ip("-n", self._switch, "link", "set", f"port{index}", "up")

    @staticmethod
    def _add_space(space: str, ends: contextlib.ExitStack) -> None:
        _ip("netns", "add", space)
        ends.callback(_ip, "netns", "del", space)
        _ip("-n", space, "link", "set", "lo", "up")

    def _plug_in(self, index: int, space: str) -> None:
        port = f"port{index}"
        peer = ("peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{NETWORK}.{index + 1}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")

    def _write_hosts(self, space: str, ends: contextlib.ExitStack) -> None:
        folder = ETC / space
        folder.mkdir(parents=True)
        ends.callback(shutil.rmtree, folder)
        others = [f"{NETWORK}.{index + 1} {name}" for index, name in enumerate(self.names)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *others]) + "\n")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
