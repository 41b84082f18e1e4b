"""How much of their time learners behind slow links compute.

    python -m bench.learner_links [--quick] [--json FILE]

LEARNERS learners and SHARDS shards on hosts of their own (virtual_hosts.py), a model of 0.8 million weights, AdamW,
int8. A step's compute is slept, COMPUTE_S, and gradients are there beforehand. What steps take with rounds of all
learners, beside what they take without a store, in turns: the rest of the time the learner is idle, or works for its
rounds. Data parallel training of the same model, with the same codec, is beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import psstore
import psstore.torch
from bench.command import Subject, run
from bench.far import Crew, crew
from bench.machine import CONGESTION_CONTROL, machine
from bench.report import Cell, Report, Table, spread
from bench.servers import TOKEN, shards
from bench.virtual_hosts import VirtualHosts, why_not

LEARNERS, SHARDS = 4, 2
WIDTH, LAYERS = 256, 12
COMPUTE_S = 0.05
RATES_MBIT = (20.0, 50.0, 200.0)
EVERY = 50
"""Steps after which all weights have had a round."""


@dataclass(frozen=True)
class Way:
    """How workers share what they do."""

    title: str
    learning: Mapping[str, Any] | None
    """Arguments of DiLoCo; None: each step is one of all workers."""
    num_steps: int
    target_idle: float | None = None


WAYS = (
    Way("data parallel", None, 3),
    Way("DiLoCo, which waits for its rounds", {"every": EVERY, "fragments": 1}, EVERY),
    Way(
        "DiLoCo, 5 fragments, each merged 8 steps later",
        {"every": EVERY, "fragments": 5, "delay": 8},
        EVERY,
        target_idle=0.05,
    ),
)


class Learner:
    """One of them, on its host."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._steps: torch.optim.Optimizer | None = None

    def join(self, url: str, learning: Mapping[str, Any] | None) -> None:
        self._store = psstore.connect(url, rank=self._rank, num_workers=LEARNERS, token=TOKEN, connect_timeout_s=30.0)
        model, inner = self._model()
        if learning is None:
            self._steps = psstore.torch.DistributedOptimizer(
                inner, self._store, model.named_parameters(), compression="int8"
            )
        else:
            self._steps = psstore.torch.DiLoCo(model, inner, self._store, compression="int8", **learning)
        self._alone = self._model()[1]
        self.together(learning["every"] if learning else 1)  # the first round of all has other things to do

    def _model(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self._rank)
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def together(self, num_steps: int) -> float:
        assert self._steps is not None, "it has joined"
        return _seconds(self._steps, num_steps)

    def alone(self, num_steps: int) -> float:
        return _seconds(self._alone, num_steps)

    def leave(self) -> None:
        self._store.close()

    def ready(self) -> None:
        """Answered when what came before is done."""


def _seconds(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_steps):
        time.sleep(COMPUTE_S)
        optimizer.step()
    return time.perf_counter() - begin


def idle_shares(learners: Crew, way: Way, rounds: int) -> list[float]:
    """Of a step that is taken together, what it takes longer than alone: of each round the mean over the learners."""
    found = []
    for _ in range(rounds):
        alone = learners.call("alone", way.num_steps)
        together = learners.call("together", way.num_steps)
        found.append(statistics.mean(1.0 - a / t for a, t in zip(alone, together, strict=True)))
    return found


def measure_all(rounds: int) -> dict[str, dict[float, list[float]]]:
    found: dict[str, dict[float, list[float]]] = {way.title: {} for way in WAYS}
    with _hosts() as (hosts, learners):
        for rate_mbit in RATES_MBIT:
            hosts.set_rate(rate_mbit)
            for way in WAYS:
                with shards(hosts, SHARDS, first_host=LEARNERS) as url:  # DiLoCo has one of its own
                    learners.call("join", url, way.learning)
                    found[way.title][rate_mbit] = idle_shares(learners, way, rounds)
                    learners.call("leave")
    return found


@contextlib.contextmanager
def _hosts() -> Iterator[tuple[VirtualHosts, Crew]]:
    with contextlib.ExitStack() as ends:
        hosts = ends.enter_context(
            VirtualHosts(LEARNERS + SHARDS, rate_mbit=RATES_MBIT[0], congestion_control=CONGESTION_CONTROL)
        )
        learners = ends.enter_context(crew(hosts, LEARNERS, Learner))
        learners.call("ready")
        yield hosts, learners


def learner_links(chosen: argparse.Namespace) -> Report:
    about = (
        f"{LEARNERS} learners and {SHARDS} shards on hosts of their own, {LAYERS * WIDTH * (WIDTH + 1):,} weights, int8"
        f" both ways, all connections under {CONGESTION_CONTROL}; {COMPUTE_S:g} s of compute a step, slept. Idle is"
        " what a step takes longer than one without a store."
    )
    if reason := why_not():
        return Report("learner_links", about, [], notes=[f"not run: {reason}"], machine=machine())
    found = measure_all(1 if chosen.quick else 3)
    rows: list[list[Cell]] = [
        [
            way.title,
            *(spread(statistics.median(one), min(one), max(one)) for one in found[way.title].values()),
            way.target_idle,
        ]
        for way in WAYS
    ]
    headers = ("", *(f"{rate:g} Mbit/s" for rate in RATES_MBIT), "target")
    return Report(
        subject="learner_links",
        about=about,
        tables=[Table("idle share: median (min–max)", headers, rows)],
        figures=[{"idle": {title: list(one.values()) for title, one in found.items()}, "rates_mbit": RATES_MBIT}],
        machine=machine("torch"),
    )


SUBJECT = Subject("learner_links", __doc__.splitlines()[0], learner_links, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
