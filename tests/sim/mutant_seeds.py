"""Which seed of the simulator notices which mutant: python -m tests.sim.mutant_seeds finds others where a change of the
simulator has made those of mutant_seeds.json blind, and writes them there."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from psstore.errors import PsstoreError
from tests.sim.checks import check, watched
from tests.sim.mutants import (
    ELASTIC_MUTANTS,
    FALL_MUTANTS,
    FOLLOWER_MUTANTS,
    MUTANTS,
    NORM_MUTANTS,
    REFUSAL_MUTANTS,
    RESHARD_MUTANTS,
    RETURN_MUTANTS,
    SHARING_MUTANTS,
    STANDBY_MUTANTS,
    VOTE_MUTANTS,
    Mutant,
)
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
from tests.sim.row_mutants import ROW_FALL_MUTANTS, ROW_MUTANTS, ROW_STANDBY_MUTANTS

SEEDS = Path(__file__).with_name("mutant_seeds.json")

Make = Callable[[int, str], Plan]
"""(seed, mode) -> the plan of a run."""


def and_rows(plan_of: Make) -> Make:
    return lambda seed, mode: with_rows(plan_of(seed, mode))


TABLES: dict[str, tuple[dict[str, tuple[str, Mutant]], Make]] = {
    "": (MUTANTS, plan_of),
    "where workers come and go": (ELASTIC_MUTANTS, elastic_plan_of),
    "of a store that goes back": (FALL_MUTANTS, falling_plan_of),
    "of a store with another number of shards": (RESHARD_MUTANTS, resharding_plan_of),
    "where workers come back to a store that goes on": (RETURN_MUTANTS, returning_plan_of),
    "of shards with standbys": (STANDBY_MUTANTS, standby_plan_of),
    "where standbys see clients' memory": (SHARING_MUTANTS, sharing_plan_of),
    "where plain writes are refused": (REFUSAL_MUTANTS, refusing_plan_of),
    "where contributions are astray": (NORM_MUTANTS, guarded_plan_of),
    "where readers follow": (FOLLOWER_MUTANTS, following_plan_of),
    "of shards that vote": (VOTE_MUTANTS, voting_plan_of),
    "of rows": (ROW_MUTANTS, and_rows(plan_of)),
    "of rows of a store that goes back": (ROW_FALL_MUTANTS, and_rows(falling_plan_of)),
    "of rows of shards with standbys": (ROW_STANDBY_MUTANTS, and_rows(standby_plan_of)),
}
"""Where it shows -> what is broken, and the plans of such runs."""


RARE = {
    "a standby does not wait for the end of a lease",
    "an ended standby takes the place of the next",
    "standbys don't know the words",
}
"""What takes two rare things at once: a seed in a thousand notices it, and tests/protocol/test_standby.py always."""

WHERE = {name: where for where, (mutants, _) in TABLES.items() for name in mutants}
assert len(WHERE) == sum(len(mutants) for mutants, _ in TABLES.values()), "two mutants have one name"

COMMON = [name for name in WHERE if name not in RARE]
"""What has a seed on record."""

MAX_SEEDS = 1_000
"""In which one is found."""

MORE_S = 10.0
"""Processor time for a seed with a shorter run, once there is one: many are a hundredth of others."""


def recorded() -> dict[str, int]:
    seeds: dict[str, int] = json.loads(SEEDS.read_text())
    return seeds


def is_noticed(name: str, seed: int, *, while_broken: bool = True) -> bool:
    """Whether the checks find anything wrong in this seed's run."""
    mutants, plan_of = TABLES[WHERE[name]]
    mode, broken = mutants[name]
    plan = plan_of(seed, mode)
    try:
        with broken() if while_broken else nullcontext():
            history = watched(plan).run()
        check(plan, history)
    except (AssertionError, PsstoreError, AttributeError, KeyError):
        return True
    return False


def shortest(name: str) -> int:
    """A seed that notices it, and finds nothing wrong without it: the shortest of those that are found in a while.
    LookupError if there is none."""
    took_s: dict[int, float] = {}
    until = math.inf
    for seed in range(MAX_SEEDS):
        started = time.process_time()
        if started > until:
            break
        if is_noticed(name, seed) and not is_noticed(name, seed, while_broken=False):
            ended = time.process_time()
            took_s[seed] = ended - started
            until = min(until, ended + MORE_S)
    if not took_s:
        raise LookupError(f"{MAX_SEEDS} seeds find nothing wrong where {name}")
    return min(took_s, key=took_s.__getitem__)


def main() -> None:
    logging.disable(logging.WARNING)  # of checkpoints that lack something, by the hundred
    seeds = recorded()
    for name in COMMON:
        if name in seeds and is_noticed(name, seeds[name]):
            continue
        before, seeds[name] = seeds.get(name), shortest(name)
        print(f"{name}: {before} -> {seeds[name]}", flush=True)
        write({name: seeds[name] for name in COMMON if name in seeds})


def write(seeds: dict[str, int]) -> None:
    SEEDS.write_text(json.dumps(seeds, indent=2) + "\n")


if __name__ == "__main__":
    main()
