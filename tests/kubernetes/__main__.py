"""`python -m tests.kubernetes`: see the package. Ends with 1 if a step was lost, or a worker waited too long."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.kubernetes.evicting import Outcome, Scene, plan_of, run, undisturbed
from tests.kubernetes.node import why_not

MOST_S = 3.0
"""What a worker may wait for one eviction."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    parser.add_argument("--evictions", type=int, default=10)
    parser.add_argument("--steps-each", type=int, default=40, help="between two evictions, at least")
    parser.add_argument(
        "--crash-share", type=float, default=0.0, help="of evictions, those by SIGKILL, in the pod's place"
    )
    parser.add_argument("--worker-share", type=float, default=0.0, help="of evictions, those of workers")
    parser.add_argument("--rolling-updates", type=int, default=0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoints", action="store_true", help="the store goes back to them; else it has standbys")
    parser.add_argument("--start-s", type=float, default=1.0, help="from a pod's end to the start of its next")
    parser.add_argument("--dns-cache-s", type=float, default=0.0, help="how long names have their former addresses")
    parser.add_argument("--most-s", type=float, default=MOST_S, help="what a worker may wait for one eviction")
    parser.add_argument(
        "--image", type=Path, default=Path("/"), metavar="FOLDER", help="files of an image, not of this machine's"
    )
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"can't be run here: {reason}")
        return 1
    scene = Scene(
        plan_of(shards=chosen.shards, workers=chosen.workers, checkpoints=chosen.checkpoints),
        evictions=chosen.evictions,
        steps_each=chosen.steps_each,
        crash_share=chosen.crash_share,
        worker_share=chosen.worker_share,
        rolling_updates=chosen.rolling_updates,
        seed=chosen.seed,
        start_s=chosen.start_s,
        dns_cache_s=chosen.dns_cache_s,
        image=chosen.image.resolve(),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left behind
    begin = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="psstore-kubernetes-"))
    print(f"what pods write is in {logs}", flush=True)
    outcome = run(scene, logs, lambda line: print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True))
    expected = undisturbed(chosen.workers, outcome.num_steps)
    print(report(outcome, expected))
    found = problems(outcome, expected, scene, most_s=chosen.most_s)
    print("\n".join(found))
    if not found:
        shutil.rmtree(logs)
    return 1 if found else 0


def problems(outcome: Outcome, expected: str, scene: Scene, *, most_s: float) -> list[str]:
    """What was not as it should be."""
    num = scene.plan.num_workers
    found = []
    if not outcome.succeeded:
        found.append("the JobSet has failed")
    if outcome.digests != [expected] * num:
        found.append(f"weights differ: {outcome.digests}, and undisturbed {expected}")
    if outcome.versions != [outcome.num_steps] * num:
        found.append(f"versions are {outcome.versions}; expected {outcome.num_steps}")
    if outcome.done.total() != scene.evictions + scene.rolling_updates:
        found.append(f"was done: {dict(outcome.done)}")
    for what, waits in outcome.waits.items():
        if max(waits) > most_s:
            found.append(f"a worker waited {max(waits):.1f} s: {what}")
    return found


def report(outcome: Outcome, expected: str) -> str:
    equal = sum(digest == expected for digest in outcome.digests)
    rows = {
        "steps": f"{outcome.num_steps}, {equal} workers end with the bytes of the undisturbed training",
        "put off": f"{outcome.put_off}, by the PodDisruptionBudget",
        **{f"{len(waits)} × {what}": _waited(sorted(waits)) for what, waits in outcome.waits.items()},
    }
    return "\n".join(f"{name:<26} {value}" for name, value in rows.items())


def _waited(waits: list[float]) -> str:
    p99 = waits[math.ceil(0.99 * len(waits)) - 1]
    return f"a worker waits {statistics.median(waits):.2f} s (median), {p99:.2f} s (p99), {waits[-1]:.2f} s (most)"


if __name__ == "__main__":
    sys.exit(main())
