"""Counters of single workers: what a shard tells of what it sees of each, as '0:12,2:11', by rank."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("rank_pushed_bytes", "rank_pulled_bytes", "rank_push_s", "rank_pull_s", "rank_read_waits_s")


def traffic_counters(traffic: Mapping[int, tuple[int, int, float, float, float]]) -> dict[str, str]:
    """`traffic`: what the shard's DataService tells."""
    return {
        name: ",".join(f"{rank}:{round(told[column], 4)}" for rank, told in traffic.items())
        for column, name in enumerate(NAMES)
    }
