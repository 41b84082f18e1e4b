"""Counters of single workers: what a shard tells of what it sees of each, as '0:12,2:11', by rank; of seconds those
only that are not 0, as all are where memory is shared."""

from __future__ import annotations

from collections.abc import Mapping


def traffic_counters(traffic: Mapping[int, tuple[int, int, float, float, float]]) -> dict[str, str]:
    """`traffic`: what the shard's DataService tells."""
    told = traffic.items()
    return {
        "rank_pushed_bytes": ",".join([f"{rank}:{one[0]}" for rank, one in told]),
        "rank_pulled_bytes": ",".join([f"{rank}:{one[1]}" for rank, one in told]),
        "rank_push_s": ",".join([f"{rank}:{one[2]:.4f}" for rank, one in told if one[2]]),
        "rank_pull_s": ",".join([f"{rank}:{one[3]:.4f}" for rank, one in told if one[3]]),
        "rank_read_waits_s": ",".join([f"{rank}:{one[4]:.4f}" for rank, one in told if one[4]]),
    }
