"""A few runs of the chaos program; `python -m tests.chaos --runs 300` for many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.plan import plan_of
from tests.chaos.run import RUN_S, ChaosRun, run, undisturbed

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop, pytest.mark.timeout(2 * RUN_S)]

SEEDS = (1, 7, 8)
"""A worker killed and terminated; shards killed three times; what writes checkpoints killed."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disturbed_training_ends_with_the_undisturbed_bytes(seed: int) -> None:
    plan = plan_of(seed)
    result = run(plan)
    assert not result.problems(undisturbed(plan.num_shards, plan.num_workers, plan.overlap)), result.output
    assert result.done, "nothing went wrong in it"


def test_a_run_that_ends_otherwise_is_noticed() -> None:
    plan, end = plan_of(1), "version 60 sha256 00"
    good = ChaosRun(plan, ends={f"rank {rank}": end for rank in range(plan.num_workers)}, exit_code=0)
    assert not good.problems(end)
    assert good.problems("version 60 sha256 01")
    assert replace(good, ends={"rank 0": end}).problems(end)
    assert replace(good, exit_code=1).problems(end)
    assert replace(good, left=["sleep 600"]).problems(end)
