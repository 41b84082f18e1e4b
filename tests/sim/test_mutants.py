"""Whoever breaks a rule is found out: each mutant breaks one, and the simulator's checks notice it under some seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from psstore.errors import PsstoreError
from tests.sim.checks import check, watched
from tests.sim.mutants import (
    ELASTIC_MUTANTS,
    FALL_MUTANTS,
    FOLLOWER_MUTANTS,
    MUTANTS,
    NORM_MUTANTS,
    REFUSAL_MUTANTS,
    RESHARD_MUTANTS,
    STANDBY_MUTANTS,
    VOTE_MUTANTS,
    Mutant,
)
from tests.sim.plan import (
    Plan,
    elastic_plan_of,
    falling_plan_of,
    following_plan_of,
    guarded_plan_of,
    plan_of,
    refusing_plan_of,
    resharding_plan_of,
    standby_plan_of,
    voting_plan_of,
    with_rows,
)
from tests.sim.row_mutants import ROW_FALL_MUTANTS, ROW_MUTANTS, ROW_STANDBY_MUTANTS

MAX_SEEDS_TO_NOTICE = 250

NOTICED_BY = {
    "a shard says what it was asked last": 1,
    "decisions are carried backwards": 16,
    "a standby that has said that it never will leads": 97,
    "one word is enough to lead": 152,
    "heartbeats stay with the process that led": 66,
    "who computes does not look whether the coordinator speaks": 66,
    "a quorum that has everybody waits on": 91,
    "nobody wakes up when the grace is over": 210,
    "early decisions are like any other": 18,
    "skipped rounds are applied": 12,
    "older connections still speak": 101,
    "a new life inherits the old one's commit": 105,
    "a dead initialiser is waited for": 32,
    "nobody is given up": 108,
    "barriers open for the first": 12,
    "torn rounds go unnoticed": 72,
    "finish is answered at once": 51,
    "finish is answered once": 30,
    "whoever has pushed everything goes on": 51,
    "who reads in a torn round waits on": 92,
    "scales are kept to oneself": 331,
    "norms are added as they come": 49,
    "nobody is asked to hand in": 5,
    "whatever was handed in is written": 23,
    "slices that wait are answered": 55,
    "readers ask nobody for the last decision": 9,
    "leaders settle on what is newest": 186,
    "the coordinator's part is noted late": 162,
    "who waits for slower workers is not let go at the end": 219,
    "a new life knows no end of everybody's": 228,
    "workers are to be where a shard is led at once": 67,
    "who lied goes on": 1,
    "a gradient is compensated from what another was sent": 1,
    "members are in the order of arrival": 2,
    "rounds without a norm are not skipped": 4,
    "quorum is one too few": 1,
    "shards don't hear of scales": 2,
    "a client carries no decisions": 2,
    "what is held is not kept": 14,
    "commits count beyond the end": 11,
    "decisions are forgotten too early": 20,
    "staleness is one too many": 11,
    "abandoned writes leave a gap": 13,
    "who reads as of a decision gets what is newest": 1,
    "a repeated CREATE is carried out again": 12,
    "late workers are told that they count": 1,
    "the coordinator's own shard waits to be told": 1,
    "closed rounds are forgotten": 9,
    "losses are told at once": 15,
    "whatever is pulled at once is of one version": 18,
    "nobody is told that the store went back": 23,
    "lives are numbered anew": 1,
    "decisions are numbered anew": 10,
    "a shard begins empty": 22,
    "nobody is told who was absent": 1,
    "newcomers are told before the round is done": 23,
    "what the absent were given is not taken again": 1,
    "whoever was dropped goes on": 10,
    "the lost are waited for": 7,
    "nobody waits for standbys": 4,
    "standbys are not sent what clients write": 2,
    "standbys are not sent scales": 2,
    "a new standby is not sent what is staged": 4,
    "a new standby does not know which writes were applied": 10,
    "standbys are not sent decisions": 1,
    "standbys are not sent definitions": 4,
    "standbys don't hear which lives attached": 2,
    "standbys don't hear what the coordinator is asked": 4,
    "standbys don't hear who came": 1,
    "standbys don't hear what time it is": 23,
    "standbys don't hear what shards have applied": 1,
    "standbys may lead too early": 4,
    "a lost standby is done without at once": 28,
    "who leads has the old leader's connections": 112,
    "one shard speaks for all": 3,
    "rows that come twice in a push are not summed": 1,
    "partitions without rows are not named": 1,
    "rows go in the order in which they lie": 4,
    "rows are rounded by lots that a partition counts": 10,
    "admission counts decisions": 24,
    "an assigned row keeps its state": 1,
    "what is held has rows that were assigned since": 75,
    "a checkpoint is without what admission has counted": 30,
    "who reads rows as of a decision gets what is newest": 1,
    "rows that are held are not kept": 140,
    "rows begin anew when they were used": 29,
    "a table's steps are counted anew": 22,
    "what admission has counted is not loaded": 37,
    "who keeps rows does not hear of those that were trained": 4,
    "who keeps rows does not hear of those that were assigned": 102,
    "who keeps rows does not hear of those that were evicted": 4,
    "rows that were kept outlive the store that went back": 5,
    "who leads is taken for who led": 4,
    "standbys are not sent rows": 1,
    "a new standby does not know what admission has counted": 18,
    "a new standby does not know when rows were used": 2,
    "a new standby takes one codec of rows for another": 10,
    "a write that was refused is acknowledged when it comes again": 4,
    "a new standby does not know which writes were refused": 3,
    "who has missed versions is sent what changed first": 54,
    "changes have the elements of a later version": 500,
    "who has another version is sent changes since the next": 4,
    "a follower takes what comes for one version": 1,
    "a follower keeps what it had when the store goes back": 59,
    "what is not heard in a standstill is not asked for again": 4,
    "a quorum waits for the lost": 60,
    "a quorum does not wait for its grace": 9,
    "whoever comes within the grace is late": 9,
    "nothing is refused": 1,
    "what is not finite counts": 2,
    "norms are held against the largest": 1,
    "what is refused is kept like what counts": 1,
    "norms are of whatever tensors": 1,
    "refused workers are told that they count": 1,
    "where everybody is refused all count": 2,
    "a store that goes on elsewhere knows no norms": 10,
    "writes that were applied get a new number": 3,
    "the store stands still in the middle of a round": 18,
    "the store stands still before workers have handed in": 0,
}
"""Seeds to begin with: one that notices it, and whose run is short (many are a hundredth of seed 0's). They save time;
when the simulator has changed, others will do."""


Make = Callable[[int, str], Plan]
"""(seed, mode) -> the plan of a run."""


def and_rows(plan_of: Make) -> Make:
    return lambda seed, mode: with_rows(plan_of(seed, mode))


TABLES: dict[str, tuple[dict[str, tuple[str, Mutant]], Make]] = {
    "": (MUTANTS, plan_of),
    "where workers come and go": (ELASTIC_MUTANTS, elastic_plan_of),
    "of a store that goes back": (FALL_MUTANTS, falling_plan_of),
    "of a store with another number of shards": (RESHARD_MUTANTS, resharding_plan_of),
    "of shards with standbys": (STANDBY_MUTANTS, standby_plan_of),
    "where plain writes are refused": (REFUSAL_MUTANTS, refusing_plan_of),
    "where contributions are astray": (NORM_MUTANTS, guarded_plan_of),
    "where readers follow": (FOLLOWER_MUTANTS, following_plan_of),
    "of shards that vote": (VOTE_MUTANTS, voting_plan_of),
    "of rows": (ROW_MUTANTS, and_rows(plan_of)),
    "of rows of a store that goes back": (ROW_FALL_MUTANTS, and_rows(falling_plan_of)),
    "of rows of shards with standbys": (ROW_STANDBY_MUTANTS, and_rows(standby_plan_of)),
}
"""Where it shows -> what is broken, and the plans of such runs."""


RARE = {
    "a standby does not wait for the end of a lease",
    "an ended standby takes the place of the next",
    "standbys don't know the words",
}
"""What takes two rare things at once: a seed in a thousand notices it, and tests/protocol/test_standby.py always."""

MAX_SEEDS_FOR_RARE = 5_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where in TABLES for name in TABLES[where][0] if name not in RARE]
)
def test_simulator_notices_that(where: str, name: str) -> None:
    assert is_noticed(where, name, MAX_SEEDS_TO_NOTICE), f"{MAX_SEEDS_TO_NOTICE} seeds found nothing wrong"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", sorted(RARE))
def test_simulator_notices_sooner_or_later_that(name: str) -> None:
    (where,) = [where for where in TABLES if name in TABLES[where][0]]
    assert is_noticed(where, name, MAX_SEEDS_FOR_RARE), f"{MAX_SEEDS_FOR_RARE} seeds found nothing wrong"


def is_noticed(where: str, name: str, max_seeds: int) -> bool:
    mutants, plan_of = TABLES[where]
    mode, broken = mutants[name]
    for seed in (NOTICED_BY.get(name, 0), *range(max_seeds)):
        plan = plan_of(seed, mode)
        try:
            with broken():
                history = watched(plan).run()
            check(plan, history)
        except (AssertionError, PsstoreError, AttributeError, KeyError):
            return True
    return False
