"""What lies between workers and shards where a plan disturbs that: a proxy before each shard, on another loopback
address, which the store tells its clients (--advertise)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

from tests.chaos.plan import Fault
from tests.support.proxy import READ_BYTES, Proxy

SHARD_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
ENVIRON = {"PSSTORE_ADVERTISE": PROXY_HOST, "PSSTORE_TRANSPORT": "tcp"}

TRICKLE_BYTES, TRICKLE_PAUSE_S = 200, 0.002
"""A read of a trickling connection, and the rest after it."""

LOOK_S = 0.005


class Links:
    """The proxies, in the order of their ports, which the store chose."""

    def __init__(self) -> None:
        self._proxies: list[Proxy] = []

    def open(self, num_shards: int, processes: Callable[[], Iterable[psutil.Process]], over: Callable[[], bool]) -> None:
        """As soon as the store listens. `processes`: those of the run. `over`: whether there will be no store."""
        while len(ports := _ports(processes())) < num_shards:
            if over():
                return
            time.sleep(LOOK_S)
        self._proxies = [Proxy((SHARD_HOST, port), address=(PROXY_HOST, port)) for port in sorted(ports)]

    def disturb(self, fault: Fault, wait: Callable[[float], object]) -> bool:
        """`wait`: until so many seconds are over, or the run is. False: it met nobody."""
        number = int(fault.victim.removeprefix("link "))
        if number >= len(self._proxies):
            return False
        proxy = self._proxies[number]
        if fault.kind == "cut":
            proxy.cut()
        elif fault.kind == "swallow":
            proxy.swallow()
        elif fault.kind == "refuse":
            proxy.refusing = True
            proxy.cut()
            wait(fault.for_s)
            proxy.refusing = False
        elif fault.kind == "hold":
            proxy.flows.clear()
            wait(fault.for_s)
            proxy.flows.set()
        else:
            assert fault.kind == "trickle", fault
            proxy.read_bytes, proxy.pause_s = TRICKLE_BYTES, TRICKLE_PAUSE_S
            wait(fault.for_s)
            proxy.read_bytes, proxy.pause_s = READ_BYTES, 0.0
        return True

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()


def _ports(processes: Iterable[psutil.Process]) -> set[int]:
    """Where these listen for those who come by TCP."""
    found = set()
    for one in processes:
        try:
            connections = one.net_connections("tcp4")
        except psutil.Error:
            continue
        found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == SHARD_HOST}
    return found
