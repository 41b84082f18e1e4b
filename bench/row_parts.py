"""Where the time of a step of rows goes in an embedded store: its three calls, what the client does in them with ids
and gradients, and the loop in C that does the same to a hash map.

Processor time of the caller's thread, call by call. What a call leaves to the store's own thread counts for the whole
step alone, which is the process's. Steps follow one another, but for those that are said to begin with a cold cache:
before these something else has been in it, as a model's computation is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median

import numpy as np

from bench.harness import last_level_cache_bytes
from bench.report import Cell
from bench.row_peers import RowLoop
from bench.row_work import DIM, NUM_SETS, Floats, Ids, gradients_of, id_sets
from psstore import _core
from psstore.client.store import Store
from psstore.types import PARTITION_BITS

HEADERS = ("ids a step", "part", "µs", "ns a row")

FLOAT32 = _core.DTYPES["float32"]

WHOLE, COLD = "psstore: the step, all threads", "psstore: the step, all threads, from a cold cache"
LOOP, COLD_LOOP = "loop in C: the step", "loop in C: the step, from a cold cache"


@dataclass(frozen=True)
class Parts:
    """What each part of a step of so many ids takes, in seconds of processor time."""

    num_ids: int
    seconds: dict[str, float]

    def rows(self) -> list[list[Cell]]:
        return [[f"{self.num_ids:,}", part, 1e6 * s, 1e9 * s / self.num_ids] for part, s in self.seconds.items()]


class _Clock:
    """Adds up what is done by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> None:
        begin = clock()
        work()
        self.seconds[part].append(clock() - begin)


def parts(store: Store, num_ids: int, *, num_rows: int, hypers: dict[str, float], rounds: int) -> Parts:
    """Of steps of a table "t" that is there, and of a loop over as many rows."""
    sets, gradients = id_sets(num_ids, num_rows=num_rows), gradients_of(num_ids)
    values = np.zeros((num_ids, DIM), np.float32)
    clock, loop = _Clock(), RowLoop(num_rows)

    def step(calls: _Clock, ids: Ids) -> None:
        calls.time("psstore: pull_rows", lambda: store.pull_rows("t", ids, out=values))
        calls.time("psstore: push_rows", lambda: store.push_rows("t", ids, gradients))
        calls.time("psstore: commit", lambda: store.commit(hypers))

    def loop_step(calls: _Clock, ids: Ids) -> None:
        calls.time("loop in C: rows gathered", lambda: loop.gather(ids, values))
        calls.time("loop in C: rows stepped", lambda: loop.step(ids, gradients))

    others = np.zeros(2 * last_level_cache_bytes(), np.uint8)
    for whole, cold, work in ((WHOLE, COLD, step), (LOOP, COLD_LOOP, loop_step)):
        for ids in islice(cycle(sets), rounds):
            clock.time(whole, partial(work, clock, ids), time.process_time)
        for ids in islice(cycle(sets), rounds):
            others += 1
            clock.time(cold, partial(work, _Clock(), ids), time.process_time)
    for ids in islice(cycle(sets), rounds):
        _client_parts(clock, ids, gradients, values)
    return Parts(num_ids, {part: _typical(taken) for part, taken in clock.seconds.items()})


def _client_parts(clock: _Clock, ids: Ids, gradients: Floats, values: Floats) -> None:
    """What the calls of a step do with ids, gradients and rows before they are sent, and when they have come."""
    clock.time("client: ids by partition", lambda: _core.GroupedIds(ids, PARTITION_BITS))
    grouped = _core.GroupedIds(ids, PARTITION_BITS)
    packed = np.empty(grouped.packed_bytes(DIM, FLOAT32), np.uint8)
    rows = packed[: len(ids) * DIM * 4]
    clock.time("client: gradients by partition", lambda: grouped.pack(gradients, DIM, packed, FLOAT32))
    clock.time("client: rows as asked for", lambda: grouped.scatter(rows, DIM, values, FLOAT32, FLOAT32))


def _typical(taken: Sequence[float]) -> float:
    return median(taken[NUM_SETS:])
