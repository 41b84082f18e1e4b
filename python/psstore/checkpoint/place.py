"""A place: the folder of a run's checkpoints. What is in it, which is the latest, and opening one."""

from __future__ import annotations

from typing import Any, NamedTuple

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import MANIFEST, Manifest
from psstore.checkpoint.reader import Checkpoint, check_sizes, read_manifest
from psstore.checkpoint.storage import Storage
from psstore.checkpoint.url import CheckpointUrl, folder_of, open_storage, parse_url, version_of
from psstore.errors import CheckpointNotFound, StorageError, StorageFailed

COMPLETE, DAMAGED, UNFINISHED = "complete", "damaged", "unfinished"


class FoundCheckpoint(NamedTuple):
    """A folder of a place, looked at but not read."""

    version: int
    status: str
    """COMPLETE: the manifest is right, and the files are as long as it says. DAMAGED: not so. UNFINISHED: there is no
    manifest, so that there is no checkpoint."""
    manifest: Manifest | None = None
    problem: str = ""
    """What is damaged."""


class CheckpointPlace:
    """The checkpoints below one URL. Thread-safe; every call blocks and may raise StorageFailed."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def folders(self) -> list[int]:
        """Versions that have a folder, ascending, finished or not."""
        found = (version_of(entry.name) for entry in self.storage.entries("") if entry.is_folder)
        return sorted(version for version in found if version is not None)

    def has(self, version: int) -> bool:
        """Whether the version was committed."""
        return any(entry.name == MANIFEST for entry in self.storage.entries(folder_of(version)))

    def latest(self) -> int:
        """The newest version that was committed; whether it is damaged is found out when it is opened. Nobody is
        taken back to an older one without being asked. Raises CheckpointNotFound."""
        for version in reversed(self.folders()):
            if self.has(version):
                return version
        raise CheckpointNotFound(
            f"{self.storage.url} has no complete checkpoint; check the URL: it is that of the place, which has a folder"
            " of each version",
            url=self.storage.url,
        )

    def look_at(self, version: int) -> FoundCheckpoint:
        """Reads the manifest and asks for the sizes of its files."""
        try:
            manifest = read_manifest(self.storage, version)
        except CheckpointNotFound:
            return FoundCheckpoint(version, UNFINISHED)
        except StorageFailed:
            raise
        except StorageError as error:
            return FoundCheckpoint(version, DAMAGED, problem=error.message)
        try:
            check_sizes(self.storage, manifest)
        except StorageFailed:
            raise
        except StorageError as error:
            return FoundCheckpoint(version, DAMAGED, manifest, error.message)
        return FoundCheckpoint(version, COMPLETE, manifest)

    def list(self) -> list[FoundCheckpoint]:
        """All there are, the oldest first."""
        return [self.look_at(version) for version in self.folders()]

    def open(self, version: int | None = None, *, pool: HashPool | None = None) -> Checkpoint:
        """`version`: None means the latest. Raises what `latest` and `Checkpoint` raise."""
        return Checkpoint(self.storage, self.latest() if version is None else version, pool=pool)


class OpenedUrl(NamedTuple):
    place: CheckpointPlace
    version: int | None
    """None: the latest."""


def open_place(url: str, **options: Any) -> OpenedUrl:
    """From URL, URL@VERSION or URL@latest. `options`: fsspec's. Raises BadArgument, StorageFailed."""
    chosen: CheckpointUrl = parse_url(url)
    return OpenedUrl(CheckpointPlace(open_storage(chosen.place, **options)), chosen.version)


def open_checkpoint(url: str, *, pool: HashPool | None = None, **options: Any) -> Checkpoint:
    """Opens what the URL names. Raises BadArgument, CheckpointNotFound, CheckpointDamaged, CheckpointUnsupported,
    StorageFailed."""
    opened = open_place(url, **options)
    return opened.place.open(opened.version, pool=pool)
