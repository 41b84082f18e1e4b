"""Says which attempts become checkpoints, and what the coordinator and workers have in them. Beside the coordinator.

Nobody waits here: whoever asks too early is told to ask again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from psstore.checkpoint.handed import unpack_handed
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.state import StoreState
from psstore.checkpoint.worker_file import WorkerPart
from psstore.errors import BadArgument, BadSignature, DeadlineExceeded, StorageFailed, VersionGone
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.signing import Signer
from psstore.server.checkpoint_place import KeptPlace
from psstore.server.store_state import store_state
from psstore.wire.messages import Begin, Begun, Keep, Kept, SavedFact, SaveFact, Signed
from psstore.wire.ranges import to_ranges

FORGET_S = 15.0
"""An attempt of which nobody has asked for so long is given up: who leads one asks all the time, and reconnects."""

GATHER_FORGET_S = 5.0
"""One that has not begun yet, likewise."""

MAX_PLACES = 8
"""Had at once; beyond, the one that was asked for longest ago is left to others, unless it is the own one."""

GIVEN_UP = "who led it gave it up, or has gone"

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
        own: KeptPlace | None,
        open_place: Callable[[str, int], KeptPlace],
        any_place: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: where checkpoints go if nobody says otherwise. `open_place`: opens one that is asked for, the own one
        where it has failed, for a store at that version; `any_place`: whoever asks may name one. `now`: a monotonic
        clock, in seconds."""
        self._coordinator = coordinator
        self._num_shards = num_shards
        self._signer = signer
        self._lineage = lineage
        self._own = None if own is None else own.url
        self._open_place = open_place
        self._any_place = any_place
        self._now = now
        self._places = {} if own is None else {own.url: own}
        """By URL; the one that was asked for last at the end."""
        self._gathering: _Gathering | None = None
        self._attempt: _Attempt | None = None
        self._kept = ""
        """The attempt that became a checkpoint last."""
        self._last: int | None = None
        """Its version."""
        self._last_at = self._now()
        """When it was written; at first when this began."""
        self._num_written = self._num_failed = 0
        self._failure = ""
        """Why the last one came to nothing; '': it did not."""

    def has_place(self, own: KeptPlace) -> None:
        """Checkpoints go there if nobody says otherwise."""
        self._own, self._places[own.url] = own.url, own

    def forget(self, place: KeptPlace) -> None:
        """Whoever asks for it again has it opened again. REQUIRES: it has failed."""
        del self._places[place.url]

    def close(self) -> None:
        """Leaves the places to others."""
        for place in self._places.values():
            place.leave()
        for place in self._places.values():
            place.close()

    def counters(self) -> dict[str, int | float | str]:
        """See protocol/saving.py."""
        counters: dict[str, int | float | str] = {
            "checkpoint": -1 if self._last is None else self._last,
            "checkpoint_age_s": self._now() - self._last_at,
            "checkpoints_written": self._num_written,
            "checkpoints_failed": self._num_failed,
        }
        return {**counters, "checkpoint_failure": self._failure} if self._failure else counters

    def begin(self, asked: Begin, *, at_any_place: bool = False) -> Begun:
        """See protocol/saving.py. Raises TornRound: a torn store is at no decision."""
        if asked.give_up:
            self._give_up(asked)
            return Begun(ready=False)
        self._coordinator.rounds.refuse_if_torn()
        place = self._place_for(asked.url, any_place=self._any_place or at_any_place)
        if place.has_failed:  # this one is told why, and whoever asks again has it tried again
            self.forget(place)
        if not place.is_ready() or self._is_busy(asked.reader):
            return Begun(ready=False)
        if asked.reader == 0:
            return Begun(ready=True)
        gathered = self._gathered(asked)
        if gathered is None:
            assert self._gathering is not None, "it has just been looked at"
            return Begun(ready=False, gathering=True, version=self._gathering.version)
        state, parts = gathered
        has_rows = any(tensor.spec.rows is not None for tensor in state.tensors)
        name, since = place.begin(state.decision, has_rows=has_rows)
        self._attempt = _Attempt(
            place, name, state, parts, reader=asked.reader, asked_at=self._now(), is_last=at_any_place
        )
        fact = SaveFact(
            url=place.url,
            version=state.decision,
            attempt=name,
            reader=asked.reader,
            tensors=to_ranges(tensor.id for tensor in state.tensors),
            since=since,
        )
        decisions = self._coordinator.rounds.log.since(0)
        return Begun(ready=True, version=state.decision, save=self._signer.sign(fact), decisions=decisions)

    def led(self, attempt: str) -> None:
        """See protocol/saving.py."""
        if self._attempt is not None and self._attempt.name == attempt:
            self._attempt.asked_at = self._now()

    def keep(self, asked: Keep) -> Kept:
        """See protocol/saving.py."""
        saved = [self._opened(one) for one in asked.saved]
        names = {one.attempt for one in saved}
        if names == {self._kept}:
            return Kept(done=True)
        attempt = self._attempt
        if {one.shard for one in saved} != set(range(self._num_shards)):
            raise BadArgument(
                f"KEEP brings the words of {len(saved)} shards; expected one of each of {self._num_shards}"
            )
        if attempt is None or names != {attempt.name}:
            raise VersionGone(
                "what shards have written is not the attempt under way: that was given up, or went with the process"
                " that led shard 0; begin the checkpoint again"
            )
        if attempt.kept is None:
            self._check_catalogue(attempt)
            records = [msgspec.json.decode(one.record, type=FileRecord) for one in saved]
            attempt.kept = attempt.place.keep(attempt.name, attempt.state, attempt.parts, records)
        if not attempt.kept.done():
            return Kept(done=False)
        self._conclude(attempt)
        attempt.kept.result()
        return Kept(done=True)

    # ---- how ----

    def _place_for(self, url: str | None, *, any_place: bool) -> KeptPlace:
        url = self._own if url is None else url
        if url is None:
            raise BadArgument("this store was started without --checkpoint: say where its checkpoint is to go")
        if url in self._places:
            self._places[url] = self._places.pop(url)
            return self._places[url]
        if not any_place and url != self._own:
            where = "nowhere (start it with --checkpoint)" if self._own is None else self._own
            raise BadArgument(f"this store serves several users, and writes where it was started to: {where}")
        self._leave_one()
        place = self._places[url] = self._open_place(url, self._coordinator.rounds.log.last)
        return place

    def _leave_one(self) -> None:
        """Where there are as many places as may be: the one that was asked for longest ago, which nothing is written
        to."""
        if len(self._places) < MAX_PLACES:
            return
        busy = None if self._attempt is None else self._attempt.place
        idle = (url for url, place in self._places.items() if url != self._own and place is not busy)
        self._places.pop(next(idle)).leave()

    def _gathered(self, asked: Begin) -> tuple[StoreState, list[WorkerPart]] | None:
        """The coordinator's part and the workers', once these have handed in as of its decision; None: not yet."""
        now, hand_ins = self._now(), self._coordinator.rounds.hand_ins
        gathering = self._gathering
        if gathering is None or gathering.reader != asked.reader:
            gathering = self._gathering = _Gathering(asked.reader, self._state(), now, now + asked.gather_s)
            if asked.gather_s > 0.0 and hand_ins.missing(gathering.cut.decision):
                gathering.is_next = True
                hand_ins.want_next(gathering.cut.decision, lambda: gathering.take(self._state()))
        gathering.asked_at = now
        missing = hand_ins.missing(gathering.cut.decision)
        if missing and now < gathering.until:
            return None
        parts = self._parts(gathering.cut)
        hand_ins.enough()
        self._gathering = None
        if lacking := ", ".join(map(str, self._lacking(parts))):
            without = f"without what ranks {lacking} hand in: they have not done so as of it"
            if asked.whole:
                raise DeadlineExceeded(f"a checkpoint of version {gathering.cut.decision} would be {without}")
            _log.warning("the checkpoint of version %d is %s", gathering.cut.decision, without)
        return gathering.cut, parts

    def _lacking(self, parts: Sequence[WorkerPart]) -> list[int]:
        """Ranks that have not left, and have handed in, but as of another decision."""
        there = {part.rank for part in parts}
        ranks = set(self._coordinator.rounds.hand_ins.of) - there
        return sorted(ranks & set(self._coordinator.membership.present()))

    def _state(self) -> StoreState:
        return store_state(self._coordinator, lineage=self._lineage)

    def _parts(self, state: StoreState) -> list[WorkerPart]:
        """What workers have handed in that belongs to that decision: where rounds have all workers, as of it exactly;
        else the last of each, which is of a moment near it."""
        parts = []
        for rank, handed in sorted(self._coordinator.rounds.hand_ins.nearest.items()):
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
            if self._now() - gathering.asked_at <= GATHER_FORGET_S:
                return True
            self._coordinator.rounds.hand_ins.enough()
            self._gathering = None
        attempt = self._attempt
        if attempt is None:
            return False
        if attempt.kept is None and self._now() - attempt.asked_at > FORGET_S:
            self._abandon(attempt)
        elif attempt.kept is not None and attempt.kept.done():  # and who led it has gone before he was told
            self._conclude(attempt)
        return self._attempt is not None

    def _give_up(self, asked: Begin) -> None:
        """Makes room for the next one. What storage is at work on goes on."""
        if self._gathering is not None and self._gathering.reader == asked.reader:
            self._coordinator.rounds.hand_ins.enough()
            self._gathering = None
        if self._attempt is not None and self._attempt.reader == asked.reader and self._attempt.kept is None:
            self._abandon(self._attempt, why=asked.why or GIVEN_UP)

    def _conclude(self, attempt: _Attempt) -> None:
        """Storage is done with it: the attempt is a checkpoint, or has failed."""
        assert attempt.kept is not None
        error = attempt.kept.exception()
        if error is not None:
            self._abandon(attempt, why=str(error))
            return
        self._attempt, self._kept, self._last = None, attempt.name, attempt.state.decision
        self._last_at, self._failure = self._now(), ""
        self._num_written += 1
        _log.info("checkpoint of version %d is at %s", attempt.state.decision, attempt.place.url)

    def _abandon(self, attempt: _Attempt, *, why: str = GIVEN_UP) -> None:
        attempt.place.abandon(attempt.state.decision)
        if attempt.is_last and attempt.place.url != self._own:
            self._places.pop(attempt.place.url).leave()
        self._attempt, self._failure = None, why
        self._num_failed += 1

    def _opened(self, signed: Signed) -> SavedFact:
        fact = self._signer.open(signed)
        if not isinstance(fact, SavedFact):
            raise BadSignature("KEEP carries a fact that says nothing of a checkpoint")
        return fact

    def _check_catalogue(self, attempt: _Attempt) -> None:
        """A tensor that was dropped meanwhile may be missing in a shard's file."""
        now = {tensor.id for tensor in self._coordinator.schemas.tensors}
        if not now >= {tensor.id for tensor in attempt.state.tensors}:
            why = "a tensor was dropped while the checkpoint was written"
            self._abandon(attempt, why=why)
            raise StorageFailed(f"{why}; write it again")


@dataclass
class _Attempt:
    """A checkpoint that is being written."""

    place: KeptPlace
    name: str
    state: StoreState
    parts: Sequence[WorkerPart]
    reader: int
    """Who leads it."""
    asked_at: float
    """When whoever leads it was heard of last."""
    is_last: bool = False
    """The store is written down to go on with it: nobody else wants that place."""
    kept: Future[None] | None = None


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

    is_next: bool = False
    """The decision that is asked for was still to be made."""
    is_made: bool = False

    @property
    def version(self) -> int | None:
        """The decision that is asked for, once it is made."""
        return None if self.is_next and not self.is_made else self.cut.decision

    def take(self, cut: StoreState) -> None:
        self.cut, self.is_made = cut, True
