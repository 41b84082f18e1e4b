"""The place that a store writes its checkpoints to: committing them, and removing what nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psstore.checkpoint.bases import BaseChoice, Retention
from psstore.checkpoint.manifest import (
    MANIFEST,
    BaseRecord,
    FileRecord,
    Manifest,
    encode_manifest,
    manifest_digest,
    names,
)
from psstore.checkpoint.ownership import Ownership
from psstore.checkpoint.place import COMPLETE, UNFINISHED, CheckpointPlace
from psstore.checkpoint.reader import check_sizes, read_base
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.url import folder_of
from psstore.checkpoint.writer import commit, new_attempt
from psstore.errors import BadArgument, CheckpointDamaged, StorageFailed


class _BegunVersion(NamedTuple):
    """A version that is being written."""

    name: str
    base: BaseRecord | None
    """What a delta is of; None: it has all rows."""


class OwnedPlace:
    """One store's checkpoints. Not thread-safe; every call blocks. Raises StorageFailed, and CheckpointPlaceTaken once
    another store has the place."""

    def __init__(self, place: CheckpointPlace, ownership: Ownership, *, keep: int, full_every: int = 1) -> None:
        """`keep`: how many complete checkpoints there may be, beside those that they are deltas of; the oldest go.
        `full_every`: of so many that are written one has all rows, and the others what has changed since that one.
        Raises BadArgument for fewer than one."""
        if keep < 1:
            raise BadArgument(f"keep is {keep}; at least the newest checkpoint is kept: expected 1 or more")
        if full_every < 1:
            raise BadArgument(f"full_every is {full_every}; each checkpoint has all rows with 1: expected 1 or more")
        self.place = place
        self._storage = place.storage
        self._ownership = ownership
        self._keep = keep
        self._choice = BaseChoice(full_every)
        self._under_way: dict[int, _BegunVersion] = {}
        """Attempt at each version that is being written."""

    def start_at(self, version: int, *, discard_newer: bool = False) -> None:
        """The store is at this version, and has written nothing here. Newer checkpoints are of another future: they
        would be the latest, so that nobody could write here. `discard_newer`: removes them; else raises BadArgument if
        there are some."""
        newer = [one for one in self.place.folders() if one > version and self.place.has(one)]
        if newer and not discard_newer:
            raise BadArgument(
                f"{self._storage.url} has version {newer[-1]}, and the store is at version {version}: what it wrote"
                " would not be the latest. Begin at the latest, choose another place, or have newer ones discarded"
            )
        self._ownership.check()
        for one in reversed(newer):
            self._remove(one)

    def begin(self, version: int, *, has_rows: bool = False) -> str:
        """The name of a new attempt at this version, which all its writers are told. `has_rows`: there are tables, so
        that it may be a delta. Touches no storage: whether the place is still the store's is looked at before it is
        committed."""
        self._under_way[version] = _BegunVersion(new_attempt(), self._choice.base_for(version, has_rows=has_rows))
        return self._under_way[version].name

    def base_of(self, version: int) -> int | None:
        """The version since which the attempt at this one is to have what has changed; None: it is to have all rows."""
        base = self._under_way[version].base
        return None if base is None else base.version

    def commit(self, store: StoreState, files: Sequence[FileRecord]) -> Manifest:
        """Makes them the checkpoint of the version that was begun. Raises what `writer.commit` raises, and
        CheckpointDamaged if the base of a delta is not there any more: the next one is no delta."""
        attempt = self._under_way[store.decision]
        self._ownership.check()
        try:
            if attempt.base is not None:
                check_sizes(self._storage, read_base(self._storage, attempt.base, version=store.decision))
        except CheckpointDamaged:
            self._choice.lost()
            raise
        manifest = commit(
            self._storage,
            attempt=attempt.name,
            store=store,
            files=files,
            base=attempt.base,
            check=self._ownership.check,  # again: this process may have stood still while it looked at the files
        )
        del self._under_way[store.decision]
        own = BaseRecord(version=manifest.version, digest=manifest_digest(encode_manifest(manifest)))
        self._choice.written(own, attempt.base)
        return manifest

    def abandon(self, version: int) -> None:
        """The attempt has failed; what there is of it goes with the next `tidy_up`. Touches no storage."""
        self._under_way.pop(version, None)

    def tidy_up(self) -> list[int]:
        """Removes all but the newest complete checkpoints that are to be kept, and what dead writers have left.
        Returns the versions that are gone.

        Never the newest complete one, nor what is being written, nor what one that stays is a delta of. A damaged one
        goes when as many newer ones are complete as are to be kept. Where storage refuses to remove something, it
        says so in the end, once the others are gone.
        """
        self._ownership.check()
        gone = []
        refused: StorageFailed | None = None
        under_way = list(self._under_way.values())  # another thread begins and abandons attempts
        retention = Retention(self._keep, (attempt.base for attempt in under_way))
        for version in reversed(self.place.folders()):
            if version in self._under_way:
                continue
            found = self.place.look_at(version) if retention.may_stay(version) else None
            try:
                if found is None or found.status == UNFINISHED:
                    self._remove(version)
                    gone.append(version)
                    continue
                base = found.manifest.base if found.manifest is not None else None
                retention.stays(is_complete=found.status == COMPLETE, base=base)
                if found.status == COMPLETE and found.manifest is not None:
                    self._sweep(found.manifest)
            except StorageFailed as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return gone

    def _remove(self, version: int) -> None:
        """The manifest first: from then on there is no checkpoint, and the rest can be removed at any time. Folders in
        it are somebody else's."""
        folder = folder_of(version)
        self._storage.remove(f"{folder}/{MANIFEST}")
        for entry in self._storage.entries(folder):
            if not entry.is_folder:
                self._storage.remove(f"{folder}/{entry.name}")
        self._storage.remove_folder(folder)

    def _sweep(self, manifest: Manifest) -> None:
        """Removes from a complete checkpoint's folder what other attempts left there."""
        folder = folder_of(manifest.version)
        for entry in self._storage.entries(folder):
            if not entry.is_folder and entry.name not in {MANIFEST, *names(manifest.files)}:
                self._storage.remove(f"{folder}/{entry.name}")
