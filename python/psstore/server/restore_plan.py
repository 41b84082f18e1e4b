"""Which checkpoint a store begins with. Looked up once, by the supervisor, so that all of its shards take the same."""

from __future__ import annotations

import logging
import time
from functools import partial

from psstore.checkpoint.place import open_place
from psstore.errors import CheckpointNotFound, StorageError
from psstore.server.keep_trying import keep_trying
from psstore.server.reports import Reports
from psstore.server.settings import ServerSettings
from psstore.server.store_life import RestoreFrom
from psstore.server.store_state import LINEAGE

AUTO = "auto"
"""The latest at the store's own place, if there is one."""

_log = logging.getLogger("psstore.supervisor")


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


def find_again(asked: str, settings: ServerSettings, reports: Reports) -> RestoreFrom | None:
    """As `find_checkpoint`, of a store that goes on: storage that fails may do so for a while. Tries until the
    settings' patience is at an end, or there is a report. Raises StorageError, BadArgument."""

    def pause(error: StorageError, pause_s: float) -> None:
        if reports.wait(time.monotonic() + pause_s):  # it is to end
            raise error
        _log.warning("%s; it is looked for again", error.message)

    attempt = partial(find_checkpoint, asked, own_place=settings.checkpoint)
    return keep_trying(attempt, StorageError, patience_s=settings.patience_s, pause=pause)
