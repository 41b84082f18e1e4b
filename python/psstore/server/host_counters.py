"""What a shard's process tells of itself and its machine, beside what the protocol counts: for STATS."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from psstore.release import __version__
from psstore.server.shard_settings import ShardSettings


def host_counters(settings: ShardSettings, *, max_connections: int) -> Callable[[], Mapping[str, int | float | str]]:
    """Makes what is called for each STATS. `max_connections`: for how many the system allows open files."""
    told = {
        "max_connections": max_connections,
        "max_connections_asked": settings.max_connections,
        "standbys_asked": settings.standbys,
        "checkpoint_every_s": settings.checkpoint.every_s or 0.0,
    }

    def counters() -> Mapping[str, int | float | str]:
        return {**told, "psstore": __version__, "time_s": time.time(), "processor_s": time.process_time()}

    return counters
