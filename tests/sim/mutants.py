"""Protocols broken on purpose, each in one place. A simulator that finds nothing wrong in them is worthless."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from msgspec.structs import replace

from psstore import _core
from psstore.client.changes import Copies
from psstore.client.layout import OneVersion
from psstore.client.norms import SquareSums
from psstore.errors import RoundOutOfOrder
from psstore.protocol import decision_log, decisions, election, norm_guard, rounds, shard_facts, standby
from psstore.protocol.barriers import Barriers
from psstore.protocol.clients import Clients
from psstore.protocol.connection import Connection
from psstore.protocol.connections import Connections
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.decision_carrier import DecisionCarrier
from psstore.protocol.decision_log import DecisionLog
from psstore.protocol.hand_ins import HandIns
from psstore.protocol.membership import Membership
from psstore.protocol.norm_guard import NormGuard
from psstore.protocol.promised_pushes import PromisedPushes
from psstore.protocol.replies import Reply
from psstore.protocol.roster import Roster
from psstore.protocol.rounds import Rounds
from psstore.protocol.service import ShardService
from psstore.protocol.session import Session
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.shares import Shares
from psstore.protocol.standby import Standby
from psstore.protocol.standby_list import StandbyList
from psstore.protocol.standstill import Standstill
from psstore.protocol.states import STANDBY, StandbyEvent, StandbyState
from psstore.protocol.stops import Stops
from psstore.protocol.words import Words
from psstore.server import restoring
from psstore.server.checkpoint_keeper import CheckpointKeeper
from psstore.server.store_state import placed
from psstore.types import Consistency
from psstore.wire import records
from psstore.wire.messages import Committed, Refusal, Signed, Welcome, Word
from psstore.wire.ranges import Ranges

from . import elections, scenario
from .machine import Machine

Mutant = Callable[[], AbstractContextManager[Any]]


def method(owner: type, name: str, replacement: Callable[..., Any]) -> Mutant:
    return lambda: mock.patch.object(owner, name, replacement)


def broken_in_core(rule: str) -> Mutant:
    """A rule of the compiled core that does not hold (csrc/core/breakable_rules.h)."""

    @contextmanager
    def broken() -> Iterator[None]:
        _core.break_rules([rule])
        try:
            yield
        finally:
            _core.break_rules([])

    return broken


# ---- the client ----


def decisions_are_carried_backwards(self: DecisionCache, number: int) -> tuple[Signed, ...]:
    oldest, kept = self._log
    return kept[max(0, number + 1 - oldest) :][::-1]


async def scales_are_kept_to_oneself(self: DecisionCarrier) -> None:
    pass


async def readers_ask_nobody(self: DecisionCarrier) -> int:
    return self.version


def norms_are_added_as_they_come(self: SquareSums) -> float:
    return math.sqrt(sum(float(sums.sum()) for sums in reversed(self._sums)))


# ---- the shards ----


@contextmanager
def skips_are_applied() -> Iterator[None]:
    to_core = shard_facts._to_core
    with mock.patch.object(shard_facts, "_to_core", lambda fact: to_core(replace(fact, skip=False))):
        yield


@contextmanager
def early_decisions_are_like_any_other() -> Iterator[None]:
    to_core = shard_facts._to_core
    with mock.patch.object(shard_facts, "_to_core", lambda fact: to_core(replace(fact, early=False))):
        yield


# ---- the coordinator ----


@contextmanager
def late_workers_are_told_that_they_count() -> Iterator[None]:
    answer = Rounds._answer

    def flattering(self: Rounds, *args: Any) -> Reply:
        told = answer(self, *args)
        assert isinstance(told.result, Committed)
        return Reply(told.conn, told.request, replace(told.result, late=False))

    with mock.patch.object(Rounds, "_answer", flattering):
        yield


@contextmanager
def closed_rounds_are_forgotten() -> Iterator[None]:
    commit = Rounds.commit

    def forgetful(self: Rounds, worker: Any, waiting: Any) -> list[Reply]:
        self.closed.clear()
        return commit(self, worker, waiting)

    with mock.patch.object(Rounds, "commit", forgetful):
        yield


@contextmanager
def staleness_is_one_too_many() -> Iterator[None]:
    slowest = Membership.slowest_clock
    with mock.patch.object(Membership, "slowest_clock", lambda self: slowest(self) + 1):
        yield


@contextmanager
def quorum_is_one_too_few() -> Iterator[None]:
    needed = Rounds._needed
    with mock.patch.object(Rounds, "_needed", lambda self: max(1, needed(self) - 1)):
        yield


@contextmanager
def nobody_wakes_up_when_the_grace_is_over() -> Iterator[None]:
    next_wake = Rounds.next_wake

    def drowsy(self: Rounds) -> float | None:
        with mock.patch.object(Rounds, "_grace_ends", return_value=None):
            return next_wake(self)

    with mock.patch.object(Rounds, "next_wake", drowsy):
        yield


@contextmanager
def whoever_comes_within_the_grace_is_late() -> Iterator[None]:
    commit = Rounds.commit

    def strict(self: Rounds, worker: Any, waiting: Any) -> list[Reply]:
        is_new = waiting.commit.round == worker.clock + 1 > self.log.last and worker.rank not in self._staged.of
        if self._quorum_at is not None and is_new:
            self._decide()
        return commit(self, worker, waiting)

    with mock.patch.object(Rounds, "commit", strict):
        yield


@contextmanager
def barriers_open_for_the_first() -> Iterator[None]:
    opening = Barriers.open

    def eager(self: Barriers, now: float | None) -> Any:
        here = {rank for waits in self._waits.values() for rank in waits}
        everybody = mock.patch.object(self._membership, "expected", return_value=here)
        with everybody, mock.patch.object(Membership, "num_expected", 0):
            return opening(self, now)

    with mock.patch.object(Barriers, "open", eager):
        yield


def decisions_are_forgotten_too_early(self: DecisionLog, shard: int, decision: int) -> None:
    while len(self._kept) > 1:
        self._kept.popleft()


@contextmanager
def one_shard_speaks_for_all() -> Iterator[None]:
    with mock.patch.object(decision_log, "min", max, create=True):
        yield


_replace_stops = Stops.replace


def a_new_life_knows_no_end(self: Stops, rank: int, others: Iterable[int]) -> None:
    _replace_stops(self, rank, others=())


@contextmanager
def finish_is_answered_at_once() -> Iterator[None]:
    wait = PromisedPushes.wait

    def hasty(self: PromisedPushes, worker: Any, finishing: Any) -> list[Reply]:
        self._owing.clear()
        return wait(self, worker, finishing)

    with mock.patch.object(PromisedPushes, "wait", hasty):
        yield


@contextmanager
def finish_is_answered_once() -> Iterator[None]:
    finish = Rounds.finish

    def forgetful(self: Rounds, worker: Any, finishing: Any) -> list[Reply]:
        if not self._promised.owes(worker.rank):
            raise RoundOutOfOrder("that round is finished")
        return finish(self, worker, finishing)

    with mock.patch.object(Rounds, "finish", forgetful):
        yield


@contextmanager
def whatever_was_handed_in_is_written() -> Iterator[None]:
    parts = CheckpointKeeper._parts

    def careless(self: CheckpointKeeper, state: Any) -> Any:
        with mock.patch.object(Consistency, "mode", "any"):
            return parts(self, state)

    with mock.patch.object(CheckpointKeeper, "_parts", careless):
        yield


@contextmanager
def the_coordinators_part_is_noted_late() -> Iterator[None]:
    gathered = CheckpointKeeper._gathered

    def late(self: CheckpointKeeper, asked: Any) -> Any:
        found = gathered(self, asked)
        return None if found is None else (replace(self._state(), decision=found[0].decision), found[1])

    with mock.patch.object(CheckpointKeeper, "_gathered", late):
        yield


@contextmanager
def leaders_settle_on_what_is_newest() -> Iterator[None]:
    begin = CheckpointKeeper.begin

    def newest(self: CheckpointKeeper, asked: Any, **who: Any) -> Any:
        begun = begin(self, asked, **who)
        return replace(begun, version=self._coordinator.rounds.log.last) if begun.gathering else begun

    with mock.patch.object(CheckpointKeeper, "begin", newest):
        yield


MUTANTS: dict[str, tuple[str, Mutant]] = {
    "nothing is sent again after a reconnect": ("sync", broken_in_core("THE_UNANSWERED_IS_SENT_AGAIN")),
    "writes that were applied get a new number": ("async", broken_in_core("APPLIED_WRITES_KEEP_THEIR_NUMBERS")),
    "abandoned writes leave a gap": ("async", broken_in_core("WRITES_HAVE_NO_GAPS")),
    "decisions are carried backwards": ("async", method(DecisionCache, "since", decisions_are_carried_backwards)),
    "a client carries no decisions": ("sync", method(DecisionCache, "since", lambda self, number: ())),
    "pushes overtake decisions": ("async", broken_in_core("DECISIONS_COME_FIRST")),
    "skipped rounds are applied": ("sync", skips_are_applied),
    "parked pulls are never woken": ("sync", method(ShardService, "woken", lambda self, now: [])),
    "older connections still speak": ("sync", method(Connections, "siblings", lambda self, c, h: ([], []))),
    "channels number their writes together": (
        "async",
        lambda: mock.patch.object(Connection, "writer", property(lambda self: self.client)),
    ),
    "late workers are told that they count": ("backup", late_workers_are_told_that_they_count),
    "closed rounds are forgotten": ("async", closed_rounds_are_forgotten),
    "staleness is one too many": ("ssp", staleness_is_one_too_many),
    "asynchronous commits wait": ("async", lambda: mock.patch.object(rounds, "UNBOUNDED", -2)),
    "quorum is one too few": ("sync", quorum_is_one_too_few),
    "a quorum does not wait for its grace": (
        "backup",
        method(Rounds, "_is_grace_over", lambda self, now: self._quorum_at is not None),
    ),
    "whoever comes within the grace is late": ("backup", whoever_comes_within_the_grace_is_late),
    "a quorum that has everybody waits on": ("backup", method(Rounds, "_has_everybody", lambda self: False)),
    "a quorum waits for the lost": ("backup", method(Membership, "given_up", lambda self: [])),
    "nobody wakes up when the grace is over": ("backup", nobody_wakes_up_when_the_grace_is_over),
    "members are in the order of arrival": ("sync", lambda: mock.patch.object(rounds, "sorted", list, create=True)),
    "the dead are never noticed": ("sync", method(Membership, "sweep", lambda self, now: [])),
    "losses are told at once": ("sync", method(Membership, "given_up", lambda self: self.lost())),
    "nobody is given up": ("sync", method(Membership, "given_up", lambda self: [])),
    "a new life inherits the old one's commit": ("sync", method(Rounds, "replaced", lambda self, rank: [])),
    "decisions are forgotten too early": ("async", method(DecisionLog, "applied", decisions_are_forgotten_too_early)),
    "one shard speaks for all": ("async", one_shard_speaks_for_all),
    "who lied goes on": ("sync", method(Membership, "refuse", lambda self, worker, why, now: None)),
    "a repeated CREATE is carried out again": (
        "async",
        method(Clients, "once", lambda self, client, request, answer: answer()),
    ),
    "a dead initialiser is waited for": ("sync", method(Clients, "is_gone", lambda self, client, **when: False)),
    "barriers open for the first": ("sync", barriers_open_for_the_first),
    "torn rounds go unnoticed": ("sync", method(Rounds, "_tear", lambda self, rank, why: [])),
    "finish is answered at once": ("sync", finish_is_answered_at_once),
    "finish is answered once": ("sync", finish_is_answered_once),
    "whoever has pushed everything goes on": (
        "sync",
        lambda: mock.patch.object(PromisedPushes, "pending", False),
    ),
    "early decisions are like any other": ("sync", early_decisions_are_like_any_other),
    "slices that wait are answered": ("sync", broken_in_core("CONTRIBUTIONS_ARE_WAITED_FOR")),
    "who reads in a torn round waits on": ("sync", method(Session, "abandon_reads", lambda self, error: None)),
    "what is held is not kept": ("async", broken_in_core("WHAT_IS_HELD_IS_KEPT")),
    "who reads as of a decision gets what is newest": ("async", broken_in_core("READS_ARE_AS_OF_THEIR_DECISION")),
    "whatever is pulled at once is of one version": ("async", method(OneVersion, "__bool__", lambda self: True)),
    "nobody is asked to hand in": ("sync", method(HandIns, "is_wanted", lambda self, worker: False)),
    "whatever was handed in is written": ("sync", whatever_was_handed_in_is_written),
    "the coordinator's part is noted late": ("async", the_coordinators_part_is_noted_late),
    "leaders settle on what is newest": ("async", leaders_settle_on_what_is_newest),
    "commits count beyond the end": ("async", method(Stops, "is_over", lambda self, rank, last: False)),
    "a new life knows no end of everybody's": (
        "sync",
        method(Stops, "replace", a_new_life_knows_no_end),
    ),
    "who waits for slower workers is not let go at the end": (
        "ssp",
        method(Stops, "at", lambda self, last: (0, 0)),
    ),
    "shards don't hear of scales": ("sync", broken_in_core("SCALES_ARE_HEARD")),
    "scales are kept to oneself": ("sync", method(DecisionCarrier, "tell_scale", scales_are_kept_to_oneself)),
    "readers ask nobody for the last decision": ("sync", method(DecisionCarrier, "learn_last", readers_ask_nobody)),
    "the coordinator's own shard waits to be told": (
        "async",
        method(ShardService, "catch_up", lambda self, now: []),
    ),
    "a gradient is compensated from what another was sent": ("async", broken_in_core("BASES_ARE_THEIR_OWN")),
    "what a worker is sent later is not its base": ("async", broken_in_core("BASES_MOVE")),
    "norms are added as they come": ("sync", method(SquareSums, "norm", norms_are_added_as_they_come)),
    "rounds without a norm are not skipped": ("sync", broken_in_core("NO_NORM_IS_A_SKIP")),
}
"""What is broken -> the mode in which it shows soonest, and how it is broken."""


# ---- a store that goes back ----


@contextmanager
def nobody_is_told() -> Iterator[None]:
    """Who knew the life before takes the new one for it."""
    welcomed = Session._welcomed

    def known(self: Session, welcome: Welcome, now: float) -> None:
        before = self.welcome
        welcomed(self, welcome if before is None else replace(welcome, store=before.store), now)

    with mock.patch.object(Session, "_welcomed", known):
        yield


def a_shard_begins_empty(
    checkpoint: Any,
    facts: shard_facts.ShardFacts,
    coordinator: Coordinator | None,
    *,
    index: int,
    num_shards: int,
    goes_on: bool,
) -> None:
    """The last one knows what there is, and has no values."""
    if coordinator is not None or index < num_shards - 1:
        restoring.restore_from(checkpoint, facts, coordinator, index=index, num_shards=num_shards, goes_on=goes_on)
        return
    facts.shard.set_version(checkpoint.version)
    for tensor in placed(checkpoint.store, num_shards=num_shards):
        facts.define_tensor(tensor)


# ---- contributions that are astray ----


@contextmanager
def what_is_refused_is_kept_like_what_counts() -> Iterator[None]:
    judge = NormGuard.judge

    def noting(self: NormGuard, rank: int, present: Ranges, norm: float | None) -> Refusal | None:
        refusal = judge(self, rank, present, norm)
        self.admit([(present, norm if refusal is not None and math.isfinite(refusal.norm) else None)])
        return refusal

    with mock.patch.object(NormGuard, "judge", noting):
        yield


@contextmanager
def norms_are_of_whatever_tensors() -> Iterator[None]:
    judge, admit = NormGuard.judge, NormGuard.admit
    with (
        mock.patch.object(NormGuard, "judge", lambda self, rank, present, norm: judge(self, rank, (), norm)),
        mock.patch.object(NormGuard, "admit", lambda self, norms: admit(self, [((), norm) for _, norm in norms])),
    ):
        yield


@contextmanager
def refused_workers_are_told_that_they_count() -> Iterator[None]:
    answer = Rounds._answer

    def flattering(self: Rounds, *args: Any) -> Reply:
        told = answer(self, *args)
        assert isinstance(told.result, Committed)
        return Reply(told.conn, told.request, replace(told.result, refused=None))

    with mock.patch.object(Rounds, "_answer", flattering):
        yield


@contextmanager
def whoever_is_refused_counts_all_the_same() -> Iterator[None]:
    make = decisions.make

    def generous(number: int, workers: Any, commits: Any, hypers: Any, *, skip: bool) -> Any:
        return make(number, workers, commits, hypers, skip=False)

    with mock.patch.object(decisions, "make", generous):
        yield


@contextmanager
def what_is_not_finite_counts() -> Iterator[None]:
    judge = NormGuard.judge
    tolerant: Callable[..., Refusal | None] = lambda self, rank, present, norm: judge(  # noqa: E731
        self, rank, present, norm if norm is not None and math.isfinite(norm) else None
    )
    with mock.patch.object(NormGuard, "judge", tolerant):
        yield


NORM_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "nothing is refused": ("sync", method(NormGuard, "judge", lambda self, rank, present, norm: None)),
    "what is not finite counts": ("async", what_is_not_finite_counts),
    "norms are held against the largest": ("sync", lambda: mock.patch.object(norm_guard, "median", max)),
    "what is refused is kept like what counts": ("sync", what_is_refused_is_kept_like_what_counts),
    "norms are of whatever tensors": ("sync", norms_are_of_whatever_tensors),
    "refused workers are told that they count": ("backup", refused_workers_are_told_that_they_count),
    "where everybody is refused all count": ("async", whoever_is_refused_counts_all_the_same),
    "a store that goes on elsewhere knows no norms": (
        "sync",
        method(NormGuard, "restore", lambda self, norms, num_refused: None),
    ),
}
"""As above, and shown where contributions are astray."""


FALL_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "nobody is told that the store went back": ("sync", nobody_is_told),
    "a shard begins empty": ("sync", lambda: mock.patch.object(scenario, "restore_from", a_shard_begins_empty)),
    "lives are numbered anew": ("async", method(Membership, "restore", lambda self, *_, **__: None)),
    "decisions are numbered anew": ("sync", method(DecisionLog, "restore", lambda self, last: None)),
}
"""As above, and shown where the store goes back to checkpoints."""


# ---- a store that goes on with another number of shards ----


def frozen_in_word_only(self: Standstill, client: str, *, gather_s: float, now: float) -> bool:
    return client == self._allowed


RESHARD_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a shard says that it is frozen, and goes on": ("async", method(Standstill, "ask", frozen_in_word_only)),
    "the store stands still before workers have handed in": (
        "sync",
        method(Standstill, "_is_handed_in", lambda self: True),
    ),
    "the store stands still in the middle of a round": (
        "sync",
        method(Standstill, "_is_quiet", lambda self, has_gathered: True),
    ),
    "what is not heard in a standstill is not asked for again": (
        "sync",
        method(Standstill, "end", lambda self: self._data.freeze(False)),
    ),
}
"""As above, and shown where the store goes on with another number of shards."""


# ---- workers that come back to a store that goes on ----


@contextmanager
def nobody_who_was_there_is_waited_for() -> Iterator[None]:
    restore = Membership.restore

    def forgetful(self: Membership, incarnations: Any, left: Any = (), **_: Any) -> None:
        restore(self, incarnations, left)

    with mock.patch.object(Membership, "restore", forgetful):
        yield


RETURN_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "nobody who was there is waited for": ("sync", nobody_who_was_there_is_waited_for),
}
"""As above, and shown where workers come back to a store that goes back, or on with another number of shards."""


# ---- shards with standbys ----


def _unheard(kind: type[records.Record]) -> Mutant:
    """Standbys take no notice of this kind of records."""

    @contextmanager
    def broken() -> Iterator[None]:
        take = Standby._take

        def deaf(self: Standby, record: Any, now: float) -> list[bytes]:
            return [] if isinstance(record, kind) else take(self, record, now)

        with mock.patch.object(Standby, "_take", deaf):
            yield

    return broken


@contextmanager
def standbys_may_lead_too_early() -> Iterator[None]:
    """As soon as they follow, before their shard has said that nobody is told what they lack."""
    in_sync = StandbyState.IN_SYNC
    with (
        mock.patch.dict(STANDBY.rows[StandbyState.FILLING], {StandbyEvent.FILLED: in_sync}),
        mock.patch.dict(STANDBY.rows[in_sync], {StandbyEvent.TOLD: in_sync}),
    ):
        yield


def standbys_are_trusted_too_early(self: StandbyList, conn: int) -> None:
    """As soon as they are sent the word that nobody is told what they lack, which may be lost with their shard."""
    _standby_completes(self, conn)
    one = self._of.get(conn)
    if one is not None and one.counts and not one.may_lead:
        self.on_in_sync(one.client)


_standby_completes = StandbyList.complete


def a_lost_standby_is_done_without_at_once(self: StandbyList, conn: int) -> None:
    one = self._of.get(conn)
    if one is not None:
        self.done_without(one.client)
        self.on_lost(one.client)


def a_gone_standby_is_given_time(self: StandbyList, conn: int) -> None:
    """As if it were there, and slow."""
    one = self._of.get(conn)
    if one is not None:
        one.is_gone = True


def a_place_is_not_looked_at() -> AbstractContextManager[object]:
    came = StandbyList.came
    return mock.patch.object(
        StandbyList, "came", lambda self, connection, client, place: came(self, connection, client)
    )


def the_last_word_counts(self: Words, client: str, *, leads: bool) -> bool:
    self.of[client] = leads
    return True


def words_are_told_at_once(self: ShardFacts, client: str, *, leads: bool) -> bool:
    self.words.give(client, leads=leads)
    return self.words.of[client]


def any_word_will_do(words: Sequence[Word | None]) -> election.Succession:
    said = [None if word is None else word.leads for word in words]
    return election.succession([Word(leads=True)] if True in said else words)


def an_ended_standby_takes_the_place_of_the_next(
    self: StandbyList, connection: Connection, client: str, *, place: str = ""
) -> None:
    for one in list(self._of.values()):
        if place and one.place == place:
            self.done_without(one.client)
    _standby_came(self, connection, client, place=place)


_standby_came = StandbyList.came


def one_that_retired_may_lead() -> AbstractContextManager[object]:
    return mock.patch.dict(STANDBY.rows[StandbyState.IN_SYNC], {StandbyEvent.ENDS: StandbyState.IN_SYNC})


def nobody_is_watched() -> AbstractContextManager[object]:
    def begin(self: Session) -> None:
        _session_begins(self)
        self.is_watched = False

    return mock.patch.object(Session, "__post_init__", begin)


_session_begins = Session.__post_init__


VOTE_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a standby that has said that it never will leads": ("async", one_that_retired_may_lead),
    "a standby does not wait for the end of a lease": (
        "async",
        lambda: mock.patch.object(standby, "LEASES_WAITED", 0.3),
    ),
    "an ended standby takes the place of the next": (
        "sync",
        method(StandbyList, "came", an_ended_standby_takes_the_place_of_the_next),
    ),
    "workers are to be where a shard is led at once": (
        "sync",
        method(Membership, "all_went", lambda self, now: None),
    ),
    "heartbeats stay with the process that led": (
        "sync",
        method(Machine, "renew_heartbeats", lambda self: None),
    ),
    "who computes does not look whether the coordinator speaks": ("sync", nobody_is_watched),
    "a shard says what it was asked last": ("async", method(Words, "give", the_last_word_counts)),
    "standbys don't know the words": ("async", method(ShardFacts, "give_word", words_are_told_at_once)),
    "one word is enough to lead": ("async", lambda: mock.patch.object(elections, "succession", any_word_will_do)),
}
"""As above, and shown where shards vote on who leads."""

STANDBY_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "nobody waits for standbys": ("async", broken_in_core("REPLIES_WAIT_FOR_STANDBYS")),
    "standbys are not sent what clients write": ("sync", broken_in_core("WRITES_ARE_RECORDED")),
    "standbys are not sent scales": ("sync", broken_in_core("SCALES_ARE_RECORDED")),
    "a new standby is not sent what is staged": ("sync", broken_in_core("WHAT_IS_STAGED_IS_FILLED_IN")),
    "a new standby does not know which writes were applied": ("async", broken_in_core("WINDOWS_ARE_FILLED_IN")),
    "standbys are not told what workers were sent": ("async", broken_in_core("BASES_ARE_RECORDED")),
    "a new standby does not know what workers were sent": ("async", broken_in_core("BASES_ARE_FILLED_IN")),
    "standbys are not sent decisions": ("sync", _unheard(records.DecisionTaken)),
    "standbys are not sent definitions": ("sync", _unheard(records.TensorsDefined)),
    "standbys don't hear which lives attached": ("sync", _unheard(records.LifeAttached)),
    "standbys don't hear what the coordinator is asked": ("sync", _unheard(records.ClientAsked)),
    "standbys don't hear who came": ("sync", _unheard(records.ClientCame)),
    "standbys don't hear what time it is": ("sync", _unheard(records.TimePassed)),
    "standbys don't hear what shards have applied": ("async", _unheard(records.ShardSaid)),
    "standbys may lead too early": ("async", standbys_may_lead_too_early),
    "standbys are taken to lead too early": ("async", method(StandbyList, "complete", standbys_are_trusted_too_early)),
    "a lost standby is done without at once": (
        "async",
        method(StandbyList, "went", a_lost_standby_is_done_without_at_once),
    ),
    "a standby whose connection is gone is given time": (
        "sync",
        method(StandbyList, "went", a_gone_standby_is_given_time),
    ),
    "who was in a standby's place before is waited for": ("async", a_place_is_not_looked_at),
    "who leads has the old leader's connections": ("sync", method(Coordinator, "all_went", lambda self, now: None)),
}
"""As above, and shown where shards have standbys, of which some die."""


# ---- memory that clients share, and standbys see ----

SHARING_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "clients write to what standbys have not let go of": ("async", broken_in_core("WHAT_IS_LENT_IS_KEPT")),
}
"""As above, and shown where standbys see what clients push through shared memory."""


# ---- plain writes that are refused ----

REFUSAL_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a write that was refused is acknowledged when it comes again": (
        "async",
        broken_in_core("REFUSED_WRITES_STAY_REFUSED"),
    ),
    "a new standby does not know which writes were refused": ("async", broken_in_core("REFUSALS_ARE_FILLED_IN")),
}
"""As above, and shown where clients add to what has no value yet."""


# ---- readers that follow ----


FOLLOWER_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "who has missed versions is sent what changed first": ("async", broken_in_core("MARKS_ARE_ADDED_UP")),
    "changes have the elements of a later version": ("async", broken_in_core("CHANGES_ARE_OF_THEIR_VERSION")),
    "who has another version is sent changes since the next": ("async", broken_in_core("MARKS_ARE_SINCE_THEN")),
    "a follower takes what comes for one version": ("async", method(OneVersion, "__bool__", lambda self: True)),
    "a follower keeps what it had when the store goes back": ("async", method(Copies, "forget", lambda self: None)),
}
"""As above, and shown where readers follow by what changes."""


# ---- workers that come and go ----


def changes_are_told_without(**left_out: tuple[int, ...]) -> Mutant:
    decided = Roster.decided

    def silent(self: Roster, number: int, took: Collection[int]) -> None:
        decided(self, number, took)
        if self.log:
            self.log[-1] = replace(self.log[-1], **left_out)

    return method(Roster, "decided", silent)


def what_the_absent_were_given_is_lost() -> AbstractContextManager[object]:
    take = Shares._take
    return mock.patch.object(Shares, "_take", lambda self, absent: take(self, set()))


ELASTIC_MUTANTS: dict[str, tuple[str, Mutant]] = {
    "newcomers begin in the open round": ("sync", method(Roster, "arrived", lambda self, *args, **named: False)),
    "newcomers are told before the round is done": ("sync", lambda: mock.patch.object(Rounds, "is_done", True)),
    "nobody is told who was absent": ("sync", changes_are_told_without(absent=())),
    "nobody is told who has gone": ("sync", changes_are_told_without(went=())),
    "what the absent were given is not taken again": ("sync", what_the_absent_were_given_is_lost),
    "the lost are waited for": ("sync", method(Membership, "given_up", lambda self: [])),
    "whoever was dropped goes on": ("sync", method(Membership, "worker_of", lambda self, client: self.find(client))),
}
"""As above, and shown where workers come and go."""
