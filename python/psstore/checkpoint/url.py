"""Where checkpoints are: a place's URL, and which of its checkpoints is meant: URL, URL@VERSION, URL@latest."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.storage import Storage
from psstore.errors import BadArgument

LAST_VERSION = 10**18 - 1
"""The largest that a URL may name, and a folder."""

_LOCAL = re.compile(r"(?:file|local)://(?P<path>/.*)")
_CHOICE = re.compile(r"(?P<place>.+)@(?:latest|v?(?P<version>\d{1,18}))")
FOLDER = re.compile(r"v(\d{12,18})")
"""A checkpoint's folder in its place."""


class CheckpointUrl(NamedTuple):
    place: str
    version: int | None
    """None: the latest."""


def parse_url(url: str) -> CheckpointUrl:
    """Raises BadArgument for no URL at all, and for something else than a version behind the last '@'."""
    if not url:
        raise BadArgument(
            "the checkpoint's URL is empty; expected a folder or a URL, as s3://bucket/run, with @VERSION"
        )
    found = _CHOICE.fullmatch(url)
    if found is None:
        if "@" in url.rpartition("/")[2]:
            raise BadArgument(f"{url}: expected a version's number or 'latest' behind the '@'")
        return CheckpointUrl(url, None)
    version = found["version"]
    return CheckpointUrl(found["place"], None if version is None else int(version))


def folder_of(version: int) -> str:
    """Sorted by name they are sorted by version."""
    return f"v{version:012d}"


def version_of(folder: str) -> int | None:
    """None for what is no checkpoint's folder."""
    found = FOLDER.fullmatch(folder)
    return int(found[1]) if found and folder_of(int(found[1])) == folder else None


def open_storage(place: str, **options: Any) -> Storage:
    """The storage of a place: without a protocol, or with file://, the host's own file system; else fsspec's. Raises
    BadArgument, StorageFailed."""
    local = _LOCAL.fullmatch(place)
    if local is not None or "://" not in place:
        return LocalStorage(local["path"] if local else place)
    from psstore.checkpoint.remote_storage import open_remote

    return open_remote(place, **options)
