"""How a table grows: what its rows take of memory and of processor time, and how long calls wait meanwhile."""

from __future__ import annotations

import gc
import resource
import time
from dataclasses import dataclass

import numpy as np
import psutil

import psstore
from bench.report import Cell, Table
from bench.row_work import EPS, RATE

DIM = 16
RULE = "rowwise_adagrad"
ROW_BYTES = 4 * DIM + 4
"""Of a row's values and its sum, without what it takes to find it."""

STEP_ROWS = 4096

GROWTH_HEADERS = (
    "rows",
    "million rows/s of processor time",
    "million rows/s",
    "bytes a row",
    "× its values and sum",
    "median ms a call",
    "99.9 %",
    "longest",
    "99.9 %, processor time",
    "longest, processor time",
    "longest, without the kernel's",
)


@dataclass(frozen=True)
class Growth:
    """A table as it was when it had so many rows."""

    num_rows: int
    seconds: float
    cpu_seconds: float
    memory_bytes: int
    """That the process has grown by."""
    call_s: np.ndarray
    call_cpu_s: np.ndarray
    call_user_s: np.ndarray
    """Processor time of calls without the kernel's, most of which is for pages of memory."""

    def row(self) -> list[Cell]:
        row_bytes = self.memory_bytes / self.num_rows
        calls_ms = 1e3 * np.percentile(self.call_s, [50, 99.9, 100])
        return [
            f"{self.num_rows:,}",
            self.num_rows / self.cpu_seconds / 1e6,
            self.num_rows / self.seconds / 1e6,
            row_bytes,
            row_bytes / ROW_BYTES,
            *map(float, calls_ms),
            *(1e3 * float(one) for one in np.percentile(self.call_cpu_s, [99.9, 100])),
            1e3 * float(self.call_user_s.max()),
        ]


def growth(num_rows: int) -> Table:
    """Of a table of an embedded store, which is grown by steps of as many new rows each; each reads one of them."""
    process = psutil.Process()
    gradients = np.full((STEP_ROWS, DIM), 1e-3, np.float32)
    calls, cpu_calls, user_calls, rows = [], [], [], []
    gc.freeze()  # or calls wait now and then until all that was imported has been looked at
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule=RULE)
        before, begin, cpu_begin = process.memory_info().rss, time.perf_counter(), time.process_time()
        shown = num_rows // 10
        for first in range(0, num_rows, STEP_ROWS):
            ids = np.arange(first, first + STEP_ROWS, dtype=np.uint64)
            for call in (
                lambda ids=ids: store.push_rows("t", ids, gradients),
                lambda: store.commit({"lr": RATE, "eps": EPS}),
                lambda ids=ids: store.pull_rows("t", ids[:1]),
            ):
                called, cpu_called, user_called = time.perf_counter(), time.process_time(), _user_s()
                call()
                calls.append(time.perf_counter() - called)
                cpu_calls.append(time.process_time() - cpu_called)
                user_calls.append(_user_s() - user_called)
            if first + STEP_ROWS >= min(shown, num_rows):
                store.pull_rows("t", ids)  # what is left of the last step
                took, cpu_took = time.perf_counter() - begin, time.process_time() - cpu_begin
                memory = process.memory_info().rss - before
                times = np.array(calls), np.array(cpu_calls), np.array(user_calls)
                rows.append(Growth(first + STEP_ROWS, took, cpu_took, memory, *times).row())
                shown *= 10
    return Table("Growth", GROWTH_HEADERS, rows)


def _user_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime
