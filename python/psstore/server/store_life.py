"""One life of a store: what it begins with, and why it is over. Another one may follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from psstore.exit_codes import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from psstore.server.peer_monitor import PeerEvent


def of_shard_0(store: str) -> str:
    """Shard 0's id of a life, which those of the other hosts begin with. `store`: such an id."""
    return store.partition("-")[0]


class RestoreFrom(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that was found."""

    url: str
    """The place that it is in."""
    version: int
    lineage: str
    """Lineage of the store that wrote it."""


@dataclass(frozen=True, kw_only=True)
class StoreLife:
    """One life of a store, as this host's shards have it."""

    own: str
    """This host's id of it."""
    store: str
    """Id of the shards that run here, which clients are told."""
    signing_key: bytes
    """What all of its shards sign with."""
    lineage: str
    """Id of the first of the store's lives of which each was restored from the one before; '': this one."""
    restore: RestoreFrom | None
    """What it begins with."""
    is_joined: bool = False
    """The store was there before: what runs here goes on with what another process has."""

    @property
    def began_at(self) -> int:
        """The version that it begins with."""
        return self.restore.version if self.restore is not None else 0


@dataclass(frozen=True)
class Ending:
    """Why it is over."""

    status: int
    reason: str | None = None
    is_asked: bool = False
    """A signal has said so."""
    dead: str | None = None
    """Which shards died, and how; or what another host's is lost by."""
    written: int | None = None
    """The version at which the store stands still and is written down, to go on with other shards."""

    @staticmethod
    def heard(news: PeerEvent) -> Ending:
        """From other hosts."""
        if news.reason is None:
            return Ending(EXIT_OK)
        return Ending(EXIT_FAILED, news.reason, dead=news.reason if news.is_lost else None)
