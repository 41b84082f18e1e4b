"""What readers cost who trains: a large push alone, and while others read the whole model again and again.

    python -m bench.fairness [--quick] [--transport NAME] [--json FILE]

Axes: transport (TCP over loopback, unix sockets), readers. One shard; the trainer is this process, each reader another
one, and all pull and push the same tensor of 100 MiB. A fair share is half of the shard for who trains, however many
read: its push takes 2 times as long, and more where there are fewer cores than processes.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

import psstore
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.processes import FRESH, child, preload, store_server
from bench.report import Cell, Report, Table, spread
from bench.work import SGD, one_large
from psstore.config import Transport

TRANSPORTS = ("tcp", "unix")

READERS = (0, 1, 8)

POLL_S = 0.001
"""How often a reader asks whether it is to go on, and the trainer whether all of them read."""


class Readers:
    """Processes that read all the time, as many of them as are wanted."""

    def __init__(self, url: str, transport: str) -> None:
        self._wanted: Any = FRESH.Value("i", 0)
        self._begun: Any = FRESH.Array("q", max(READERS))
        self._done: Any = FRESH.Array("q", max(READERS))
        """Pulls of each."""
        self._ends = contextlib.ExitStack()
        for index in range(max(READERS)):
            self._ends.enter_context(child(_read, url, transport, index, self._wanted, self._begun, self._done))

    @contextlib.contextmanager
    def reading(self, count: int) -> Iterator[None]:
        """So many of them, in the whole block and not after it."""
        before = list(self._begun)
        self._wanted.value = count
        while any(self._begun[index] == before[index] for index in range(count)):
            time.sleep(POLL_S)
        yield
        self._wanted.value = 0
        while list(self._begun) != list(self._done):
            time.sleep(POLL_S)

    def close(self) -> None:
        self._wanted.value = -1
        self._ends.close()


def _read(url: str, transport: Transport, index: int, wanted: Any, begun: Any, done: Any) -> None:
    with psstore.connect(url, role="client", transport=transport) as store:
        out = np.zeros(one_large(1).num_elems, np.float32)
        while wanted.value >= 0:
            if index < wanted.value:
                begun[index] += 1
                store.pull("w", out=out)
                done[index] += 1
            else:
                time.sleep(POLL_S)


class Trainer:
    """Takes SGD steps on the tensor, and tells how long its pushes are."""

    def __init__(self, store: psstore.Store, readers: Readers) -> None:
        self._store = store
        self._readers = readers
        num_elems = one_large(1).num_elems
        self._gradient = np.full(num_elems, 1e-3, np.float32)
        self._values = np.zeros(num_elems, np.float32)

    def step(self, num_readers: int) -> float:
        """The seconds of its push."""
        with self._readers.reading(num_readers):
            begin = time.perf_counter()
            self._store.push("w", self._gradient)
            took_s = time.perf_counter() - begin
        self._store.commit(SGD)
        self._store.pull("w", out=self._values)
        return took_s


# ---- measuring ----


def measure(chosen: argparse.Namespace) -> Report:
    preload("psstore", "numpy", "bench.work")
    rows: list[list[Cell]] = []
    summary: list[list[Cell]] = []
    figures: list[dict[str, Any]] = []
    for transport in chosen.transport or TRANSPORTS:
        series = _series(transport, rounds=5 if chosen.quick else 15)
        for count, one in series.items():
            rows.append(_row(transport, count, one, series[0]))
            figures.append({"transport": transport, "readers": count, "times_s": one.times_s})
            if count:
                what = f"a push beside {count} reader{'s' if count > 1 else ''}, {transport}, × alone"
                ratio = one.median / series[0].median
                summary.append(["fairness", what, f"{1e3 * one.median:.0f} ms", ratio, None])
    return Report(
        subject="fairness",
        about=(
            "A trainer's push of 100 MiB to one shard, alone and while others pull 100 MiB again and again. Its fair"
            " share is half of what the shard moves."
        ),
        tables=[Table("the trainer's push", ("transport", "readers", "ms: median (min–max)", "× alone"), rows)],
        figures=figures,
        summary=summary,
        machine=machine(),
    )


def _series(transport: str, *, rounds: int) -> Mapping[int, Series]:
    with contextlib.ExitStack() as ends:
        url = ends.enter_context(store_server(transport, 1))
        store = ends.enter_context(psstore.connect(url, rank=0, transport=cast(Transport, transport)))
        store.create("w", np.zeros(one_large(1).num_elems, np.float32), rule="sgd")
        readers = ends.enter_context(contextlib.closing(Readers(url, transport)))
        trainer = Trainer(store, readers)

        def turn(count: int) -> Turn:
            return lambda: trainer.step(count)

        turns = {str(count): turn(count) for count in READERS}
        found = alternate(turns, warm_up=1, rounds=rounds, progress=f"fairness, {transport}")
        return {count: found[str(count)] for count in READERS}


def _row(transport: str, count: int, series: Series, alone: Series) -> list[Cell]:
    times = spread(1e3 * series.median, 1e3 * series.min, 1e3 * series.max)
    return [transport, str(count), times, series.median / alone.median]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only over this one")


SUBJECT = Subject("fairness", __doc__.splitlines()[0], measure, add_options)

if __name__ == "__main__":
    run(SUBJECT)
