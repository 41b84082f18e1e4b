"""What a seed stands for: how a training is run, and what goes wrong in it, when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "terminate", "cut", "swallow", "refuse", "hold", "trickle", "fill"]
LASTING: tuple[Kind, ...] = ("stop", "refuse", "hold", "trickle", "fill")
KINDS: dict[str, tuple[Kind, ...]] = {
    "worker": ("kill", "kill", "stop", "terminate"),
    "shard": ("kill", "stop"),
    "checkpoints": ("kill", "stop"),
    "link": ("cut", "swallow", "refuse", "hold", "trickle"),
    "disk": ("fill",),
}
"""What may go wrong with each victim: all connections of a link are cut, or nothing more that they say comes through, or
they are cut and new ones refused, or all waits, or is slow; a disk has no room."""

STEPS = 60
CHECKPOINT_EVERY = 8


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    step: int
    """Happens when rank 0 has taken this step, and there is a checkpoint."""
    kind: Kind
    victim: str
    """'worker' or 'shard' and its number; 'checkpoints', the process that has them written; 'link' and the number of the
    shard that it leads to; or 'disk', on which checkpoints are."""
    for_s: float = 0.0
    """How long it lasts."""
    later_s: float = 0.0
    """How long after the step: somewhere within the next ones."""

    def __str__(self) -> str:
        how = f"{self.kind} {self.victim}" + (f" for {self.for_s:.1f} s" if self.kind in LASTING else "")
        return f"{how} after step {self.step}"


@dataclass(frozen=True)
class ChaosPlan:
    """One run."""

    seed: int
    num_shards: int
    num_workers: int
    overlap: str
    faults: tuple[Fault, ...]
    connections: int = 0
    """Of each worker to each shard, by TCP and through links that can be disturbed. 0: by what is nearest."""


def plan_of(seed: int, *, num_faults: int = 3, surroundings: bool = False) -> ChaosPlan:
    """`surroundings`: not only processes are disturbed, but what is between them, and the disk."""
    rng = random.Random(seed)
    num_shards, num_workers = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    victims = [*(f"shard {i}" for i in range(num_shards)), *(f"worker {i}" for i in range(num_workers)), "checkpoints"]
    if surroundings:
        victims += [*(f"link {i}" for i in range(num_shards) for _ in range(2)), "disk"]

    def fault() -> Fault:
        victim = rng.choice(victims)
        kind = rng.choice(KINDS[victim.partition(" ")[0]])
        step, for_s, later_s = rng.randrange(1, STEPS), rng.uniform(0.2, 2.0), rng.uniform(0.0, 0.05)
        return Fault(step, kind, victim, for_s if kind in LASTING else 0.0, later_s)

    faults = tuple(sorted((fault() for _ in range(num_faults)), key=lambda one: one.step))
    overlap = rng.choice(("none", "backward"))
    connections = rng.choice((1, 3)) if surroundings else 0
    return ChaosPlan(seed, num_shards, num_workers, overlap, faults, connections)
