"""A training that goes on for hours while something goes wrong again and again: it must end with the undisturbed bytes,
as any, and no process of it may have grown."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.plan import ChaosPlan, Scene
from tests.chaos.processes import name_of
from tests.chaos.run import ChaosRun, Monkey, expected_end, run
from tests.chaos.usage import GROWTH_MIB_PER_H, MIB, NOISE_MIB, Trend, Usage

PUSHES_PER_STEP = 3
"""Each worker's, in the plain loop: two gradients and a plain write."""

SHARDS, WORKERS = 2, 2
CHECKPOINT_EVERY = "5s"

LOOK_S = 5.0
REPORT_S = 60.0
SETTLE_S = 60.0
SPAN_S = 120.0
"""How long a settled life has to be for its line to say something."""


@dataclass(frozen=True)
class Soak:
    """What became of one."""

    result: ChaosRun
    trends: list[Trend]
    num_lives: int
    expected: str
    """How the undisturbed training ends."""

    def problems(self) -> list[str]:
        found = self.result.problems(self.expected)
        return found + [f"{one.name} {problem}" for one in self.trends for problem in one.problems]

    def __str__(self) -> str:
        result, plan = self.result, self.result.plan
        pushes = plan.steps * plan.num_workers * PUSHES_PER_STEP
        rows = {
            "scene": f"{plan.scene}, {plan.num_shards} shards, {plan.num_workers} workers",
            "time": f"{result.seconds:.0f} s, {plan.steps} steps, {pushes / result.seconds:.1f} pushes/s",
            "faults": f"{len(result.done)}",
            "lost": f"{len(result.lost)}",
            "doubled": f"{len(result.doubled)}",
            "SHA-256 equal": f"{result.is_equal(self.expected)}",
            "longest wait": f"{result.longest_s:.1f} s",
            "lives": f"{self.num_lives}, of which {len(self.trends)} long enough to be judged",
            "may grow": f"{GROWTH_MIB_PER_H:g} MiB/h and {NOISE_MIB:g} MiB",
        }
        lines = [f"{name:<14} {value}" for name, value in rows.items()]
        lines.append(f"{'process':<14} {'hours':>6} {'MiB/h':>8} {'MiB':>7} {'descriptors':>12}")
        for one in self.trends:
            fds = f"{one.num_fds[0]:g} → {one.num_fds[1]:g}"
            verdict = "; ".join(one.problems) or "ok"
            lines.append(
                f"{one.name:<14} {one.hours:>6.2f} {one.mib_per_h:>8.2f} {one.growth_mib:>7.2f} {fds:>12}  {verdict}"
            )
        return "\n".join([*lines, *(f"FAILED: {one}" for one in self.problems())])


def plan_of_soak(seed: int, scene: Scene, *, soak_s: float, pushes_per_s: float, fault_every_s: float) -> ChaosPlan:
    """`pushes_per_s`: of all workers together."""
    steps_per_s = pushes_per_s / (PUSHES_PER_STEP * WORKERS)
    return ChaosPlan(
        seed,
        SHARDS,
        WORKERS,
        "plain",
        (),
        scene,
        steps=max(1, round(soak_s * steps_per_s)),
        pace_s=1.0 / steps_per_s,
        checkpoint_every=CHECKPOINT_EVERY,
        fault_every_s=fault_every_s,
    )


def soak(plan: ChaosPlan, say: Callable[[str], None]) -> Soak:
    """Blocks until it is over. Says a line a minute, and what goes wrong."""
    usage = Usage(settle_s=SETTLE_S, span_s=SPAN_S)

    def watch(monkey: Monkey) -> None:
        groups = monkey.stage.watch()
        began = reported = time.monotonic()
        while not monkey.over.wait(LOOK_S):
            if leaders := groups.leaders():
                usage.look((name_of(one, leaders), one) for one in monkey.processes)
            now = time.monotonic()
            if now - reported >= REPORT_S:
                reported = now
                done = f"step {monkey.step} of {plan.steps}, {len(monkey.result.done)} faults"
                say(f"{(now - began) / 60:4.0f} min: {done}, {usage.taken_bytes / MIB:.0f} MiB")

    result = run(plan, lambda line: say(line) if line.startswith("-- ") else None, watch)
    return Soak(result, usage.trends(), len(usage.lives), expected_end(result))
