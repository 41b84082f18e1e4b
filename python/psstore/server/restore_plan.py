"""Which checkpoint a store begins with. Looked up once, by the supervisor, so that all of its shards take the same."""

from __future__ import annotations

from psstore.checkpoint.place import open_place
from psstore.errors import CheckpointNotFound
from psstore.server.store_life import RestoreFrom
from psstore.server.store_state import LINEAGE

AUTO = "auto"
"""The latest at the store's own place, if there is one."""


def find_checkpoint(asked: str, *, own_place: str | None) -> RestoreFrom | None:
    """None: there is none, and that is no error. Raises StorageError, BadArgument."""
    url = own_place if asked == AUTO and own_place is not None else asked
    place, version = open_place(url)
    try:
        with place.open(version) as checkpoint:
            lineage = checkpoint.store.extra.get(LINEAGE, "")
            return RestoreFrom(url=place.storage.url, version=checkpoint.version, lineage=lineage)
    except CheckpointNotFound:
        if asked == AUTO:
            return None
        raise
