"""Sentences that say how many there are."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 shard', or '2 shards'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
