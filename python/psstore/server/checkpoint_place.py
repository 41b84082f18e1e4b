"""A place of checkpoints as the store's keeper uses it: on storage, which may take its time, or hang."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from psstore.checkpoint.hash_pool import HashPool, room_for_thread
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import LEASE_S, Ownership, take
from psstore.checkpoint.place import open_place
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart, write_worker_file
from psstore.errors import CheckpointPlaceTaken, PsstoreError, StorageError, StorageFailed

T = TypeVar("T")

ALL = 1 << 62
"""More checkpoints than there are."""

_log = logging.getLogger("psstore.server")


class KeptPlace(Protocol):
    """Where a store's checkpoints go. No call blocks."""

    url: str

    @property
    def has_failed(self) -> bool:
        """Whether it can't be had: `is_ready` says why."""

    def is_ready(self) -> bool:
        """Whether it is the store's by now. Raises StorageError, BadArgument if it can't be."""

    def begin(self, version: int, *, has_rows: bool) -> tuple[str, int | None]:
        """The name of a new attempt, and the version since which it is to have what has changed of tables; None: all of
        it. `has_rows`: there are tables. REQUIRES: `is_ready`."""

    def keep(
        self, name: str, state: StoreState, parts: Sequence[WorkerPart], records: Sequence[FileRecord]
    ) -> Future[None]:
        """Makes what shards have written for that attempt, and these parts, a checkpoint."""

    def abandon(self, version: int) -> None:
        """The attempt at this version has failed."""

    def leave(self) -> None:
        """Leaves it to others, once what is under way there is done."""

    def close(self) -> None:
        """As `leave`, and waits a moment for it."""


class StoragePlace:
    """A `KeptPlace` with a thread of its own, which takes it, does what is to be done there, and says that the owner
    lives."""

    def __init__(
        self,
        url: str,
        *,
        store: str = "",
        led_before: int = 0,
        at: int | None = None,
        keep: int = ALL,
        full_every: int = 1,
    ) -> None:
        """`store`, `led_before`: see OwnerRecord. `at`: the version that the store is at, where it is under way; where
        it begins, `start_at` is told. `keep`, `full_every`: see OwnedPlace."""
        self.url = url
        self._store = store
        self._led_before = led_before
        self._at = at
        self._keep = keep
        self._full_every = full_every
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ownership: Ownership | None = None
        self._renew_at = 0.0
        self._owned = self._submit(self._take)
        self._thread = threading.Thread(target=self._run, name="psstore-place", daemon=True)
        try:
            with room_for_thread():
                self._thread.start()
        except StorageFailed as error:
            self._owned.set_exception(error)

    def start_at(self, version: int) -> None:
        """Once, by a store that begins at this version; blocks until the place is its own. Raises StorageError,
        BadArgument."""
        self._owned.result().start_at(version)

    @property
    def has_failed(self) -> bool:
        """See KeptPlace."""
        return self._owned.done() and self._owned.exception() is not None

    def is_ready(self) -> bool:
        """See KeptPlace."""
        if not self._owned.done():
            return False
        self._owned.result()
        return True

    def begin(self, version: int, *, has_rows: bool) -> tuple[str, int | None]:
        """See KeptPlace."""
        owned = self._owned.result()
        return owned.begin(version, has_rows=has_rows), owned.base_of(version)

    def keep(
        self, name: str, state: StoreState, parts: Sequence[WorkerPart], records: Sequence[FileRecord]
    ) -> Future[None]:
        """See KeptPlace."""

        def run() -> None:
            owned = self._owned.result()
            owned.commit(state, [*records, *self._write(owned, name, state, parts)])
            self._tidy_up()

        return self._submit(run)

    def abandon(self, version: int) -> None:
        """See KeptPlace. What was written of it is removed: the next attempt is of another version, and may need the
        room."""
        self._owned.result().abandon(version)
        self._submit(self._tidy_up)

    def leave(self) -> None:
        """See KeptPlace."""
        self._work.put(None)

    def close(self) -> None:
        """See KeptPlace."""
        self.leave()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    # ---- how ----

    def _submit(self, run: Callable[[], T]) -> Future[T]:
        """Runs it on the thread."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(run())
            except PsstoreError as error:
                future.set_exception(error)
            except Exception as error:
                _log.exception("a bug in psstore")
                future.set_exception(StorageFailed(f"{self.url}: {error!r}"))

        self._work.put(work)
        return future

    def _take(self) -> OwnedPlace:
        place = open_place(self.url).place
        self._ownership = take(place.storage, store=self._store, led_before=self._led_before)
        owned = OwnedPlace(place, self._ownership, keep=self._keep, full_every=self._full_every)
        if self._at is not None:
            owned.start_at(self._at)
        return owned

    def _run(self) -> None:
        while True:
            self._renew_if_due()
            try:
                work = self._work.get(timeout=max(0.0, self._renew_at - time.monotonic()))
            except queue.Empty:
                continue
            if work is None:
                break
            work()
            if self.has_failed:
                break
        if self._ownership is not None:
            try:
                self._ownership.release()
            except StorageError as error:
                _log.warning("the place could not be left: %s", error.message)

    def _tidy_up(self) -> None:
        try:
            self._owned.result().tidy_up()
        except StorageError as error:
            _log.warning("what is not needed any more could not be removed: %s", error.message)

    def _write(
        self, owned: OwnedPlace, name: str, state: StoreState, parts: Sequence[WorkerPart]
    ) -> Iterator[FileRecord]:
        """What workers have handed in, a file each."""
        if not parts:
            return
        storage, version = owned.place.storage, state.decision
        with HashPool(yielding=True) as pool:
            for part in parts:
                self._renew_if_due()
                yield write_worker_file(storage, part, version=version, attempt=name, pool=pool)

    def _renew_if_due(self) -> None:
        """To be called as often as a piece of work is done: whoever is silent for a lease loses the place."""
        if time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + LEASE_S / 3
        if self._ownership is None:
            return
        try:
            self._ownership.renew()
        except CheckpointPlaceTaken as error:
            _log.error("%s", error.message)
            self._ownership = None  # it is somebody else's for good, or removed: whoever writes there is told
        except StorageError as error:
            _log.warning("the place could not be renewed: %s", error.message)
