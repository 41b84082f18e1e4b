"""What standbys cost who trains, and how long a shard's death takes: a store with them beside one without.

    python -m bench.standbys [--quick] [--transport NAME] [--json FILE]

Axes: transport (TCP over loopback, shared memory), size of the one tensor. One shard, one worker, whole steps of SGD
with momentum, by turns; as fast as steps can be taken, and with COMPUTE_S of each computed elsewhere, as by a GPU. A
standby does what its shard does: without a core of its own, a step takes so much longer.
For the deaths a leader is killed again and again, and the time is that of the step in which it dies. For the filling
a standby is killed again and again, and steps are counted until another one may lead: its process starts, and gets all
that the shard has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import psutil

import psstore
from bench.command import Subject, run
from bench.compute_elsewhere import COMPUTE_S, step_name
from bench.harness import Series, alternate
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Report, Table, spread, three_digits
from psstore.config import Transport

TRANSPORTS = ("tcp", "shm")

SIZES = {"1 KiB": 256, "4 MiB": 1 << 20, "64 MiB": 16 << 20}

HYPER = {"lr": 1e-3, "momentum": 0.9}

POLL_S = 0.01

USUAL_STEPS = 20
"""Of which the usual rate is that of the mean."""

FILLINGS = 5
"""How often a standby is filled."""

DEATHS, FEW_DEATHS = 100, 5
"""How often a leader dies."""

MOST_WAITED_S = 3.0
"""What was aimed at in 99 of 100 deaths."""


class Trainer:
    """Takes whole steps on one tensor."""

    def __init__(self, store: psstore.Store, num_elems: int) -> None:
        self.store = store
        self._gradient = np.full(num_elems, 1e-3, np.float32)
        self._values = np.zeros(num_elems, np.float32)
        store.create("w", self._values, rule="sgd")
        self.step()

    def step(self, compute_s: float = 0.0) -> float:
        """Its seconds. `compute_s`: of which this machine's processors have nothing to do."""
        begin = time.perf_counter()
        time.sleep(compute_s)
        self.store.push("w", self._gradient)
        self.store.commit(HYPER)
        self.store.pull("w", out=self._values)
        return time.perf_counter() - begin

    def await_standby(self) -> None:
        while not self.store.stats()[0]["standbys"]:
            time.sleep(POLL_S)

    def fill(self) -> float:
        """How many times as fast as with a standby it steps while another one is started and filled."""
        self.await_standby()
        usual_s = [self.step() for _ in range(USUAL_STEPS)]
        leader = psutil.Process(int(self.store.stats()[0]["process"]))
        supervisor = leader.parent()
        assert supervisor is not None
        (standby,) = [one for one in supervisor.children() if one.pid != leader.pid]
        standby.kill()
        begin, num_steps = time.perf_counter(), 0
        while not self.store.stats()[0]["standbys"] or num_steps == 0:
            self.step()
            num_steps += 1
        return (num_steps / (time.perf_counter() - begin)) * float(np.mean(usual_s))

    def outlive(self) -> float:
        """The seconds of a step in which the shard's process dies."""
        self.await_standby()
        os.kill(int(self.store.stats()[0]["process"]), signal.SIGKILL)
        return self.step()


def measure(chosen: argparse.Namespace) -> Report:
    steps: list[list[Cell]] = []
    fillings: list[list[Cell]] = []
    deaths: list[list[Cell]] = []
    summary: list[list[Cell]] = []
    figures: list[dict[str, Any]] = []
    for transport in chosen.transport or TRANSPORTS:
        for size, num_elems in SIZES.items():
            taken, rates, died = _measured(transport, num_elems, is_quick=chosen.quick)
            for compute_s, (alone, beside) in taken.items():
                ratio = beside.median / alone.median
                what = step_name(compute_s)
                steps.append([transport, size, what, _times(alone), _times(beside), ratio])
                summary.append(
                    ["standbys", f"{what}, {size}, {transport}, × without", f"{_ms(beside)} ms", ratio, None]
                )
            rate = float(np.median(rates))
            fillings.append([transport, size, spread(rate, min(rates), max(rates))])
            summary.append(
                ["standbys", f"rate while one is filled, {size}, {transport}, × usual", three_digits(rate), None, None]
            )
            p99_s = died.percentile(99)
            deaths.append([transport, size, _times(died), 1e3 * p99_s])
            summary.append(
                [
                    "standbys",
                    f"a step in which the shard dies, p99 of {len(died.times_s)}, {size}, {transport}"
                    f" (aimed at {MOST_WAITED_S:g} s)",
                    f"{p99_s:.2f} s",
                    None,
                    None,
                ]
            )
            figures.append(
                {
                    "transport": transport,
                    "size": size,
                    "times_s": {compute_s: beside.times_s for compute_s, (_, beside) in taken.items()},
                    "died_s": died.times_s,
                    "rates": rates,
                }
            )
    headers = ("transport", "size", "what", "without, ms: median (min–max)", "with a standby", "× without")
    return Report(
        subject="standbys",
        about=(
            "A step of one worker at one shard, with a standby and without, by turns; and one in which the shard dies."
        ),
        tables=[
            Table("a step", headers, steps),
            Table("steps a second while a standby is filled", ("transport", "size", "× usual"), fillings),
            Table("a step in which the shard dies", ("transport", "size", "ms: median (min–max)", "p99"), deaths),
        ],
        figures=figures,
        summary=summary,
        machine=machine(),
    )


Pairs = Mapping[float, tuple[Series, Series]]
"""Steps without a standby and with one, by the seconds of each that are computed elsewhere."""


def _measured(transport: str, num_elems: int, *, is_quick: bool) -> tuple[Pairs, list[float], Series]:
    with contextlib.ExitStack() as ends:

        def trainer(*options: str) -> Trainer:
            url = ends.enter_context(store_server("tcp" if transport == "tcp" else "unix", 1, options=options))
            store = psstore.connect(url, rank=0, transport=cast(Transport, transport))
            return Trainer(ends.enter_context(store), num_elems)

        alone, beside = trainer(), trainer("--standbys", "1")
        beside.await_standby()
        taken: dict[float, tuple[Series, Series]] = {}
        for compute_s in (0.0, COMPUTE_S):
            turns = {"alone": partial(alone.step, compute_s), "beside": partial(beside.step, compute_s)}
            found = alternate(turns, warm_up=2, rounds=9 if is_quick else 40, progress=f"standbys, {transport}")
            taken[compute_s] = found["alone"], found["beside"]
        rates = [beside.fill() for _ in range(FILLINGS)]
        died_s = tuple(beside.outlive() for _ in range(FEW_DEATHS if is_quick else DEATHS))
        return taken, rates, Series(died_s, ())


def _times(series: Series) -> Cell:
    return spread(1e3 * series.median, 1e3 * series.min, 1e3 * series.max)


def _ms(series: Series) -> str:
    return f"{1e3 * series.median:.2f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only over this one")


SUBJECT = Subject("standbys", __doc__.splitlines()[0], measure, add_options)

if __name__ == "__main__":
    run(SUBJECT)
