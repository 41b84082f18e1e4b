"""The protocol under seeds: whatever the network and the workers do, what docs/consistency.md promises holds."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from psstore.protocol.grace import Grace
from psstore.types import ADAPTIVE
from tests.sim.checks import check, run_and_check, watched
from tests.sim.history import History
from tests.sim.plan import (
    Plan,
    elastic_plan_of,
    falling_plan_of,
    following_plan_of,
    guarded_plan_of,
    plan_of,
    refusing_plan_of,
    resharding_plan_of,
    returning_plan_of,
    sharing_plan_of,
    standby_plan_of,
    voting_plan_of,
    with_rows,
)
from tests.sim.rows import BOUNDS
from tests.sim.scenario import Scenario

NUM_SEEDS = 150
NUM_FALLING_SEEDS = 50
NUM_ELASTIC_SEEDS = 25
NUM_RESHARDING_SEEDS = 25
NUM_RETURNING_SEEDS = 25
NUM_STANDBY_SEEDS = 25
NUM_SHARING_SEEDS = 25
NUM_VOTING_SEEDS = 25
NUM_REFUSING_SEEDS = 75
NUM_GUARDED_SEEDS = 25
NUM_FOLLOWING_SEEDS = 25
"""By what more of them would find: of the mutants of each kind (tests/sim/mutants.py) so many seeds notice as many as
75 do, but for two of readers that follow; of the usual kind 75 notice 45 of 54, and 150 notice 48. About a minute;
`python -m tests.sim --seeds 0:10000` runs more."""
BATCH = 25
ROWS_EVERY = 5
"""Of so many seeds one has tables of rows, with which a run takes longer."""


def planned(make: Callable[[int], Plan], seed: int) -> Plan:
    """The plan of that kind for the seed."""
    plan = make(seed)
    return with_rows(plan) if seed % ROWS_EVERY == 0 else plan


@cache
def checked(seed: int) -> History:
    """What happened under that seed: every promise was held against it."""
    return run_and_check(planned(plan_of, seed))


@contextmanager
def reproducible(plan: Plan, kind: str = "") -> Iterator[None]:
    """Says how to see it again if anything goes wrong in that run."""
    try:
        yield
    except Exception as error:
        rows = "--rows " if plan.tables else ""
        pytest.fail(f"{error!r}\nreproduce: python -m tests.sim {kind}{rows}--seed {plan.seed} --verbose")


def histories(plans: Iterable[Plan], kind: str) -> Iterator[History]:
    """What happened in each run: every promise was held against it."""
    for plan in plans:
        with reproducible(plan, kind):
            history = run_and_check(plan)
        yield history


def batch(make: Callable[[int], Plan], first: int) -> Iterator[Plan]:
    """The plans of that kind for a batch of seeds, some with rows."""
    return (planned(make, seed) for seed in range(first, first + BATCH))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_promises_hold_for_seeds_from(first: int) -> None:
    for seed in range(first, first + BATCH):
        with reproducible(planned(plan_of, seed)):
            checked(seed)


@pytest.mark.parametrize("first", range(0, NUM_FALLING_SEEDS, BATCH))
def test_promises_hold_where_the_store_goes_back_for_seeds_from(first: int) -> None:
    num_falls = sum(len(history.falls) for history in histories(batch(falling_plan_of, first), "--falls "))
    assert num_falls, "it never went back"


@pytest.mark.parametrize("first", range(0, NUM_RESHARDING_SEEDS, BATCH))
def test_promises_hold_where_the_number_of_shards_changes_for_seeds_from(first: int) -> None:
    num_reshards = 0
    for plan in batch(resharding_plan_of, first):
        scenario = watched(plan)
        with reproducible(plan, "--reshards "):
            check(plan, scenario.run())
        num_reshards += scenario.num_reshards
    assert num_reshards > BATCH // 2, "hardly ever"


@pytest.mark.parametrize("first", range(0, NUM_ELASTIC_SEEDS, BATCH))
def test_promises_hold_where_workers_come_and_go_for_seeds_from(first: int) -> None:
    num_changes = 0
    for history in histories(batch(elastic_plan_of, first), "--elastic "):
        num_changes += len({members for members, _, _ in history.shares.values()}) - 1
    assert num_changes > BATCH, "hardly anybody came or went"


@pytest.mark.parametrize("first", range(0, NUM_RETURNING_SEEDS, BATCH))
def test_promises_hold_where_workers_come_back_to_a_store_that_goes_on_for_seeds_from(first: int) -> None:
    num_returning = 0
    for history in histories(batch(returning_plan_of, first), "--returns "):
        num_returning += sum(len(ranks) > 1 for ranks in history.there_before.values())
    assert num_returning > BATCH // 2, "hardly several at a time"


@pytest.mark.parametrize("first", range(0, NUM_STANDBY_SEEDS, BATCH))
def test_promises_hold_where_standbys_lead_for_seeds_from(first: int) -> None:
    num_promotions = 0
    for plan in batch(standby_plan_of, first):
        scenario = Scenario(plan)
        with reproducible(plan, "--standbys "):
            check(plan, scenario.run())
        num_promotions += scenario.standbys.num_promotions
    assert num_promotions > BATCH, "hardly a standby led"


@pytest.mark.parametrize("first", range(0, NUM_SHARING_SEEDS, BATCH))
def test_promises_hold_where_standbys_see_what_clients_push_for_seeds_from(first: int) -> None:
    for _ in histories(batch(sharing_plan_of, first), "--shared "):
        pass


@pytest.mark.parametrize("first", range(0, NUM_REFUSING_SEEDS, BATCH))
def test_promises_hold_where_plain_writes_are_refused_for_seeds_from(first: int) -> None:
    num_refused = num_applied = 0
    for history in histories(map(refusing_plan_of, range(first, first + BATCH)), "--refusals "):
        num_refused += sum(told.refused for told in history.additions.values())
        num_applied += sum(told.applied for told in history.additions.values())
    assert num_refused > 10 * BATCH, "hardly a write was refused"
    assert num_applied > 10 * BATCH, "hardly a write was applied"


@pytest.mark.parametrize("first", range(0, NUM_FOLLOWING_SEEDS, BATCH))
def test_promises_hold_where_readers_follow_for_seeds_from(first: int) -> None:
    num_versions = num_by_changes = 0
    for history in histories(map(following_plan_of, range(first, first + BATCH)), "--followers "):
        num_versions += len(history.versions)
        num_by_changes += history.num_by_changes
    assert num_by_changes > num_versions // 4, "most came whole"
    assert num_by_changes > 10 * BATCH, "hardly a version came by changes"


@pytest.mark.parametrize("first", range(0, NUM_GUARDED_SEEDS, BATCH))
def test_promises_hold_where_contributions_are_refused_for_seeds_from(first: int) -> None:
    refusals = [
        (told.refused, told.skip)
        for history in histories(batch(guarded_plan_of, first), "--norms ")
        for told in history.commits.values()
        if told.refused is not None
    ]
    assert len(refusals) > BATCH, "hardly anything was refused"
    assert sum(math.isfinite(refusal.norm) for refusal, _ in refusals) > BATCH // 2, "hardly by a limit"
    assert {True, False} == {skip for _, skip in refusals}


@pytest.mark.parametrize("first", range(0, NUM_VOTING_SEEDS, BATCH))
def test_promises_hold_where_shards_vote_on_who_leads_for_seeds_from(first: int) -> None:
    num_promotions = num_done_without = num_retired = 0
    for plan in batch(voting_plan_of, first):
        scenario = Scenario(plan)
        with reproducible(plan, "--votes "):
            check(plan, scenario.run())
        num_promotions += scenario.elections.num_promotions
        num_done_without += scenario.elections.num_done_without
        num_retired += scenario.elections.num_retired
    assert num_promotions > BATCH // 4, "hardly a standby led"
    assert num_done_without > BATCH // 4, "hardly a shard went on without its standby"
    assert num_retired > BATCH // 20, "hardly a standby was told to end"


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


def test_a_checkpoint_that_waited_for_workers_is_without_rows_assigned_since_its_decision() -> None:
    run_and_check(with_rows(voting_plan_of(16103)))


def test_who_leaves_does_so_before_the_end_where_long_steps_make_it_an_early_one() -> None:
    run_and_check(voting_plan_of(10552))


def test_a_store_whose_workers_died_before_they_gave_it_values_has_none() -> None:
    run_and_check(plan_of(10894))


def test_a_slice_with_infinite_values_that_is_still_what_was_sent_is_not_compensated() -> None:
    run_and_check(falling_plan_of(10990))


def test_a_decision_is_told_later_where_one_standby_after_the_other_is_out_of_reach() -> None:
    run_and_check(with_rows(standby_plan_of(13228)))


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
    plan = replace(calm, stop_at=None, num_workers=3, rounds=6, compute_s=(0.1, 0.1, 2.0), num_shards=2, grace_s=0.1)
    history = run_and_check(plan)
    late = [cell for cell, committed in history.commits.items() if committed.late]
    assert late
    assert 2 in {rank for rank, _, _ in late}
    assert history.outcomes["worker 2.1"] == "finished"


def test_a_grace_that_is_to_pay_does_not_last_until_a_slow_worker_comes() -> None:
    calm = plan_of(0, "backup").undisturbed()
    slow = replace(
        calm, stop_at=None, num_workers=3, rounds=20, compute_s=(0.1, 0.1, 3.0), num_shards=2, grace_s=ADAPTIVE
    )
    history = run_and_check(slow)
    assert 2 in {rank for (rank, _, _), committed in history.commits.items() if committed.late}
    with (
        mock.patch.object(Grace, "_worth_s", return_value=60.0),
        pytest.raises(AssertionError, match="graces_are_kept"),
    ):
        check(slow, watched(slow).run())


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


def test_rows_are_read_listed_assigned_and_written_down_in_some_seeds() -> None:
    with_tables = [checked(seed) for seed in range(0, NUM_SEEDS, ROWS_EVERY)]
    for noted in ("row_reads", "row_lists", "assigned"):
        assert sum(len(getattr(history, noted)) for history in with_tables) > 20, noted
    assert any(history.rows and history.archived for history in with_tables)
    assert sum(one.base is not None for history in with_tables for one in history.archived) > 5
    bounds = {bound for seed in range(NUM_SEEDS) for _, bound in planned(plan_of, seed).tables}
    assert bounds == set(BOUNDS)
    assert {True, False} == {narrow for seed in range(NUM_SEEDS) for narrow in planned(plan_of, seed).narrow_tables}
