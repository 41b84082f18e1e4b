"""Owns the places that a store writes its checkpoints to, and says which attempts become one. Beside the coordinator.

Storage may take its time, or hang: each place has a thread of its own for it, and whoever asks is told to ask again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from psstore.checkpoint.handed import unpack_handed
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.manifest import FileRecord, Manifest
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import LEASE_S, Ownership, take
from psstore.checkpoint.place import open_place
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart, write_worker_file
from psstore.errors import BadArgument, BadSignature, CheckpointPlaceTaken, PsstoreError, StorageError, StorageFailed
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.signing import Signer
from psstore.server.store_state import store_state
from psstore.wire.messages import Begin, Begun, Keep, Kept, SavedFact, SaveFact, Signed
from psstore.wire.ranges import to_ranges

T = TypeVar("T")

FORGET_S = 60.0
"""An attempt of which nobody has asked for so long is given up: who led it is gone."""

GATHER_FORGET_S = 5.0
"""One that has not begun yet, likewise."""

ALL = 1 << 62
"""How many checkpoints stay at a place that somebody has named once."""

_log = logging.getLogger("psstore.server")


class CheckpointKeeper:
    """The `protocol.saving.Keeper` of a store."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        num_shards: int,
        signer: Signer,
        lineage: str,
        url: str | None,
        keep: int,
        any_place: bool,
    ) -> None:
        """`url`: where checkpoints go if nobody says otherwise; the last `keep` stay. `any_place`: clients may name
        another one."""
        self._coordinator = coordinator
        self._num_shards = num_shards
        self._signer = signer
        self._lineage = lineage
        self._url = url
        self._keep = keep
        self._any_place = any_place
        self._places: dict[str, _Place] = {}
        self._gathering: _Gathering | None = None
        self._attempt: _Attempt | None = None
        self._kept = ""
        """The attempt that became a checkpoint last."""

    def open(self, version: int) -> None:
        """Before the store serves: takes its own place, for a store that begins at this version; blocks. Raises
        StorageError, BadArgument."""
        if self._url is not None:
            place = self._places[self._url] = _Place(self._url, keep=self._keep)
            place.owned.result().start_at(version)

    def close(self) -> None:
        """Leaves the places to others."""
        for place in self._places.values():
            place.close()

    def begin(self, asked: Begin) -> Begun:
        """See protocol/saving.py. Raises TornRound: a torn store is at no decision."""
        self._coordinator.rounds.refuse_if_torn()
        place = self._place_for(asked.url)
        if place.has_failed:
            del self._places[place.url]  # whoever asks again has it tried again
        owned = place.owned_now()
        if owned is None or self._is_busy(asked.reader):
            return Begun(ready=False)
        if asked.reader == 0:
            return Begun(ready=True)
        state = self._gathered(asked)
        if state is None:
            return Begun(ready=False, gathering=True)
        name = owned.begin(state.decision)
        self._attempt = _Attempt(place, owned, name, state, self._parts(state), asked_at=time.monotonic())
        fact = SaveFact(
            url=place.url,
            version=state.decision,
            attempt=name,
            reader=asked.reader,
            tensors=to_ranges(tensor.id for tensor in state.tensors),
        )
        decisions = self._coordinator.rounds.log.since(0)
        return Begun(ready=True, version=state.decision, save=self._signer.sign(fact), decisions=decisions)

    def led(self, attempt: str) -> None:
        """See protocol/saving.py."""
        if self._attempt is not None and self._attempt.name == attempt:
            self._attempt.asked_at = time.monotonic()

    def keep(self, asked: Keep) -> Kept:
        """See protocol/saving.py."""
        saved = [self._opened(one) for one in asked.saved]
        names = {one.attempt for one in saved}
        if names == {self._kept}:
            return Kept(done=True)
        attempt = self._attempt
        if attempt is None or names != {attempt.name} or {one.shard for one in saved} != set(range(self._num_shards)):
            raise BadArgument("what shards have written is not the attempt under way; begin the checkpoint again")
        if attempt.kept is None:
            self._check_catalogue(attempt)
            attempt.keep([msgspec.json.decode(one.record, type=FileRecord) for one in saved])
        assert attempt.kept is not None
        if not attempt.kept.done():
            return Kept(done=False)
        self._conclude(attempt)
        attempt.kept.result()
        return Kept(done=True)

    # ---- how ----

    def _place_for(self, url: str | None) -> _Place:
        if url is None and self._url is None:
            raise BadArgument("this store was started without --checkpoint: say where its checkpoint is to go")
        chosen = self._url if url is None else url
        assert chosen is not None
        if chosen != self._url and not self._any_place:
            raise BadArgument(
                f"this store serves several users, and writes where it was started to: "
                f"{self._url or 'nowhere (start it with --checkpoint)'}"
            )
        place = self._places.get(chosen)
        if place is None:
            place = self._places[chosen] = _Place(chosen, keep=self._keep if chosen == self._url else ALL)
        return place

    def _gathered(self, asked: Begin) -> StoreState | None:
        """The coordinator's part, once workers have handed in as of its decision; None: not yet."""
        now, hand_ins = time.monotonic(), self._coordinator.rounds.hand_ins
        gathering = self._gathering
        if gathering is None or gathering.reader != asked.reader:
            gathering = self._gathering = _Gathering(asked.reader, self._state(), now, now + asked.gather_s)
            if asked.gather_s > 0.0 and hand_ins.missing(gathering.cut.decision):
                hand_ins.want_next(gathering.cut.decision, lambda: gathering.take(self._state()))
        gathering.asked_at = now
        missing = hand_ins.missing(gathering.cut.decision)
        if missing and now < gathering.until:
            return None
        if missing:
            _log.warning(
                "the checkpoint of version %d is without what ranks %s hand in: they have not done so as of it",
                gathering.cut.decision,
                ", ".join(map(str, missing)),
            )
        hand_ins.enough()
        self._gathering = None
        return gathering.cut

    def _state(self) -> StoreState:
        return store_state(self._coordinator, lineage=self._lineage)

    def _parts(self, state: StoreState) -> list[WorkerPart]:
        """What workers have handed in that belongs to that decision: where rounds have all workers, as of it exactly;
        else the last of each, which is of a moment near it."""
        parts = []
        for rank, handed in sorted(self._coordinator.rounds.hand_ins.of.items()):
            if handed.version == state.decision or self._coordinator.consistency.mode != "sync":
                try:
                    value = unpack_handed(handed.state)
                except BadArgument as error:
                    _log.warning("what rank %d has handed in is in no checkpoint: %s", rank, error.message)
                    continue
                parts.append(
                    WorkerPart(rank=rank, incarnation=handed.incarnation, version=handed.version, handed=value)
                )
        return parts

    def _is_busy(self, reader: int) -> bool:
        """Whether there is an attempt that somebody else leads, or that storage is at work on."""
        gathering = self._gathering
        if gathering is not None and gathering.reader != reader:
            if time.monotonic() - gathering.asked_at <= GATHER_FORGET_S:
                return True
            self._coordinator.rounds.hand_ins.enough()
            self._gathering = None
        attempt = self._attempt
        if attempt is None:
            return False
        if attempt.kept is None and time.monotonic() - attempt.asked_at > FORGET_S:
            self._abandon(attempt)
        elif attempt.kept is not None and attempt.kept.done():  # and who led it has gone before he was told
            self._conclude(attempt)
        return self._attempt is not None

    def _conclude(self, attempt: _Attempt) -> None:
        """Storage is done with it: the attempt is a checkpoint, or has failed."""
        assert attempt.kept is not None
        if attempt.kept.exception() is not None:
            self._abandon(attempt)
            return
        self._attempt, self._kept = None, attempt.name
        _log.info("checkpoint of version %d is at %s", attempt.state.decision, attempt.place.url)

    def _abandon(self, attempt: _Attempt) -> None:
        attempt.owned.abandon(attempt.state.decision)
        self._attempt = None

    def _opened(self, signed: Signed) -> SavedFact:
        fact = self._signer.open(signed)
        if not isinstance(fact, SavedFact):
            raise BadSignature("KEEP carries a fact that says nothing of a checkpoint")
        return fact

    def _check_catalogue(self, attempt: _Attempt) -> None:
        """A tensor that was dropped meanwhile may be missing in a shard's file."""
        now = {tensor.id for tensor in self._coordinator.schemas.tensors}
        if not now >= {tensor.id for tensor in attempt.state.tensors}:
            self._abandon(attempt)
            raise StorageFailed("a tensor was dropped while the checkpoint was written; write it again")


@dataclass
class _Attempt:
    """A checkpoint that is being written."""

    place: _Place
    owned: OwnedPlace
    name: str
    state: StoreState
    parts: Sequence[WorkerPart]
    asked_at: float
    """When whoever leads it was heard of last."""
    kept: Future[Manifest] | None = None

    def keep(self, records: Sequence[FileRecord]) -> None:
        def run() -> Manifest:
            manifest = self.owned.commit(self.state, [*records, *self._write_parts()])
            try:
                self.owned.tidy_up()
            except StorageError as error:
                _log.warning("older checkpoints could not be removed: %s", error.message)
            return manifest

        self.kept = self.place.submit(run)

    def _write_parts(self) -> list[FileRecord]:
        storage, version = self.owned.place.storage, self.state.decision
        if not self.parts:
            return []
        with HashPool() as pool:
            return [
                write_worker_file(storage, part, version=version, attempt=self.name, pool=pool) for part in self.parts
            ]


@dataclass
class _Gathering:
    """A checkpoint that is about to begin, once workers have handed in."""

    reader: int
    """Who leads it."""
    cut: StoreState
    """The coordinator's part as of the decision that is asked for."""
    asked_at: float
    """When whoever leads it was heard of last."""
    until: float
    """When it begins with what there is."""

    def take(self, cut: StoreState) -> None:
        self.cut = cut


class _Place:
    """A place and its thread, which takes it, does what is to be done there, and says that the owner lives."""

    def __init__(self, url: str, *, keep: int) -> None:
        self.url = url
        self._keep = keep
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ownership: Ownership | None = None
        self.owned = self.submit(self._take)
        """Done once the place is the store's."""
        self._thread = threading.Thread(target=self._run, name="psstore-place", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self.owned.done() and self.owned.exception() is not None

    def owned_now(self) -> OwnedPlace | None:
        """None: it is not known yet. Raises why it can't be had."""
        return self.owned.result() if self.owned.done() else None

    def submit(self, run: Callable[[], T]) -> Future[T]:
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

    def close(self) -> None:
        """Leaves the place, if storage lets it within a moment."""
        self._work.put(None)
        self._thread.join(timeout=2.0)

    def _take(self) -> OwnedPlace:
        place = open_place(self.url).place
        self._ownership = take(place.storage)
        return OwnedPlace(place, self._ownership, keep=self._keep)

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=LEASE_S / 3)
            except queue.Empty:
                self._renew()
                continue
            if work is None:
                break
            work()
            if self.has_failed:
                return
        if self._ownership is not None:
            try:
                self._ownership.release()
            except StorageError as error:
                _log.warning("the place could not be left: %s", error.message)

    def _renew(self) -> None:
        if self._ownership is None:
            return
        try:
            self._ownership.renew()
        except CheckpointPlaceTaken as error:
            _log.error("%s", error.message)
        except StorageError as error:
            _log.warning("the place could not be renewed: %s", error.message)
