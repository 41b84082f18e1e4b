"""What /metrics costs, scraped once a second: processor time of who answers, and of the shards that are asked.

    python -m bench.monitoring [--quick] [--json FILE]

Axes: shards, ranks that have joined. The store does nothing else meanwhile, so that all processor time of its shards is
for the questions; the same store without --metrics is what they take anyway. A second of a step takes at least one
core's second, of which that is the share.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from contextlib import ExitStack

import numpy as np
import psutil

import psstore
from bench.command import Subject, run
from bench.harness import cpu_seconds
from bench.machine import machine
from bench.processes import free_port, store_server
from bench.report import Cell, Report, Table

CASES = ((1, 1), (4, 8), (8, 32))
"""(shards, workers)."""

BOUND = 0.005
"""What it may be."""


def measure(chosen: argparse.Namespace) -> Report:
    seconds = 8 if chosen.quick else 60
    rows: list[list[Cell]] = []
    summary: list[list[Cell]] = []
    for shards, workers in CASES:
        shard_share, own_share = _measured(shards, workers, seconds)
        whole = shard_share + own_share
        rows.append([str(shards), str(workers), 1e3 * own_share, 1e3 * shard_share, 100 * whole, 100 * BOUND])
        what = f"/metrics each second, {shards} shards, {workers} workers, share of a step (may be {100 * BOUND:g} %)"
        summary.append(["monitoring", what, f"{100 * whole:.2f} %", None, None])
    headers = ("shards", "workers", "answering, ms/s", "all shards, ms/s", "share of a step, %", "may be, %")
    return Report(
        subject="monitoring",
        about="Processor time that a scrape each second takes, on one host with all shards.",
        tables=[Table("a scrape each second", headers, rows)],
        figures=[],
        summary=summary,
        machine=machine(),
    )


def _measured(shards: int, workers: int, seconds: int) -> tuple[float, float]:
    """Processor seconds per second: of all shards, more than without; and of the process that answers."""
    without, _ = _processor_s(shards, workers, seconds, None)
    asked, answering = _processor_s(shards, workers, seconds, free_port())
    return max(0.0, asked - without) / seconds, answering / seconds


def _processor_s(shards: int, workers: int, seconds: int, port: int | None) -> tuple[float, float]:
    """What shards, and who answers, use while `port` is scraped once a second."""
    options = [] if port is None else ["--metrics", str(port)]
    with ExitStack() as ends:
        url = ends.enter_context(store_server("unix", shards, workers=workers, options=options))
        stores = [ends.enter_context(psstore.connect(url, rank=rank)) for rank in range(workers)]
        for number in range(100):
            stores[0].create(f"w{number}", np.zeros(1000, np.float32), rule="sgd")
        pids = [int(one["process"]) for one in stores[0].stats()]
        children = psutil.Process(pids[0]).parent()
        assert children is not None, "its supervisor"
        others = [one.pid for one in children.children() if one.pid not in pids]
        _scrape_until(time.monotonic() + 3.0, port)  # what is only done once is over
        before = cpu_seconds(pids), cpu_seconds(others)
        _scrape_until(time.monotonic() + seconds, port)
        return cpu_seconds(pids) - before[0], cpu_seconds(others) - before[1]


def _scrape_until(end: float, port: int | None) -> None:
    while time.monotonic() < end:
        began = time.monotonic()
        if port is not None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                answer.read()
        time.sleep(max(0.0, began + 1.0 - time.monotonic()))


SUBJECT = Subject("monitoring", __doc__.splitlines()[0], measure)

if __name__ == "__main__":
    run(SUBJECT)
