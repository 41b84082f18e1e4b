"""What a seed stands for: how a training is run, and what goes wrong in it, when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "terminate"]

STEPS = 60
CHECKPOINT_EVERY = 8


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    step: int
    """Happens when rank 0 has taken this step, and there is a checkpoint."""
    kind: Kind
    victim: str
    """'worker' or 'shard' and its number, or 'checkpoints': the process that has them written."""
    for_s: float = 0.0
    """How long it stands still."""
    later_s: float = 0.0
    """How long after the step: somewhere within the next ones."""

    def __str__(self) -> str:
        how = f"{self.kind} {self.victim}" + (f" for {self.for_s:.1f} s" if self.kind == "stop" else "")
        return f"{how} after step {self.step}"


@dataclass(frozen=True)
class ChaosPlan:
    """One run."""

    seed: int
    num_shards: int
    num_workers: int
    overlap: str
    faults: tuple[Fault, ...]


def plan_of(seed: int, *, num_faults: int = 3) -> ChaosPlan:
    rng = random.Random(seed)
    num_shards, num_workers = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    victims = [*(f"shard {i}" for i in range(num_shards)), *(f"worker {i}" for i in range(num_workers)), "checkpoints"]

    def fault() -> Fault:
        victim = rng.choice(victims)
        kinds: list[Kind] = ["kill", "kill", "stop", "terminate"] if victim.startswith("worker") else ["kill", "stop"]
        kind = rng.choice(kinds)
        step, for_s, later_s = rng.randrange(1, STEPS), rng.uniform(0.2, 2.0), rng.uniform(0.0, 0.05)
        return Fault(step, kind, victim, for_s if kind == "stop" else 0.0, later_s)

    faults = tuple(sorted((fault() for _ in range(num_faults)), key=lambda one: one.step))
    return ChaosPlan(seed, num_shards, num_workers, rng.choice(("none", "backward")), faults)
