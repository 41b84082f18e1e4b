"""A long link between two hosts: with delay, with loss, with a cap on each flow, as there are between machines.

    host0  10.78.0.1  tun ──► a process: packets wait, or are lost ──► tun  10.78.0.2  host1      and back

A process reads each packet, lets it wait for its flow's turn, for the link's and for the delay, and writes it to the
other end: what netem and fq of the kernel do, which not every kernel has. A flow is known by its addresses and ports,
as clouds know those that they cap. Good for some 20,000 packets a second. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench import virtual_hosts
from bench.far import forked
from bench.virtual_hosts import VirtualHosts

NETWORK = "10.78.0"
MTU_BYTES = 8960
"""Large, as in clouds."""
QUEUE_S = 0.02
"""For so long packets wait for their turn; those for which it would be longer are dropped, and TCP slows down."""

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""linux/if_tun.h"""


@dataclass(frozen=True)
class Quality:
    """Of each direction. Rates in 10^6 bit/s with all headers."""

    delay_s: float
    rate_mbit: float
    flow_mbit: float = float("inf")
    """Of each flow."""
    loss: float = 0.0
    """Share of packets."""


def why_not() -> str | None:
    """Why there can be no such link here, or None."""
    return virtual_hosts.why_not() or (None if TUN.exists() else f"a long link needs {TUN}")


class LongLink(VirtualHosts):
    """`with LongLink(quality) as hosts:` are host0 and host1."""

    def __init__(self, quality: Quality, *, congestion_control: str | None = None) -> None:
        super().__init__(2, congestion_control=congestion_control)
        self._quality = quality

    def __enter__(self) -> LongLink:
        super().__enter__()
        try:
            ends = [self._lay(index) for index in range(2)]
            carrier = forked(carry, ends, self._quality)
            self._ends.callback(carrier.join)
            self._ends.callback(carrier.terminate)
            for end in ends:
                os.close(end)
        except BaseException:
            self._ends.close()
            raise
        return self

    def address(self, index: int) -> str:
        return f"{NETWORK}.{index + 1}"

    def _lay(self, index: int) -> int:
        """That host's end of it, as a file of whole packets."""
        space, device = self._spaces[index], f"long{os.getpid()}-{index}"[:15]
        end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "address", "add", f"{self.address(index)}/24", "dev", device)
        _ip("-n", space, "link", "set", device, "mtu", str(MTU_BYTES), "txqueuelen", "10000", "up")
        if self.congestion_control is not None:
            route = (
                f"{NETWORK}.0/24 dev {device} scope link src {self.address(index)} congctl {self.congestion_control}"
            )
            _ip("-n", space, "route", "replace", *route.split())
        return end


# ---- packets ----


class Turns:
    """When packets have passed something that takes so many bytes a second, one after the other."""

    def __init__(self, mbit: float) -> None:
        self._s_per_byte = 8e-6 / mbit
        self._free_at = 0.0

    def next(self, now: float, num_bytes: int) -> float | None:
        """None: it would wait too long."""
        begins = max(now, self._free_at)
        if begins - now > QUEUE_S:
            return None
        self._free_at = begins + num_bytes * self._s_per_byte
        return self._free_at


class Direction:
    """One way of the link."""

    def __init__(self, quality: Quality, chance: random.Random) -> None:
        self._quality = quality
        self._chance = chance
        self._link = Turns(quality.rate_mbit)
        self._flows: defaultdict[bytes, Turns] = defaultdict(lambda: Turns(quality.flow_mbit))

    def arrival(self, packet: bytes, now: float) -> float | None:
        """None: it is lost."""
        if self._chance.random() < self._quality.loss:
            return None
        at = self._flows[flow_of(packet)].next(now, len(packet))
        at = None if at is None else self._link.next(at, len(packet))
        return None if at is None else at + self._quality.delay_s


def flow_of(packet: bytes) -> bytes:
    """Addresses and ports. IPv4: the header's length stands in its first byte, in words."""
    ports = 4 * (packet[0] & 0x0F)
    return packet[12:20] + packet[ports : ports + 4]


def carry(ends: tuple[int, int], quality: Quality) -> None:
    """Until this process is terminated."""
    chance = random.Random(0)
    ways = {ends[0]: (Direction(quality, chance), ends[1]), ends[1]: (Direction(quality, chance), ends[0])}
    under_way: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end, _ in poll.poll(wait_s):
            direction, other = ways[end]
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(end, 65536)
                    at = direction.arrival(packet, time.monotonic())
                    if at is not None:
                        heapq.heappush(under_way, (at, next(order), other, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, end, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(end, packet)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
