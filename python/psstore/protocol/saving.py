"""Who writes checkpoints, as a shard's service sees them: both return at once, and are asked again until it is done.

A client leads: it has every shard hold decisions, asks the coordinator for a cut, carries what that says to the
shards, and what these have written back to the coordinator. So shards never talk to each other, and nobody's training
waits for a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from psstore.types import Tensor
from psstore.wire.messages import Begin, Begun, Keep, Kept, SaveFact


class Saver(Protocol):
    """Writes the shard's part."""

    def save(self, fact: SaveFact, tensors: Mapping[int, Tensor]) -> bytes | None:
        """What is written, for the manifest; None: it is being written, or another attempt is still. `tensors`: those
        that the shard knows, by id. Raises StorageError, VersionGone: an attempt that has failed fails for good, since
        who asks again may not have heard of it."""


class Keeper(Protocol):
    """Owns the places of the store's checkpoints, and says which of what is written there is one."""

    def counters(self) -> dict[str, int | float | str]:
        """For STATS: `checkpoint`, the version of the last one of this life of the store, or -1; and what else there
        is to say of them."""

    def begin(self, asked: Begin, *, at_any_place: bool = False) -> Begun:
        """`at_any_place`: who asks may name one. Raises StorageError, BadArgument, TornRound."""

    def led(self, attempt: str) -> None:
        """Whoever leads that attempt is there still: shards are asked whether it is written."""

    def keep(self, asked: Keep) -> Kept:
        """Raises StorageError, BadSignature, BadArgument if that is not the attempt under way."""
