"""The place that a store writes its checkpoints to: committing them, and removing what nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence

from psstore.checkpoint.manifest import MANIFEST, FileRecord, Manifest, names
from psstore.checkpoint.ownership import Ownership
from psstore.checkpoint.place import COMPLETE, UNFINISHED, CheckpointPlace
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.url import folder_of
from psstore.checkpoint.writer import commit, new_attempt
from psstore.errors import BadArgument


class OwnedPlace:
    """One store's checkpoints. Not thread-safe; every call blocks. Raises StorageFailed, and CheckpointPlaceTaken once
    another store has the place."""

    def __init__(self, place: CheckpointPlace, ownership: Ownership, *, keep: int) -> None:
        """`keep`: how many complete checkpoints there may be; the oldest go. Raises BadArgument for fewer than one."""
        if keep < 1:
            raise BadArgument(f"keep is {keep}; at least the newest checkpoint is kept: expected 1 or more")
        self.place = place
        self._storage = place.storage
        self._ownership = ownership
        self._keep = keep
        self._under_way: dict[int, str] = {}
        """Attempt at each version that is being written."""

    def start_at(self, version: int, *, discard_newer: bool = False) -> None:
        """The store begins at this version. Newer checkpoints are of another future: they would be the latest, so that
        nobody could write here. `discard_newer`: removes them; else raises BadArgument if there are some."""
        newer = [one for one in self.place.folders() if one > version and self.place.has(one)]
        if newer and not discard_newer:
            raise BadArgument(
                f"{self._storage.url} has version {newer[-1]}, and the store begins at version {version}: what it wrote"
                " would never be the latest. Begin at the latest, choose another place, or have newer ones discarded"
            )
        self._ownership.check()
        for one in reversed(newer):
            self._remove(one)

    def begin(self, version: int) -> str:
        """The name of a new attempt at this version, which all its writers are told. Touches no storage: whether the
        place is still the store's is looked at before it is committed."""
        attempt = self._under_way[version] = new_attempt()
        return attempt

    def commit(self, store: StoreState, files: Sequence[FileRecord]) -> Manifest:
        """Makes them the checkpoint of the version that was begun. Raises what `writer.commit` raises."""
        attempt = self._under_way[store.decision]
        self._ownership.check()
        manifest = commit(self._storage, attempt=attempt, store=store, files=files)
        del self._under_way[store.decision]
        return manifest

    def abandon(self, version: int) -> None:
        """The attempt has failed; what there is of it goes with the next `tidy_up`."""
        self._under_way.pop(version, None)

    def tidy_up(self) -> list[int]:
        """Removes all but the newest complete checkpoints that are to be kept, and what dead writers have left.
        Returns the versions that are gone.

        Never the newest complete one, nor what is being written. A damaged one goes when as many newer ones are
        complete as are to be kept.
        """
        self._ownership.check()
        kept = 0
        gone = []
        for version in reversed(self.place.folders()):
            if version in self._under_way:
                continue
            found = self.place.look_at(version) if kept < self._keep else None
            if found is None or found.status == UNFINISHED:
                self._remove(version)
                gone.append(version)
            elif found.status == COMPLETE and found.manifest is not None:
                kept += 1
                self._sweep(found.manifest)
        return gone

    def _remove(self, version: int) -> None:
        """The manifest first: from then on there is no checkpoint, and the rest can be removed at any time."""
        folder = folder_of(version)
        self._storage.remove(f"{folder}/{MANIFEST}")
        for entry in self._storage.entries(folder):
            self._storage.remove(f"{folder}/{entry.name}")
        self._storage.remove_folder(folder)

    def _sweep(self, manifest: Manifest) -> None:
        """Removes from a complete checkpoint's folder what other attempts left there."""
        folder = folder_of(manifest.version)
        for entry in self._storage.entries(folder):
            if not entry.is_folder and entry.name not in {MANIFEST, *names(manifest.files)}:
                self._storage.remove(f"{folder}/{entry.name}")
