"""The protocol under seeds: whatever the network and the workers do, what docs/consistency.md promises holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.checks import run_and_check
from sim.plan import MODES, Plan, plan_of

NUM_SEEDS = 300
"""About 30 s. `python -m tests.sim --seeds 0:10000` runs more."""

BATCH = 25


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_promises_hold_for_seeds_from(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run_and_check(plan_of(seed))
        except Exception as error:
            pytest.fail(f"{error!r}\nreproduce: python -m tests.sim --seed {seed} --verbose")


def test_same_seed_gives_the_same_run() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run_and_check(plan_of(11), trace=trace.append)
    assert traces[0] == traces[1]
