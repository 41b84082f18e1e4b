"""A step of the torch wrapper with many small parameters, beside the calls that it is made of.

    python -m bench.opt_step [--quick] [--json FILE]

Axes: number and size of the parameters, transport. Gradients are there: there is no backward in it. The limit is
push_many, commit and pull_many of as many tensors of a store of its own, by turns. The processor time is this process's
alone, the wrapper's; the largest step tells of pauses, as by the garbage collector.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import SGD

import psstore
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate, timed
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Report, Table
from psstore.torch import DistributedOptimizer
from psstore.torch.change_detection import CHECKED_ROUNDS
from psstore.types import TensorSpec

RATE = 1e-3

HEADERS = ("what", "step() ms: median", "largest", "calls ms: median", "largest", "× calls", "× calls, CPU")


@dataclass(frozen=True)
class Task:
    """So many parameters of so many bytes."""

    count: int
    num_bytes: int
    transport: str

    def __str__(self) -> str:
        return f"{self.count:,} × {self.num_bytes >> 10} KiB, {self.transport}"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"layer{number}.weight": torch.randn(self.num_bytes // 4) for number in range(self.count)}


TASKS = [Task(1000, 4096, "shm"), Task(10_000, 1024, "shm"), Task(1000, 4096, "tcp")]


@dataclass(frozen=True)
class Found:
    """What both took."""

    task: Task
    step: Series
    calls: Series


@contextlib.contextmanager
def connected(task: Task) -> Iterator[psstore.Store]:
    kind, transport = ("unix", "auto") if task.transport == "shm" else ("tcp", "tcp")
    with store_server(kind, 1) as url, psstore.connect(url, rank=0, transport=transport) as store:  # type: ignore[arg-type]
        yield store


def step_turn(store: psstore.Store, task: Task) -> Turn:
    parameters = {name: torch.nn.Parameter(value) for name, value in task.tensors().items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer = DistributedOptimizer(SGD(parameters.values(), lr=RATE), store, parameters.items())
    return partial(timed, optimizer.step)


def calls_turn(store: psstore.Store, task: Task) -> Turn:
    gradients, values = task.tensors(), task.tensors()
    names, out = list(values), list(values.values())
    store.create_many([TensorSpec(name=name, shape=value.shape, rule="sgd") for name, value in values.items()], out)

    def calls() -> None:
        store.push_many(gradients)
        store.commit({"lr": RATE})
        store.pull_many(names, out=out)

    return partial(timed, calls)


def measure(chosen: argparse.Namespace) -> Report:
    found = []
    for task in TASKS:
        with connected(task) as one, connected(task) as other:
            turns = {"step": step_turn(one, task), "calls": calls_turn(other, task)}
            rounds = 10 if chosen.quick else 120
            took = alternate(turns, warm_up=CHECKED_ROUNDS + 2, rounds=rounds, progress=str(task))
            found.append(Found(task, took["step"], took["calls"]))
    return report(found)


def report(found: Sequence[Found]) -> Report:
    return Report(
        subject="opt_step",
        about=(
            "A step of DistributedOptimizer around SGD, and push_many, commit and pull_many of as many tensors of"
            " another store, by turns; one worker, one shard. Gradients are there before. CPU: this process's, without"
            " the shard."
        ),
        tables=[Table("Steps of many small parameters", HEADERS, [_row(one) for one in found])],
        summary=[["opt_step", str(one.task), f"{1e3 * one.step.median:.3g} ms", _ratio(one), None] for one in found],
        machine=machine("torch"),
    )


def _row(one: Found) -> list[Cell]:
    step, calls = one.step, one.calls
    times = [1e3 * second for second in (step.median, step.max, calls.median, calls.max)]
    return [f"**{one.task}**", *times, _ratio(one), min(step.cpu_times_s) / min(calls.cpu_times_s)]


def _ratio(one: Found) -> float:
    return one.step.median / one.calls.median


SUBJECT = Subject("opt_step", __doc__.splitlines()[0], measure, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
