"""`python -m tests.chaos`: see the package. Ends with 1 if a run did not come to the end it should."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from functools import partial

from bench import virtual_hosts

from tests.chaos import disk
from tests.chaos.plan import ON_HOSTS, SCENES, Scene, plan_of
from tests.chaos.run import ChaosRun, expected_end, run
from tests.chaos.soak import plan_of_soak, soak

NEEDS = {**dict.fromkeys(ON_HOSTS, virtual_hosts.why_not), "disk": disk.why_not}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--faults", type=int, default=3, help="in each run")
    parser.add_argument(
        "--scenes", nargs="+", choices=SCENES, default=SCENES, help="in turn; default: all there can be"
    )
    soaking = parser.add_argument_group("one long training instead, in the first of the scenes")
    soaking.add_argument("--soak-s", type=float, help="how long")
    soaking.add_argument("--pushes-per-s", type=float, default=50.0, help="of all workers together")
    soaking.add_argument("--fault-every-s", type=float, default=60.0)
    chosen = parser.parse_args()
    scenes = _possible(chosen.scenes)
    if not scenes:
        return 1
    if chosen.soak_s is not None:
        return _soak(chosen, scenes[0])
    table = Table()
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        plan = plan_of(seed, scenes[seed % len(scenes)], num_faults=chosen.faults)
        result = run(plan, print if chosen.runs == 1 else lambda line: None)
        table.add(result, expected_end(result))
    print(table)
    return 1 if table.failed else 0


def _soak(chosen: argparse.Namespace, scene: Scene) -> int:
    plan = plan_of_soak(
        chosen.seed,
        scene,
        soak_s=chosen.soak_s,
        pushes_per_s=chosen.pushes_per_s,
        fault_every_s=chosen.fault_every_s,
    )
    ended = soak(plan, partial(print, flush=True))
    print(ended)
    problems = ended.problems()
    if problems:
        print("what it said:", *ended.result.output[-200:], sep="\n")
    return 1 if problems else 0


def _possible(scenes: list[Scene]) -> list[Scene]:
    found = []
    for scene in scenes:
        reason = NEEDS[scene]() if scene in NEEDS else None
        if reason is None:
            found.append(scene)
        else:
            print(f"left out: {scene}: {reason}", flush=True)
    return found


class Table:
    """What became of many runs; a line for each as it comes."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self._kinds: Counter[str] = Counter()
        self._scenes: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def add(self, result: ChaosRun, expected: str) -> None:
        plan, problems = result.plan, result.problems(expected)
        sizes = f"{plan.scene}, {plan.num_shards} shards, {plan.workers} workers, loop {plan.loop}"
        sizes += ", drops" if plan.drops else ""
        took = f"{result.seconds:.1f} s, waited {result.longest_s:.1f} s"
        done = "; ".join(result.done) or "nothing"
        print(f"seed {plan.seed}: {'FAILED' if problems else 'ok'}, {took}; {sizes}: {done}", flush=True)
        if problems:
            self.failed.append(plan.seed)
            print("  " + "\n  ".join([*problems, "what it said:", *result.output[-60:]]), flush=True)
        self._scenes[plan.scene] += 1
        self._kinds.update(" ".join(one.split()[:2]) for one in result.done)
        found = {"lost": len(result.lost), "doubled": len(result.doubled), "hangs": result.hangs}
        self._sums.update({**found, "equal": result.is_equal(expected)})
        self._seconds.append(result.seconds)
        self._waits.append(result.longest_s)

    def __str__(self) -> str:
        num = len(self._waits)
        p99 = sorted(self._waits)[min(num - 1, int(0.99 * num))]
        rows = {
            "runs": f"{num} ({', '.join(f'{count} {scene}' for scene, count in sorted(self._scenes.items()))})",
            "faults": f"{self._kinds.total()} ({', '.join(f'{n} {kind}' for kind, n in self._kinds.most_common())})",
            "lost": self._sums["lost"],
            "doubled": self._sums["doubled"],
            "hangs": self._sums["hangs"],
            "SHA-256 equal": f"{self._sums['equal']} of {num}",
            "failed": f"{len(self.failed)} {self.failed or ''}",
            "longest wait": f"median {statistics.median(self._waits):.1f} s, p99 {p99:.1f} s",
            "time": f"median {statistics.median(self._seconds):.1f} s",
        }
        return "\n".join(f"{name:<14} {value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
