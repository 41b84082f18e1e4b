"""What stale contributions cost learners that nobody waits for, and what delayed Nesterov momentum gives back.

    python -m bench.stale_learners [--quick] [--turns N] [--fragments N] [--slower TIMES] [--json FILE]

The learners, the model and the text of `learner_time`, on a store in this process, by a clock that is played: a step
takes a usual learner one unit and the slow one four, or as many as are asked for, an exchange nothing, so that the same
seed gives the same figures and nothing is measured that a machine could disturb. A learner that has taken its steps
contributes; as many as a decision is made of wait for each other, all four of them, three, or in async nobody. Beside
the loss after as many steps of all learners together, the time until a learner's model, which has just been merged, has
a loss. With fragments that take turns, those are compared that wait for others.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import psstore.torch
from bench.command import Subject, run
from bench.learner_gpt import LENGTH, MAX_NORM, Lesson
from bench.learner_ways import EVERY, LEARNERS, OUTER
from bench.machine import machine
from bench.report import DIVERGES, Cell, Report, Table
from psstore.client.local import LocalStore

LOSS, QUICK_LOSS = 2.3, 2.8

STEPS, QUICK_STEPS = 4_800, 800
"""Of all learners together."""

OF_NOTHING = math.log(128)
"""The loss of all letters being equally likely."""

HOPELESS = 10.0
"""A loss at which no more is expected."""

WINDOWS = 8
LEARNING_RATE = 6e-3

JITTER = 0.05
"""By so much of it a learner's steps between two rounds take more or less, as a seed has it."""

STRENGTHS = (1.0, 100.0)
"""λ of compensated contributions."""

Outer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{**OUTER, **options})


def compensated(strength: float, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """What is stale is made up for what has become of the values since (DC-ASGD)."""
    groups = [{"params": list(model.parameters()), "compensation": strength}]
    return torch.optim.SGD(groups, **{**OUTER, **options})


def delayed(model: nn.Module, *, every: int, lr: float = OUTER["lr"]) -> torch.optim.Optimizer:
    return psstore.torch.DelayedNesterov(model.parameters(), lr=lr, momentum=OUTER["momentum"], every=every)


@dataclass(frozen=True)
class Way:
    quorum: int
    """Contributions that make a decision; 1: each is one, in mode async."""
    outer: Outer = sgd
    fragments: int = 1
    """Which take turns; 1: each round is of the whole model."""
    is_damped: bool = False
    """Whether a contribution's learning rate is divided by its age, the decisions since the values that it is from."""


PLAIN: Mapping[str, Any] = {"momentum": 0.0, "nesterov": False}
RATE = OUTER["lr"]

WAYS: Mapping[str, Way] = {
    "waits for all": Way(LEARNERS),
    f"quorum of {LEARNERS - 1}": Way(LEARNERS - 1),
    "async, Nesterov": Way(1),
    f"async, Nesterov, lr / {LEARNERS}": Way(1, partial(sgd, lr=RATE / LEARNERS)),
    f"async, Nesterov, lr / {2 * LEARNERS}": Way(1, partial(sgd, lr=RATE / LEARNERS / 2)),
    f"async, no momentum, lr / {LEARNERS}": Way(1, partial(sgd, lr=RATE / LEARNERS, **PLAIN)),
    "async, no momentum, lr / age": Way(1, partial(sgd, **PLAIN), is_damped=True),
    **{
        f"async, no momentum, lr / {LEARNERS}, compensated, λ = {strength:g}": Way(
            1, partial(compensated, strength, lr=RATE / LEARNERS, **PLAIN)
        )
        for strength in STRENGTHS
    },
    f"async, delayed Nesterov, every={LEARNERS}": Way(1, partial(delayed, every=LEARNERS)),
    f"async, delayed Nesterov, every={LEARNERS}, lr / 2": Way(1, partial(delayed, every=LEARNERS, lr=RATE / 2)),
    f"async, delayed Nesterov, every={2 * LEARNERS}": Way(1, partial(delayed, every=2 * LEARNERS)),
}


def ways_in(fragments: int) -> Mapping[str, Way]:
    """Those that are compared when so many take turns."""
    if fragments == 1:
        return WAYS
    return {name: replace(way, fragments=fragments) for name, way in WAYS.items() if way.quorum > 1}


def cases(slower: float) -> Mapping[str, Sequence[float]]:
    """How many units a step takes each learner."""
    return {
        "all alike": (1.0,) * LEARNERS,
        f"one learner {slower:g} × slower": (*(1.0,) * (LEARNERS - 1), slower),
    }


class Look(NamedTuple):
    """At a model that has just been merged."""

    units: float
    steps: int
    """Of all learners together."""
    loss: float


@dataclass
class Learner:
    """One of several in this process, which take turns."""

    local: LocalStore
    way: Way
    rank: int
    seed: int
    lesson: Lesson = field(init=False)
    optimizer: psstore.torch.DiLoCo = field(init=False)

    def __post_init__(self) -> None:
        self.lesson = Lesson(self.rank, WINDOWS)
        model = self.lesson.model
        self.optimizer = psstore.torch.DiLoCo(
            model,
            torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
            self.local.connect(rank=self.rank),
            every=EVERY,
            fragments=self.way.fragments,
            outer=self.way.outer(model),
            max_norm=MAX_NORM,
        )
        torch.manual_seed(1000 * self.seed + self.rank)
        self._lots = torch.get_rng_state()
        self._steps = 0

    @property
    def steps_to_round(self) -> int:
        """From where this learner is."""
        fragments = self.way.fragments
        rounds = self._steps * fragments // EVERY
        return math.ceil((rounds + 1) * EVERY / fragments) - self._steps

    def learn(self) -> int:
        """Takes all steps to the next round but for what the last one shares. Returns how many they are."""
        num_steps = self.steps_to_round
        torch.set_rng_state(self._lots)
        for _ in range(num_steps - 1):
            self.lesson.backward()
            self.optimizer.step()
        self.lesson.backward()
        self._lots = torch.get_rng_state()
        self._steps += num_steps
        return num_steps

    def share(self, age: int) -> threading.Thread:
        """Takes that step, which waits for others. `age`: of what it contributes."""
        if self.way.is_damped:
            self.optimizer.outer.param_groups[0]["lr"] = RATE / age
        thread = threading.Thread(target=self.optimizer.step, daemon=True)
        thread.start()
        return thread


def looks(way: Way, units: Sequence[float], *, seed: int, steps: int) -> list[Look]:
    """At each decision, until so many steps were taken."""
    jitter = torch.Generator().manual_seed(seed)
    learners: list[Learner] = []

    def takes(rank: int) -> float:
        varied = 1.0 + JITTER * (2.0 * torch.rand((), generator=jitter).item() - 1.0)
        return learners[rank].steps_to_round * units[rank] * varied

    mode = {LEARNERS: "sync", 1: "async"}.get(way.quorum, "backup")
    backups = {"backups": LEARNERS - way.quorum} if mode == "backup" else {}
    found: list[Look] = []
    with LocalStore(1, workers=LEARNERS, mode=mode, **backups) as local, ExitStack() as ends:  # type: ignore[arg-type]
        for rank in range(LEARNERS):
            learners.append(Learner(local, way, rank, seed))
            ends.callback(learners[rank].optimizer.store.close)
        due = [(takes(rank), rank) for rank in range(LEARNERS)]
        heapq.heapify(due)
        waiting: dict[int, threading.Thread] = {}
        merged = [0] * LEARNERS  # the decision whose values each learner has
        taken = 0
        while taken < steps:
            now, rank = heapq.heappop(due)
            taken += learners[rank].learn()
            waiting[rank] = learners[rank].share(len(found) + 1 - merged[rank])
            if len(waiting) == way.quorum:
                for member, thread in waiting.items():
                    thread.join()
                    heapq.heappush(due, (now + takes(member), member))
                    merged[member] = len(found) + 1
                waiting.clear()
                found.append(Look(now, taken, learners[rank].lesson.held_out_loss()))
                if not found[-1].loss < HOPELESS:
                    break
    return found


def stale_learners(chosen: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    steps, loss = (QUICK_STEPS, QUICK_LOSS) if chosen.quick else (STEPS, LOSS)
    found = {
        case: {
            name: [looks(way, units, seed=seed, steps=steps) for seed in range(chosen.turns)]
            for name, way in ways_in(chosen.fragments).items()
        }
        for case, units in cases(chosen.slower).items()
    }
    return Report(
        subject="stale_learners",
        about=(
            f"{LEARNERS} learners, which share the model in {chosen.fragments} fragments every {EVERY} steps of"
            f" {WINDOWS} windows of {LENGTH} letters,"
            f" outer lr {RATE:g} and momentum {OUTER['momentum']:g} but where it says; {chosen.turns} seeds,"
            " median and range. A unit is what a step takes a usual learner."
        ),
        tables=[
            Table(
                case,
                ("", f"loss after {steps:,} steps of all", f"units to a loss of {loss:g}", "× waits for all"),
                rows(ways, loss),
            )
            for case, ways in found.items()
        ],
        figures=[{"loss": loss, "steps": steps, "found": found}],
        machine=machine("torch"),
    )


def rows(ways: Mapping[str, Sequence[Sequence[Look]]], loss: float) -> list[list[Cell]]:
    """What is not reached has no time."""
    times = {name: [units_to(one, loss) for one in runs] for name, runs in ways.items()}
    first = statistics.median(times[next(iter(ways))])
    return [
        [
            name,
            spread([one[-1].loss for one in runs], "{:.3f}", most=OF_NOTHING, beyond=DIVERGES),
            spread(times[name], "{:.0f}", most=math.inf, beyond="not reached"),
            ratio if (ratio := statistics.median(times[name]) / first) < math.inf else None,
        ]
        for name, runs in ways.items()
    ]


def units_to(run: Sequence[Look], loss: float) -> float:
    """Infinite if it was not reached."""
    return next((look.units for look in run if look.loss <= loss), math.inf)


def spread(values: Sequence[float], form: str, *, most: float, beyond: str) -> str:
    """Median and range, in which what is not below `most` is told by `beyond`."""
    median, least, greatest = (
        form.format(value) if value < most else beyond
        for value in (statistics.median(values), min(values), max(values))
    )
    return median if least == greatest else f"{median} ({least}–{greatest})"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="seeds of each way (default: 3)")
    parser.add_argument("--fragments", type=int, default=1, metavar="N", help="that take turns (default: 1)")
    parser.add_argument("--slower", type=float, default=4.0, metavar="TIMES", help="the slow learner (default: 4)")


SUBJECT = Subject("stale_learners", __doc__.splitlines()[0], stale_learners, _options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
