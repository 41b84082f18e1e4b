"""Which process leads a shard, and which stands by, as the store itself says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import psutil

import psstore
from psstore.errors import PsstoreError
from tests.chaos.processes import MODULES, SUPERVISOR, Processes

IN_SYNC_S = 30.0
"""How long a new standby may take to have all that its shard has."""

LOOK_S = 0.02
PATIENCE_S = 1.0
"""For one answer: whoever does not give it is asked again."""

Stats = Sequence[Mapping[str, int | float | str]]


class Groups:
    """Asks the store."""

    def __init__(self, processes: Processes, find_url: Callable[[], str], token: str | None = None) -> None:
        """`find_url`: where it is asked; '': it is over."""
        self._processes = processes
        self._find_url = find_url
        self._token = token

    def find(self, role: str, shard: int) -> psutil.Process | None:
        """'leader' or 'standby' of a shard, once the standbys of all may lead; None: the store is over."""
        stats = self._in_sync()
        if not stats:
            return None
        leaders = [int(one["process"]) for one in stats]
        leader = leaders[shard % len(leaders)]  # there may be fewer by now
        if role == "leader":
            return psutil.Process(leader)
        others = [one for one in self._processes.running(MODULES["shard"]) if one.pid not in leaders]
        apart = [one for one in others if _is_of(one, shard, len(leaders))]
        return apart[0] if apart else (others[shard % len(others)] if others else None)

    def leaders(self) -> Mapping[int, int]:
        """The shard that each leads, by process; empty: nobody says so just now."""
        return {int(one["process"]): shard for shard, one in enumerate(self._ask())}

    def _in_sync(self) -> Stats:
        until = time.monotonic() + IN_SYNC_S
        while time.monotonic() < until and self._find_url():
            stats = self._ask()
            if stats and all(one["standbys"] for one in stats):
                return stats
            time.sleep(LOOK_S)
        return []

    def _ask(self) -> Stats:
        """Empty: the run is over, or somebody is just about to lead."""
        url = self._find_url()
        if not url:
            return []
        try:
            with psstore.connect(
                url, role="client", token=self._token, connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S
            ) as store:
                return store.stats()
        except PsstoreError:
            return []


def host_of(process: psutil.Process) -> int | None:
    """The `--shard-index` of the supervisor that has started it; None: it has none."""
    for one in process.parents():
        arguments = one.cmdline()
        if SUPERVISOR in arguments and "--shard-index" in arguments:
            return int(arguments[arguments.index("--shard-index") + 1])
    return None


def _is_of(process: psutil.Process, shard: int, num_shards: int) -> bool:
    """Whether it is started at one of the shard's two places."""
    host = host_of(process)
    return host is not None and host % num_shards == shard
