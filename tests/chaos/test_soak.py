"""What a soak makes of what it has seen, and a short one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import psutil
import pytest

from tests.chaos.plan import RUN_S
from tests.chaos.processes import name_of
from tests.chaos.soak import PUSHES_PER_STEP, plan_of_soak, soak
from tests.chaos.usage import GROWTH_MIB_PER_H, MIB, NOISE_MIB, Life, Sample, Trend, Usage, trend


def samples(memory_mib: Callable[[float], float], num_fds: Callable[[float], int] = lambda hours: 9) -> list[Sample]:
    """Two hours, a sample each minute."""
    hours = [minute / 60 for minute in range(121)]
    return [Sample(3600 * one, round(memory_mib(one) * MIB), num_fds(one)) for one in hours]


@pytest.mark.parametrize("slope", [-3.0, 0.0, 0.5, 20.0])
def test_a_line_is_fitted_whatever_swings_around_it(slope: float) -> None:
    found = trend("shard", samples(lambda hours: 100 + slope * hours + (0.5 if round(60 * hours) % 2 else -0.5)))
    assert found.hours == pytest.approx(2.0)
    assert found.mib_per_h == pytest.approx(slope, abs=0.02)
    assert found.growth_mib == pytest.approx(2 * slope, abs=0.04)


def test_who_grows_by_more_than_may_be_is_named() -> None:
    most = 2 * GROWTH_MIB_PER_H + NOISE_MIB
    assert not Trend("shard", 2.0, (most - 0.1) / 2, (9, 9)).problems
    assert not Trend("shard", 2.0, -most, (9, 9)).problems
    (told,) = Trend("shard", 2.0, (most + 0.1) / 2, (9, 9)).problems
    assert told == f"grew by {most + 0.1:.2f} MiB in 2.00 h, may by {most:.2f}"


def test_descriptors_that_come_and_go_are_none_that_leak() -> None:
    assert not trend("shard", samples(lambda hours: 100, lambda hours: 30 if 0.9 < hours < 1.1 else 9)).problems
    assert not trend("shard", samples(lambda hours: 100, lambda hours: 9 - round(hours))).problems
    (told,) = trend("shard", samples(lambda hours: 100, lambda hours: 9 + round(hours))).problems
    assert "descriptors" in told


def test_only_what_has_settled_counts_and_lived_on_for_long() -> None:
    usage = Usage(settle_s=600.0, span_s=1800.0)
    start = samples(lambda hours: 100 + 50 * min(hours, 600 / 3600))
    usage.lives = {
        (1, 0.0, "leader 0"): Life("leader 0", start),
        (2, 0.0, "worker 0"): Life("worker 0", start[:39]),  # dies before it says something
        (3, 0.0, "worker 1"): Life("worker 1", start[:41]),
    }
    assert [(one.name, round(one.mib_per_h, 3)) for one in usage.trends()] == [("leader 0", 0.0), ("worker 1", 0.0)]


class Running:
    """A process as far as its name goes."""

    def __init__(self, *command: str, children: Sequence[Running] = ()) -> None:
        self._command, self._children = ["python", *command], children

    def cmdline(self) -> list[str]:
        return self._command

    def children(self) -> Sequence[Running]:
        return self._children


def test_a_supervisor_settles_anew_once_checkpoints_are_written_beside_it() -> None:
    writer = Running("-m", "psstore.launch.checkpointing")
    names = [
        name_of(cast(psutil.Process, Running("-m", "psstore.cli.server", "--shards", "2", children=children)), {})
        for children in ([], [Running("-m", "psstore.server.shard")], [Running("-m", "psstore.server.shard"), writer])
    ]
    assert names == ["server", "server", "saving"]


def test_as_many_steps_are_planned_as_pushes_are_asked_for() -> None:
    plan = plan_of_soak(1, "standbys", soak_s=7200.0, pushes_per_s=50.0, fault_every_s=60.0)
    assert plan.steps * plan.num_workers * PUSHES_PER_STEP == pytest.approx(7200 * 50, rel=1e-4)
    assert plan.steps * plan.pace_s == pytest.approx(7200.0, rel=1e-4)
    assert plan.limit_s > 7200 * 1.5


@pytest.mark.long
@pytest.mark.sockets
@pytest.mark.one_loop
@pytest.mark.timeout(3 * RUN_S)
def test_a_short_soak_ends_as_if_nothing_had_happened() -> None:
    lines: list[str] = []
    ended = soak(plan_of_soak(1, "standbys", soak_s=20.0, pushes_per_s=50.0, fault_every_s=4.0), lines.append)
    assert not ended.problems(), ended.result.output
    assert len(ended.result.done) > 1, lines
    assert ended.num_lives > 6, "two shards, their standbys and two workers at least"
    assert "SHA-256 equal  True" in str(ended)
