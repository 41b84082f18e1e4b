"""Hosts of their own on one machine: network namespaces that a bridge joins, as a switch joins machines.

    pst<pid>   (bridge, in a namespace of its own)
      ├── veth ── eth0 10.77.0.1  in pst<pid>-0, known to all as host0
      └── veth ── eth0 10.77.0.2  in pst<pid>-1, known to all as host1

Each has its own loopback, ports and routes: what listens on 127.0.0.1 of one is out of reach for the other. Names are
this process's, so that several runs don't meet. Links may have a rate: each way of each host's then carries so much and
no more, as a port of a switch does. Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

NETWORK = "10.77.0"

ETC = Path("/etc/netns")
"""`ip netns exec NAME` shows the files of /etc/netns/NAME in place of those in /etc: here, hosts."""

BURST_BYTES = 64 << 10
"""One segment as large as the kernel makes them, so that it is not cut."""

QUEUE_BYTES = 256 << 10
"""What waits in front of a slow link, as in a port of a switch; the rest is dropped, and TCP slows down."""

CLONE_NEWNET = 0x40000000
"""linux/sched.h: setns to a network namespace."""


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

    interface = "eth0"
    prefix_bits = 24

    def __init__(
        self,
        count: int,
        *,
        rate_mbit: float | None = None,
        burst_bytes: int = BURST_BYTES,
        congestion_control: str | None = None,
    ) -> None:
        """`rate_mbit`: of each host's link, each way, in 10^6 bit/s with all headers (default: as fast as it goes).
        `burst_bytes`: what may pass at once after a pause. `congestion_control`: TCP's on all of them (default: the
        machine's)."""
        self.rate_mbit = rate_mbit
        self._burst_bytes = burst_bytes
        self.congestion_control = congestion_control
        self.names = [f"host{index}" for index in range(count)]
        self._switch = f"pst{os.getpid()}"
        self._spaces = [f"{self._switch}-{index}" for index in range(count)]
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> VirtualHosts:
        with contextlib.ExitStack() as ends:
            self._add_space(self._switch, ends)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
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

    def set_rate(self, rate_mbit: float) -> None:
        """Of links that have one, from now on."""
        self.rate_mbit = rate_mbit
        for index, space in enumerate(self._spaces):
            self._limit(space, "eth0")
            self._limit(self._switch, f"port{index}")

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def move_to(self, index: int) -> None:
        """Makes this thread's sockets, and those of threads and processes that it starts from now on, that host's."""
        enter(self._spaces[index])

    def swallow_large_packets(self, index: int, mtu_bytes: int) -> None:
        """Loses packets that are larger than that on the way to the host and from it, from now on, and tells nobody:
        the switch's port has a smaller MTU than the hosts. None of these cuts up what TCP sends any more, which it
        leaves to devices, since what is still to be cut passes any port."""
        for device, space in [("eth0", one) for one in self._spaces] + [(f"port{index}", self._switch)]:
            ip("-n", space, "link", "set", device, "gso_max_segs", "1")
        ip("-n", self._switch, "link", "set", f"port{index}", "mtu", str(mtu_bytes))

    @contextlib.contextmanager
    def unplugged(self, index: int) -> Iterator[None]:
        """Its cable is pulled meanwhile: nobody is told, packets are lost."""
        ip("-n", self._switch, "link", "set", f"port{index}", "down")
        try:
            yield
        finally:
            ip("-n", self._switch, "link", "set", f"port{index}", "up")

    @staticmethod
    def _add_space(space: str, ends: contextlib.ExitStack) -> None:
        ip("netns", "add", space)
        ends.callback(ip, "netns", "del", space)
        ip("-n", space, "link", "set", "lo", "up")

    def _plug_in(self, index: int, space: str) -> None:
        port = f"port{index}"
        peer = ("peer", "name", "eth0", "netns", space)
        ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", space, "address", "add", f"{self.address(index)}/{self.prefix_bits}", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        if self.rate_mbit is not None:
            self._limit(space, "eth0")
            self._limit(self._switch, port)
        if self.congestion_control is not None:
            route = f"{NETWORK}.0/24 dev eth0 scope link src {self.address(index)} congctl {self.congestion_control}"
            ip("-n", space, "route", "replace", *route.split())

    def _limit(self, space: str, device: str) -> None:
        """A token bucket on what leaves the device."""
        rate = ("rate", f"{self.rate_mbit}mbit", "burst", f"{self._burst_bytes}", "limit", f"{QUEUE_BYTES}")
        _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def _write_hosts(self, space: str, ends: contextlib.ExitStack) -> None:
        folder = ETC / space
        folder.mkdir(parents=True)
        ends.callback(shutil.rmtree, folder)
        others = [f"{self.address(index)} {name}" for index, name in enumerate(self.names)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *others]) + "\n")


def enter(space: str) -> None:
    """Makes this thread, and what it starts from now on, part of a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
