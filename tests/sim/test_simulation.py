"""The protocol under seeds: whatever the network and the workers do, what docs/consistency.md promises holds."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest

from psstore.errors import PsstoreError
from tests.sim.checks import check, run_and_check, watched
from tests.sim.history import History
from tests.sim.mutants import (
    ELASTIC_MUTANTS,
    FALL_MUTANTS,
    MUTANTS,
    RESHARD_MUTANTS,
    STANDBY_MUTANTS,
    VOTE_MUTANTS,
    Mutant,
)
from tests.sim.plan import (
    Plan,
    elastic_plan_of,
    falling_plan_of,
    plan_of,
    resharding_plan_of,
    standby_plan_of,
    voting_plan_of,
)
from tests.sim.scenario import Scenario

NUM_SEEDS = 150
"""About 30 s. `python -m tests.sim --seeds 0:10000` runs more."""

NUM_FALLING_SEEDS = 75
NUM_ELASTIC_SEEDS = 75
NUM_RESHARDING_SEEDS = 50
NUM_STANDBY_SEEDS = 75
NUM_VOTING_SEEDS = 75
BATCH = 25

MAX_SEEDS_TO_NOTICE = 250

NOTICED_BY = {
    "one word is enough to lead": 52,
    "standbys don't know the words": 350,
    "a standby does not wait for the end of a lease": 475,
    "a shard says what it was asked last": 2,
    "early decisions are like any other": 18,
    "skipped rounds are applied": 12,
    "older connections still speak": 132,
    "a new life inherits the old one's commit": 44,
    "a dead initialiser is waited for": 43,
    "nobody is given up": 143,
    "barriers open for the first": 12,
    "torn rounds go unnoticed": 44,
    "finish is answered at once": 33,
    "finish is answered once": 98,
    "whoever has pushed everything goes on": 44,
    "who reads in a torn round waits on": 44,
    "scales are kept to oneself": 331,
    "norms are added as they come": 49,
    "nobody is asked to hand in": 5,
    "whatever was handed in is written": 23,
    "slices that wait are answered": 55,
    "readers ask nobody for the last decision": 9,
    "leaders settle on what is newest": 186,
    "the coordinator's part is noted late": 12,
    "who waits for slower workers is not let go at the end": 189,
    "who lied goes on": 1,
    "members are in the order of arrival": 2,
    "rounds without a norm are not skipped": 4,
    "quorum is one too few": 1,
    "shards don't hear of scales": 2,
    "a client carries no decisions": 2,
    "what is held is not kept": 14,
    "commits count beyond the end": 11,
    "decisions are forgotten too early": 18,
    "staleness is one too many": 11,
    "abandoned writes leave a gap": 13,
    "who reads as of a decision gets what is newest": 1,
    "a repeated CREATE is carried out again": 6,
    "late workers are told that they count": 1,
    "decisions are carried backwards": 2,
    "the coordinator's own shard waits to be told": 1,
    "closed rounds are forgotten": 9,
    "losses are told at once": 15,
    "whatever is pulled at once is of one version": 20,
    "nobody is told that the store went back": 31,
    "lives are numbered anew": 5,
    "decisions are numbered anew": 10,
    "a shard begins empty": 22,
    "nobody is told who was absent": 1,
    "newcomers are told before the round is done": 209,
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
    "standbys don't hear what time it is": 20,
    "standbys don't hear what shards have applied": 1,
    "standbys may lead too early": 9,
    "a lost standby is done without at once": 9,
    "who leads has the old leader's connections": 112,
    "one shard speaks for all": 3,
}
"""Seeds to begin with: one that notices it, and whose run is short (many are a hundredth of seed 0's). They save time;
when the simulator has changed, others will do."""


@cache
def checked(seed: int) -> History:
    """What happened under that seed: every promise was held against it."""
    return run_and_check(plan_of(seed))


@contextmanager
def reproducible(seed: int, kind: str = "") -> Iterator[None]:
    """Says how to see it again if anything goes wrong under that seed."""
    try:
        yield
    except Exception as error:
        pytest.fail(f"{error!r}\nreproduce: python -m tests.sim {kind}--seed {seed} --verbose")


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_promises_hold_for_seeds_from(first: int) -> None:
    for seed in range(first, first + BATCH):
        with reproducible(seed):
            checked(seed)


@pytest.mark.parametrize("first", range(0, NUM_FALLING_SEEDS, BATCH))
def test_promises_hold_where_the_store_goes_back_for_seeds_from(first: int) -> None:
    num_falls = 0
    for seed in range(first, first + BATCH):
        with reproducible(seed, "--falls "):
            num_falls += len(run_and_check(falling_plan_of(seed)).falls)
    assert num_falls, "it never went back"


@pytest.mark.parametrize("first", range(0, NUM_RESHARDING_SEEDS, BATCH))
def test_promises_hold_where_the_number_of_shards_changes_for_seeds_from(first: int) -> None:
    num_reshards = 0
    for seed in range(first, first + BATCH):
        scenario = watched(resharding_plan_of(seed))
        with reproducible(seed, "--reshards "):
            check(scenario.plan, scenario.run())
        num_reshards += scenario.num_reshards
    assert num_reshards > BATCH // 2, "hardly ever"


@pytest.mark.parametrize("first", range(0, NUM_ELASTIC_SEEDS, BATCH))
def test_promises_hold_where_workers_come_and_go_for_seeds_from(first: int) -> None:
    num_changes = 0
    for seed in range(first, first + BATCH):
        with reproducible(seed, "--elastic "):
            history = run_and_check(elastic_plan_of(seed))
        num_changes += len({members for members, _, _ in history.shares.values()}) - 1
    assert num_changes > BATCH, "hardly anybody came or went"


@pytest.mark.parametrize("first", range(0, NUM_STANDBY_SEEDS, BATCH))
def test_promises_hold_where_standbys_lead_for_seeds_from(first: int) -> None:
    num_promotions = 0
    for seed in range(first, first + BATCH):
        scenario = Scenario(standby_plan_of(seed))
        with reproducible(seed, "--standbys "):
            check(scenario.plan, scenario.run())
        num_promotions += scenario.standbys.num_promotions
    assert num_promotions > BATCH, "hardly a standby led"


@pytest.mark.parametrize("first", range(0, NUM_VOTING_SEEDS, BATCH))
def test_promises_hold_where_shards_vote_on_who_leads_for_seeds_from(first: int) -> None:
    num_promotions = num_done_without = 0
    for seed in range(first, first + BATCH):
        scenario = Scenario(voting_plan_of(seed))
        with reproducible(seed, "--votes "):
            check(scenario.plan, scenario.run())
        num_promotions += scenario.elections.num_promotions
        num_done_without += scenario.elections.num_done_without
    assert num_promotions > BATCH // 4, "hardly a standby led"
    assert num_done_without > BATCH // 4, "hardly a shard went on without its standby"


def test_a_worker_of_which_only_the_heartbeats_met_the_store_before_it_fell_is_one_of_the_next_store() -> None:
    run_and_check(falling_plan_of(163))


def test_a_checkpoint_whose_leader_asks_again_after_a_slice_was_gone_is_not_written() -> None:
    run_and_check(falling_plan_of(1468))


def test_a_refused_worker_that_still_beats_is_lost_since_it_was_refused() -> None:
    run_and_check(plan_of(1650))


def test_a_newcomer_that_waited_long_enough_is_told_whose_round_it_waited_for() -> None:
    run_and_check(elastic_plan_of(1327))


def test_a_standby_that_was_asked_for_deadlines_at_other_times_is_what_its_shard_is() -> None:
    run_and_check(voting_plan_of(92))


def test_same_seed_gives_the_same_run() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run_and_check(plan_of(11), trace=trace.append)
    assert traces[0] == traces[1]


def test_a_run_leaves_nothing_in_memory() -> None:
    """Whoever was killed in it has left questions that nobody answered."""
    scenario = Scenario(plan_of(2))
    scenario.run()
    world = weakref.ref(scenario.world)
    del scenario
    gc.collect()
    assert world() is None


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process for what is broken: what hundreds of runs leave in memory goes with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


TABLES: dict[str, tuple[dict[str, tuple[str, Mutant]], Callable[[int, str], Plan]]] = {
    "": (MUTANTS, plan_of),
    "where workers come and go": (ELASTIC_MUTANTS, elastic_plan_of),
    "of a store that goes back": (FALL_MUTANTS, falling_plan_of),
    "of a store with another number of shards": (RESHARD_MUTANTS, resharding_plan_of),
    "of shards with standbys": (STANDBY_MUTANTS, standby_plan_of),
    "of shards that vote": (VOTE_MUTANTS, voting_plan_of),
}
"""Where it shows -> what is broken, and the plans of such runs."""


@pytest.mark.parametrize(("where", "name"), [(where, name) for where in TABLES for name in TABLES[where][0]])
def test_simulator_notices_that(where: str, name: str, apart: ProcessPoolExecutor) -> None:
    found = apart.submit(is_noticed, where, name).result()
    assert found, f"{MAX_SEEDS_TO_NOTICE} seeds found nothing wrong"


def is_noticed(where: str, name: str) -> bool:
    mutants, plan_of = TABLES[where]
    mode, broken = mutants[name]
    for seed in (NOTICED_BY.get(name, 0), *range(MAX_SEEDS_TO_NOTICE)):
        plan = plan_of(seed, mode)
        try:
            with broken():
                history = watched(plan).run()
            check(plan, history)
        except (AssertionError, PsstoreError, KeyError):
            return True
    return False


def test_ssp_goes_to_its_bound_and_not_beyond() -> None:
    plan = replace(
        plan_of(0, "ssp").undisturbed(),
        stop_at=None,
        num_workers=3,
        rounds=8,
        staleness=2,
        compute_s=(0.01, 0.01, 1.0),
        num_shards=2,
    )
    history = run_and_check(plan)
    assert max(history.leads) == history.max_staleness == 2


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_synchronous_bytes_do_not_depend_on_the_number_of_shards(num_shards: int) -> None:
    plan = replace(plan_of(0, "sync"), num_workers=3, deaths=(), leaves=(), break_chance=0.05, num_shards=num_shards)
    run_and_check(plan)  # compares with one shard


def test_late_worker_is_told_so_and_catches_up() -> None:
    calm = plan_of(0, "backup").undisturbed()
    plan = replace(calm, stop_at=None, num_workers=3, rounds=6, compute_s=(0.1, 0.1, 2.0), num_shards=2)
    history = run_and_check(plan)
    late = [cell for cell, committed in history.commits.items() if committed.late]
    assert late
    assert 2 in {rank for rank, _, _ in late}
    assert history.outcomes["worker 2.1"] == "finished"


def test_disturbances_do_happen() -> None:
    """Seeds that never lose an answer or a worker would prove nothing."""
    histories = [checked(seed) for seed in range(40)]
    assert sum(history.num_duplicates for history in histories) > 20
    assert any(committed.late for history in histories for committed in history.commits.values())
    assert any(m.incarnation > 1 for history in histories for d in history.decisions for m in d.members)
    assert any(decision.skip for history in histories for decision in history.decisions)


def test_rounds_are_early_clipped_and_torn_in_some_seeds() -> None:
    histories = [checked(seed) for seed in range(NUM_SEEDS)]
    factors = {factor for history in histories for factor in history.factors.values()}
    assert {None, 1.0} < factors
    assert sum(decision.early for history in histories for decision in history.decisions) > 20
    assert any(history.torn is not None for history in histories)
