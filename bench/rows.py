"""Rows of a table, pulled and trained, beside a plain loop over a hash map in C and torch's sparse Adagrad.

    python -m bench.rows [--quick] [--json FILE]

Axes: ids in a step, each once, of a zipf(1.05) distribution; how the store is reached. A step pulls the rows, pushes a
gradient for each, and commits; the rows are stepped when they are touched next, or in between. The limit is a C loop
that gathers and steps the same rows of a hash map, with prefetching, on one core; the peer is embedding() of torch and
its Adagrad of a sparse gradient, on one core, too. All hold as many rows, of 64 float32 and as many sums.

A second table is of codecs: the bytes of rows that a step sends and receives over TCP, and its time. A third is of rows
that are kept in bfloat16: their bytes in memory, and the time of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes as c
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

import psstore
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate, timed
from bench.kernel_work import compiled
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Report, Table
from psstore.client.store import Store

DIM = 64
NUM_ROWS = 1_000_000
RATE, EPS = 0.01, 1e-8
HYPERS = {"lr": RATE, "eps": EPS}

SET_SIZES = (4096, 65_536)
"""Ids in a step."""

NUM_SETS = 16
"""Sets of ids that steps take in turn, so that the rows of one are not in the cache."""

LIMIT, PEER = "plain loop", "torch"

CODECS = ("none", "bf16", "int8")
"""Of rows, both ways."""

CODEC_HEADERS = ("ids a step", "codec", "bytes a row, pushed", "of float32's", "pulled", "of float32's", "time, × none")

DTYPES = ("float32", "bfloat16")
"""What rows are kept in."""

KEPT_RULES = ("sgd", "rowwise_adagrad", "adagrad", "adam")
"""Of rows with none, one, as many and twice as many elements of state."""

KEPT_HEADERS = ("rule", "kept in", "bytes a row", "of float32's", "CPU time, × float32", "time, × float32")

HEADERS = (
    "ids a step",
    "contestant",
    "ms a step",
    "million rows/s",
    "× plain loop",
    "× torch",
    "CPU ms",
    "× plain, CPU",
)

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Found:
    """What the contestants took for steps of so many ids."""

    num_ids: int
    series: dict[str, Series]


@dataclass(frozen=True)
class Coded:
    """What steps of so many ids took in each codec, and the bytes of one of them, sent and received."""

    num_ids: int
    series: dict[str, Series]
    num_bytes: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Kept:
    """What steps of tables of one rule took whose rows are kept in each dtype, and the bytes of a row."""

    rule: str
    series: dict[str, Series]
    row_bytes: dict[str, float]


def id_sets(num_ids: int, *, num_rows: int) -> list[Ids]:
    """Ids as a batch has them that has so many different ones: the frequent ones in each of them, in any order."""
    generator = np.random.default_rng(1)
    weights = np.arange(1, num_rows + 1) ** -1.05
    bounds = np.cumsum(weights / weights.sum())
    names = generator.permutation(num_rows)
    sets = []
    for _ in range(NUM_SETS):
        ids = np.empty(0, np.int64)
        while len(ids) < num_ids:
            drawn = np.searchsorted(bounds, generator.random(4 * num_ids)).clip(max=num_rows - 1)
            ids = np.unique(np.concatenate([ids, drawn]))
        sets.append(generator.permutation(names[ids])[:num_ids].astype(np.uint64))
    return sets


# ---- contestants ----------------------------------------------------------------------------------------


def loop_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    loop = compiled("row_loop", DIM=DIM)
    capacity = 1 << (2 * num_rows - 1).bit_length()
    keys, places = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint32)
    rows = np.zeros((num_rows, 2 * DIM), np.float32)
    values = np.zeros((len(gradients), DIM), np.float32)

    def call(mode: int, ids: Ids, floats: Floats) -> None:
        pointers = [c.c_void_p(one.ctypes.data) for one in (ids, keys, places, rows, floats)]
        given, key, place, row, value = pointers
        mask, rate, eps = c.c_uint64(capacity - 1), c.c_float(RATE), c.c_float(EPS)
        loop(c.c_int32(mode), given, c.c_int64(len(ids)), key, place, mask, row, value, rate, eps)

    call(0, np.arange(num_rows, dtype=np.uint64), rows)
    turns = cycle(sets)

    def step() -> None:
        ids = next(turns)
        call(1, ids, values)
        call(2, ids, gradients)

    return partial(timed, step)


def torch_turn(sets: Sequence[Ids], gradients: Floats, *, num_rows: int) -> Turn:
    weight = torch.nn.Parameter(torch.zeros(num_rows, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=RATE, eps=EPS)
    given = torch.from_numpy(gradients)
    turns = cycle([torch.from_numpy(ids.astype(np.int64)) for ids in sets])

    def step() -> None:
        ids = next(turns)
        torch.nn.functional.embedding(ids, weight.detach())
        weight.grad = torch.sparse_coo_tensor(ids[None], given, (num_rows, DIM), check_invariants=False)
        optimizer.step()

    return partial(timed, step)


@contextlib.contextmanager
def filled_store(where: str, *, num_rows: int, rule: str = "adagrad", dtype: str = "float32") -> Iterator[Store]:
    """A worker of a store with the table."""
    with contextlib.ExitStack() as ends:
        if where == "local":
            store = ends.enter_context(psstore.connect("local://", rank=0, num_workers=1))
        else:
            url = ends.enter_context(store_server("unix" if where == "shm" else "tcp", 1))
            transport: Any = "auto" if where == "shm" else "tcp"
            store = ends.enter_context(psstore.connect(url, rank=0, transport=transport))
        store.create_table("t", dim=DIM, rule=rule, dtype=dtype)
        hypers = hypers_of(rule)
        some = np.full((SET_SIZES[-1], DIM), 1e-3, np.float32)
        for first in range(0, num_rows, len(some)):
            ids = np.arange(first, min(first + len(some), num_rows))
            store.push_rows("t", ids, some[: len(ids)])
            store.commit(hypers)
        yield store


def hypers_of(rule: str) -> dict[str, float]:
    return {"lr": RATE} if rule == "sgd" else HYPERS


def store_turn(
    store: Store, sets: Sequence[Ids], gradients: Floats, *, codec: str = "none", rule: str = "adagrad"
) -> Turn:
    hypers = hypers_of(rule)
    values = np.zeros((len(gradients), DIM), np.float32)
    turns = cycle(sets)

    def step() -> None:
        ids = next(turns)
        store.pull_rows("t", ids, out=values, codec=codec)
        store.push_rows("t", ids, gradients, codec=codec)
        store.commit(hypers)

    return step


def coded(num_ids: int, *, num_rows: int, rounds: int) -> Coded:
    """Steps in each codec, by turns, of one store over TCP."""
    sets = id_sets(num_ids, num_rows=num_rows)
    gradients = np.random.default_rng(2).standard_normal((num_ids, DIM), dtype=np.float32)
    with filled_store("tcp", num_rows=num_rows) as store:
        turns = {codec: store_turn(store, sets, gradients, codec=codec) for codec in CODECS}
        num_bytes = {codec: _bytes_of(store, turn) for codec, turn in turns.items()}
        series = alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{num_ids:,} ids in codecs")
    return Coded(num_ids, series, num_bytes)


def kept(rule: str, *, num_ids: int, num_rows: int, rounds: int) -> Kept:
    """Steps of embedded stores, by turns, one for each dtype."""
    sets = id_sets(num_ids, num_rows=num_rows)
    gradients = np.random.default_rng(2).standard_normal((num_ids, DIM), dtype=np.float32)
    with contextlib.ExitStack() as ends:
        stores = {
            dtype: ends.enter_context(filled_store("local", num_rows=num_rows, rule=rule, dtype=dtype))
            for dtype in DTYPES
        }
        turns = {dtype: store_turn(store, sets, gradients, rule=rule) for dtype, store in stores.items()}
        series = alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{rule} of rows in each dtype")
        counts = {dtype: store.stats()[0] for dtype, store in stores.items()}
    return Kept(rule, series, {dtype: int(one["row_bytes"]) / int(one["rows"]) for dtype, one in counts.items()})


def _bytes_of(store: Store, step: Turn) -> tuple[int, int]:
    """Bytes of rows that a step sends and receives, as the shard counts them."""
    before = store.stats()[0]
    step()
    after = store.stats()[0]
    sent, received = (int(after[name]) - int(before[name]) for name in ("received_bytes", "sent_bytes"))
    return sent, received


# ---- what came out --------------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    found = []
    for num_ids in SET_SIZES:
        sets = id_sets(num_ids, num_rows=NUM_ROWS)
        gradients = np.random.default_rng(2).standard_normal((num_ids, DIM), dtype=np.float32)
        with contextlib.ExitStack() as ends:
            turns = {
                f"psstore, {where}": store_turn(
                    ends.enter_context(filled_store(where, num_rows=NUM_ROWS)), sets, gradients
                )
                for where in ("local", "shm", "tcp")
            }
            turns[LIMIT] = loop_turn(sets, gradients, num_rows=NUM_ROWS)
            turns[PEER] = torch_turn(sets, gradients, num_rows=NUM_ROWS)
            rounds = 2 * NUM_SETS if chosen.quick else 8 * NUM_SETS
            found.append(Found(num_ids, alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{num_ids:,} ids")))
    rounds = 2 * NUM_SETS if chosen.quick else 8 * NUM_SETS
    in_codecs = [coded(num_ids, num_rows=NUM_ROWS, rounds=rounds) for num_ids in SET_SIZES]
    in_dtypes = [kept(rule, num_ids=SET_SIZES[0], num_rows=NUM_ROWS, rounds=rounds) for rule in KEPT_RULES]
    return report(found, in_codecs, in_dtypes)


def report(found: Sequence[Found], in_codecs: Sequence[Coded], in_dtypes: Sequence[Kept]) -> Report:
    return Report(
        subject="rows",
        about=(
            f"{NUM_ROWS:,} rows × {DIM} float32 with Adagrad's sums; a step pulls the rows of a set of ids, pushes"
            " their gradients and commits. The plain loop, in C, gathers and steps the same rows of a hash map; torch"
            " does so by embedding() and its Adagrad of a sparse gradient. Each on one core, but for a store's other"
            " processes; by turns."
        ),
        tables=[
            Table("Rows", HEADERS, [_row(one, name) for one in found for name in one.series]),
            Table("Codecs", CODEC_HEADERS, [_coded_row(one, codec) for one in in_codecs for codec in CODECS]),
            Table("Kept in bfloat16", KEPT_HEADERS, [_kept_row(one, dtype) for one in in_dtypes for dtype in DTYPES]),
        ],
        summary=[
            ["rows", f"{one.num_ids:,} ids, local", f"{1e3 * _median(one, 'psstore, local'):.3g} ms", *_ratios(one)]
            for one in found
        ],
        machine=machine("torch"),
    )


def _median(found: Found, name: str) -> float:
    return found.series[name].median


def _ratios(found: Found, name: str = "psstore, local") -> list[Cell]:
    return [_median(found, name) / _median(found, LIMIT), _median(found, name) / _median(found, PEER)]


def _row(found: Found, name: str) -> list[Cell]:
    series = found.series[name]
    rate = found.num_ids / series.median / 1e6
    cpu = series.cpu_s / found.series[LIMIT].cpu_s
    return [f"{found.num_ids:,}", name, 1e3 * series.median, rate, *_ratios(found, name), 1e3 * series.cpu_s, cpu]


def _coded_row(found: Coded, codec: str) -> list[Cell]:
    (sent, received), (plain_sent, plain_received) = found.num_bytes[codec], found.num_bytes["none"]
    bytes_of = [sent / found.num_ids, sent / plain_sent, received / found.num_ids, received / plain_received]
    return [f"{found.num_ids:,}", codec, *bytes_of, found.series[codec].median / found.series["none"].median]


def _kept_row(found: Kept, dtype: str) -> list[Cell]:
    series, wide = found.series[dtype], found.series["float32"]
    num_bytes = found.row_bytes[dtype]
    ratios = [num_bytes / found.row_bytes["float32"], series.cpu_s / wide.cpu_s, series.median / wide.median]
    return [found.rule, dtype, f"{num_bytes:.0f}", *ratios]


SUBJECT = Subject("rows", __doc__.splitlines()[0], measure, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
