"""`python -m tests.chaos`: see the package. Ends with 1 if a run did not come to the end it should."""

from __future__ import annotations

import argparse
import statistics
import sys

from tests.chaos.plan import plan_of
from tests.chaos.run import run, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--faults", type=int, default=3, help="in each run")
    chosen = parser.parse_args()
    failed, seconds, num_faults = [], [], 0
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        plan = plan_of(seed, num_faults=chosen.faults)
        expected = undisturbed(plan.num_shards, plan.num_workers, plan.overlap)
        result = run(plan, print if chosen.runs == 1 else lambda line: None)
        num_faults += len(result.done)
        seconds.append(result.seconds)
        problems = result.problems(expected)
        what = f"{plan.num_shards} shards, {plan.num_workers} workers: {'; '.join(result.done) or 'nothing'}"
        print(f"seed {seed}: {'FAILED' if problems else 'ok'}, {result.seconds:.1f} s; {what}", flush=True)
        if problems:
            failed.append(seed)
            print("  " + "\n  ".join([*problems, "what it said:", *result.output[-40:]]), flush=True)
    took = f"median {statistics.median(seconds):.1f} s"
    print(f"{chosen.runs} runs with {num_faults} faults, {took}: {len(failed)} failed {failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
