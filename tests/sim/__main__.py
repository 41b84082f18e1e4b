"""Runs seeds by hand: one with a trace, or a range."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from .checks import run_and_check
from .plan import (
    MODES,
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

KINDS = {
    "--falls": (falling_plan_of, "the store goes back to checkpoints, and little else"),
    "--reshards": (resharding_plan_of, "the store goes on with other numbers of shards"),
    "--elastic": (elastic_plan_of, "workers come and go"),
    "--returns": (returning_plan_of, "workers come when they like, and the store goes back, or on with other shards"),
    "--standbys": (standby_plan_of, "every shard has a standby, and some die"),
    "--shared": (sharing_plan_of, "likewise, and clients push through shared memory, which standbys see"),
    "--refusals": (refusing_plan_of, "clients add to what has no value yet"),
    "--norms": (guarded_plan_of, "contributions are astray, and refused by their norm"),
    "--followers": (
        following_plan_of,
        "readers follow by what changes; shards have standbys, the store goes back, or neither",
    ),
    "--votes": (voting_plan_of, "hosts fall silent, and shards vote on who leads"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one seed")
    which.add_argument("--seeds", metavar="A:B", help="every seed from A to B - 1")
    parser.set_defaults(make=plan_of)
    for flag, (make, what) in KINDS.items():
        parser.add_argument(flag, dest="make", action="store_const", const=make, help=what)
    parser.add_argument("--rows", action="store_true", help="with any of these: workers train tables of rows, too")
    parser.add_argument("--mode", choices=MODES, help="instead of the seed's own")
    parser.add_argument("--verbose", action="store_true", help="print the plan and everything that happens")
    given = parser.parse_args()
    if not given.verbose:
        logging.disable(logging.WARNING)  # of checkpoints that lack something, by the hundred
    begin, end = (given.seed, given.seed + 1) if given.seed is not None else map(int, given.seeds.split(":"))
    failed = []
    started = time.monotonic()
    for seed in range(begin, end):
        plan = given.make(seed, given.mode)
        if given.rows:
            plan = with_rows(plan)
        if given.verbose:
            print(plan)
        try:
            run_and_check(plan, trace=print if given.verbose else None)
        except Exception as error:
            failed.append(seed)
            if given.verbose:
                traceback.print_exc()
            print(f"seed {seed} ({plan.mode}): {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{end - begin} seeds, {len(failed)} failed, {time.monotonic() - started:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
