"""What a seed stands for: how a training is run, and what goes wrong in it, when.

A fault's victim is a word and a number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Scene = Literal["processes", "standbys", "links", "hosts", "apart", "disk"]
"""processes: on one machine. standbys: likewise, and each shard has one: the store never goes back. links: proxies lie
between clients and shards. hosts: each shard and worker has a host of its own. apart: likewise, and so has a standby of
each shard: the store never goes back. disk: checkpoints go to a file system of their own, which is small."""

WITH_STANDBYS: tuple[Scene, ...] = ("standbys", "apart")
ON_HOSTS: tuple[Scene, ...] = ("hosts", "apart")

Loop = Literal["plain", "shared", "sent", "none", "backward"]
"""plain: a store's calls, with numpy. shared: likewise, and so much is pushed that it goes through shared memory. sent:
so much, over sockets. none, backward: a session of torch, with that overlap."""

SESSIONS: tuple[Loop, ...] = ("none", "backward")

LOOPS: tuple[Loop, ...] = (*("plain",) * 8, *SESSIONS)
"""As often as they come: a process that loads torch takes eight times as long as one that does not."""

LARGE: Mapping[Scene, tuple[Loop, ...]] = {
    "processes": ("plain", "sent"),
    "standbys": ("plain", "plain", "shared", "sent"),
}
"""What takes the place of plain there. A standby sees what is pushed through shared memory."""

ELASTIC_SHARES: Mapping[Loop, float] = {"plain": 0.3, "none": 0.6, "backward": 0.6}
"""How many of those with more than one worker have them come and go."""

SCENES: tuple[Scene, ...] = get_args(Scene)

Kind = Literal[
    "kill",
    "stop",
    "terminate",
    "crash",
    "orphan",
    "cut",
    "half-open",
    "trickle",
    "delay",
    "partition",
    "fill",
    "reshard",
]
"""crash: all processes of a host are killed at once, out of everybody's reach, and its command begins again later.
orphan: the process alone that the command is, which leaves those that it has started behind."""

LASTING: tuple[Kind, ...] = ("stop", "trickle", "delay", "partition", "crash", "orphan", "fill")
"""What is over after a while."""

STEPS = 60
NUM_SAMPLES = 17
"""In an epoch of a session."""

CHECKPOINT_EVERY = 8

PACE_S = 0.01
"""How long a step takes at least: nobody could disturb what is over at once."""

RUN_S = 400.0
"""Longer than any run should take on a busy machine: whoever needs more hangs."""

SLOW_STEP_S = 0.05
"""How long a step may take there if nothing holds it up."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    step: int
    """Happens when rank 0 has taken this step, and there is a checkpoint."""
    kind: Kind
    victim: str
    """'worker' or 'shard' and its number; 'leader' or 'standby' and its shard's, once that may lead; 'checkpoints': the
    process that has them written; 'link 1': all connections to shard 1, and 'link 1 of 0' those of worker 0; 'host' and
    its number, shards first; 'host of leader 1', or of a standby; 'disk': where checkpoints are; 'store to 3': all of
    it, to go on with 3 shards, and 'store on its way to 3': the next fault may come before it does."""
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
    loop: Loop
    faults: tuple[Fault, ...]
    scene: Scene = "processes"
    steps: int = STEPS
    pace_s: float = PACE_S
    checkpoint_every: str = str(CHECKPOINT_EVERY)
    fault_every_s: float = 0.0
    """Instead of `faults`, without an end: one of the scene's each time so long has passed."""
    fewest: int | None = None
    """Workers come and go, and so many are there; None: all are."""
    drops: bool = False
    """Whether they soon go on without one that is lost: before it is started again, or wakes up."""

    @property
    def workers(self) -> str:
        """As `--workers` takes it."""
        return str(self.num_workers) if self.fewest is None else f"{self.fewest}:{self.num_workers}"

    @property
    def limit_s(self) -> float:
        """Who needs more hangs."""
        return RUN_S + self.steps * max(2 * self.pace_s, SLOW_STEP_S)


def plan_of(seed: int, scene: Scene = "processes", *, num_faults: int = 3) -> ChaosPlan:
    rng = random.Random(seed)
    num_shards, num_workers = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    faults = [DRAWS[scene](rng, num_shards, num_workers) for _ in range(num_faults)]
    faults.sort(key=lambda one: one.step)
    loop = rng.choice(LOOPS)
    if scene in LARGE and loop == "plain":
        loop = rng.choice(LARGE[scene])
    plan = ChaosPlan(seed, num_shards, num_workers, loop, tuple(faults), scene)
    if num_workers == 1 or rng.random() >= ELASTIC_SHARES.get(loop, 0.0):
        return plan
    return replace(plan, fewest=rng.randrange(1, num_workers), drops=scene not in ON_HOSTS and rng.random() < 0.5)


def faults_of(plan: ChaosPlan) -> Iterator[Fault]:
    """What goes wrong by the clock in that plan; their steps mean nothing."""
    rng = random.Random(plan.seed)
    while True:
        yield DRAWS[plan.scene](rng, plan.num_shards, plan.num_workers)


def _process(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    return _reshard(rng) if rng.random() < 0.15 else _of_process(rng, num_shards, num_workers)


def _of_process(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    victims = [*(f"shard {i}" for i in range(num_shards)), *(f"worker {i}" for i in range(num_workers)), "checkpoints"]
    victim = rng.choice(victims)
    kinds: list[Kind] = ["kill", "kill", "stop", "terminate"] if victim.startswith("worker") else ["kill", "stop"]
    return _fault(rng, rng.choice(kinds), victim)


def _standby(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    """Mostly who leads; never both processes of a shard at a time."""
    if rng.random() < 0.15:
        return _reshard(rng)
    if rng.random() < 0.25:
        return _fault(rng, "kill", f"worker {rng.randrange(num_workers)}")
    victim = f"{rng.choice(('leader', 'leader', 'leader', 'standby'))} {rng.randrange(num_shards)}"
    return _fault(rng, rng.choice(("kill", "kill", "kill", "stop")), victim, longest_s=4.0)


def _link(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    """Mostly on the way; now and then one of the ends dies, as in any network. The store keeps its number of shards, as
    each has a proxy."""
    if rng.random() < 0.2:
        return _of_process(rng, num_shards, num_workers)
    shard, worker = rng.randrange(num_shards), rng.randrange(num_workers)
    victim = rng.choice((f"link {shard}", f"link {shard} of {worker}"))
    return _fault(rng, rng.choice(("cut", "cut", "half-open", "trickle", "delay")), victim)


def _host(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    """Cut off for less than the time after which a worker is lost, and now and then for more."""
    if rng.random() < 0.2:
        return _fault(rng, rng.choice(("kill", "stop")), f"shard {rng.randrange(num_shards)}")
    longest_s = 13.0 if rng.random() < 0.2 else 4.0
    return _fault(rng, "partition", f"host {rng.randrange(num_shards + num_workers)}", longest_s)


def _apart(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    """Mostly the host of one of a shard's two processes, for less and for more than it takes until others say who
    leads. The next one waits until both are there again."""
    if rng.random() < 0.15:
        return _fault(rng, "crash", f"host {2 * num_shards + rng.randrange(num_workers)}")
    member = f"{rng.choice(('leader', 'leader', 'standby'))} {rng.randrange(num_shards)}"
    if rng.random() < 0.25:
        return _fault(rng, rng.choice(("kill", "stop")), member, longest_s=4.0)
    return _fault(rng, rng.choice(("crash", "orphan", "stop", "partition")), f"host of {member}", longest_s=8.0)


def _disk(rng: random.Random, num_shards: int, num_workers: int) -> Fault:
    if rng.random() < 0.4:
        return _process(rng, num_shards, num_workers)
    return _fault(rng, "fill", "disk", 3.0)


DRAWS: Mapping[Scene, Callable[[random.Random, int, int], Fault]] = {
    "processes": _process,
    "standbys": _standby,
    "links": _link,
    "hosts": _host,
    "apart": _apart,
    "disk": _disk,
}


def _reshard(rng: random.Random) -> Fault:
    """No fault, but what comes in the middle of it may be one."""
    return _fault(rng, "reshard", f"store {rng.choice(('to', 'on its way to'))} {rng.choice((1, 2, 3, 4))}")


def _fault(rng: random.Random, kind: Kind, victim: str, longest_s: float = 2.0) -> Fault:
    step, for_s, later_s = rng.randrange(1, STEPS), rng.uniform(0.2, longest_s), rng.uniform(0.0, 0.05)
    return Fault(step, kind, victim, for_s if kind in LASTING else 0.0, later_s)
