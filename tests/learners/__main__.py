"""`python -m tests.learners`: see the package. Ends with 1 if a contribution was lost or counted twice."""

from __future__ import annotations

import argparse
import sys
import time

from tests.learners.run import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.learners", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=1, help="of the model, which take turns")
    parser.add_argument("--between-kills-s", type=float, default=0.5, help="mean of what lies between two")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    begin = time.monotonic()
    plan = Plan(
        seed=chosen.seed,
        kills=chosen.kills,
        num_learners=chosen.learners,
        fragments=chosen.fragments,
        between_kills_s=chosen.between_kills_s,
    )
    result = run(plan, lambda line: print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True))
    found = result.account
    print(f"kills          {chosen.kills}, {result.shard_kills} of them of a shard's leader")
    print(f"decisions      {result.decisions}, of which {result.unseen} were read with the next one at once")
    print(f"contributions  {found.acknowledged} acknowledged as counted, {found.late} as late")
    print(f"unanswered     {found.unanswered}, of which {found.unanswered_and_counted} count")
    print(f"lost           {len(found.lost)}")
    print(f"doubled        {len(found.doubled)}")
    for line in (*found.lost, *found.doubled):
        print(line)
    return 1 if found.lost or found.doubled else 0


if __name__ == "__main__":
    sys.exit(main())
