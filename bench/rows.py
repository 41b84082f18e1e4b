"""Rows of a table, pulled and trained, beside a plain loop over a hash map in C, and others' tables.

    python -m bench.rows [--quick] [--json FILE]
    python -m bench.rows --parts                # where the time of a step goes
    python -m bench.rows --growth 100000000     # takes 10 GB
    python -m bench.rows --links                # four workers and four shards, whose links are slow; needs root

Axes: ids in a step, each once, of a zipf(1.05) distribution; how the store is reached. A step pulls the rows, pushes a
gradient for each, and commits; the rows are stepped when they are touched next, or in between. The limit is a C loop
that gathers and steps the same rows of a hash map, with prefetching, on one core, and over TCP that loop behind a plain
socket. Peers in this process, on one core, too: torch's embedding() and its Adagrad of a sparse gradient, FBGEMM's
table with rowwise Adagrad, TensorFlow's gather and Adagrad; over TCP ps-lite's and TensorFlow's servers. Who is not
installed is left out, and said: FBGEMM comes as fbgemm-gpu-cpu, of the version for this torch, and ps-lite as
peers/ps_lite.py says. All hold as many rows, of 64 float32 and as many sums, but for FBGEMM, which has one sum a row.

A second table is of codecs: the bytes of rows that a step sends and receives over TCP, and its time. A third is of rows
that are kept in bfloat16: their bytes in memory, and the time of a step. A fourth is of a client's cache
(row_caches.py): the bytes of rows that come to it, and the time of a pull. A fifth says where the time of a step goes
(row_parts.py). With --growth there is another one instead, of a table of short rows that grows to so many
(row_growth.py), with --links one of steps over slow links (row_links.py), and with --parts the fifth alone.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch

import psstore
from bench import row_caches, row_links, row_parts, row_peers, row_servers
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Chart, Report, Table
from bench.row_caches import Cached
from bench.row_growth import growth
from bench.row_parts import Parts
from bench.row_work import (
    DIM,
    HYPERS,
    NUM_ROWS,
    NUM_SETS,
    Floats,
    Ids,
    fill,
    gradients_of,
    hypers_of,
    id_sets,
)
from psstore.client.store import Store

SET_SIZES = (4096, 65_536)
"""Ids in a step."""

PART_SIZES = (1, *SET_SIZES)
"""Ids in a step of which each part is timed: of one id there is what a step takes whatever it moves."""

LIMIT, SOCKETS = "plain loop", "raw sockets, tcp"
"""What the memory and the links of this machine allow: the loop in C, by itself and behind a socket."""

IN_ONE_PROCESS: Mapping[str, Callable[..., Turn]] = {
    LIMIT: row_peers.loop_turn,
    "torch": row_peers.torch_turn,
    "FBGEMM": row_peers.fbgemm_turn,
    "TensorFlow": row_peers.tensorflow_turn,
}

SERVED: Mapping[str, Callable[..., AbstractContextManager[Turn]]] = {
    SOCKETS: row_servers.raw_sockets,
    "ps-lite, tcp": row_servers.ps_lite_server,
    "TensorFlow, tcp": row_servers.tensorflow_server,
}

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
    "× its limit",
    "CPU ms",
    "× its limit, CPU",
)


@dataclass(frozen=True)
class Found:
    """What the contestants took for steps of so many ids."""

    num_ids: int
    series: dict[str, Series]
    absent: Mapping[str, str]
    """Who did not take part, and why."""


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


# ---- contestants ----------------------------------------------------------------------------------------


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
        fill(store, num_rows=num_rows, rule=rule, dtype=dtype)
        yield store


@contextlib.contextmanager
def read_store() -> Iterator[tuple[Store, Store]]:
    """A worker of a store with the table, over TCP, and a reader of it."""
    with (
        store_server("tcp", 1) as url,
        psstore.connect(url, rank=0, transport="tcp") as worker,
        psstore.connect(url, role="client", transport="tcp") as reader,
    ):
        fill(worker, num_rows=NUM_ROWS)
        yield worker, reader


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
    gradients = gradients_of(num_ids)
    with filled_store("tcp", num_rows=num_rows) as store:
        turns = {codec: store_turn(store, sets, gradients, codec=codec) for codec in CODECS}
        num_bytes = {codec: _bytes_of(store, turn) for codec, turn in turns.items()}
        series = alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{num_ids:,} ids in codecs")
    return Coded(num_ids, series, num_bytes)


def kept(rule: str, *, num_ids: int, num_rows: int, rounds: int) -> Kept:
    """Steps of embedded stores, by turns, one for each dtype."""
    sets = id_sets(num_ids, num_rows=num_rows)
    gradients = gradients_of(num_ids)
    with contextlib.ExitStack() as ends:
        stores = {
            dtype: ends.enter_context(filled_store("local", num_rows=num_rows, rule=rule, dtype=dtype))
            for dtype in DTYPES
        }
        turns = {dtype: store_turn(store, sets, gradients, rule=rule) for dtype, store in stores.items()}
        series = alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{rule} of rows in each dtype")
        counts = {dtype: store.stats()[0] for dtype, store in stores.items()}
    return Kept(rule, series, {dtype: int(one["row_bytes"]) / int(one["rows"]) for dtype, one in counts.items()})


def in_parts(*, num_rows: int, rounds: int) -> list[Parts]:
    with filled_store("local", num_rows=num_rows) as store:
        return [
            row_parts.parts(store, num_ids, num_rows=num_rows, hypers=HYPERS, rounds=rounds) for num_ids in PART_SIZES
        ]


def _bytes_of(store: Store, step: Turn) -> tuple[int, int]:
    """Bytes of rows that a step sends and receives, as the shard counts them."""
    before = store.stats()[0]
    step()
    after = store.stats()[0]
    sent, received = (int(after[name]) - int(before[name]) for name in ("received_bytes", "sent_bytes"))
    return sent, received


# ---- what came out --------------------------------------------------------------------------------------


def contest(num_ids: int, *, num_rows: int, rounds: int) -> Found:
    """Steps of everybody who is there, by turns."""
    sets, gradients = id_sets(num_ids, num_rows=num_rows), gradients_of(num_ids)
    turns: dict[str, Turn] = {}
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as ends:
        for name, begin in {**SERVED, **IN_ONE_PROCESS}.items():
            try:
                begun: Any = begin(sets, gradients, num_rows=num_rows)
                turns[name] = ends.enter_context(begun) if name in SERVED else begun
            except ImportError as missing:
                absent[name] = str(missing)
        for where in ("local", "shm", "tcp"):
            store = ends.enter_context(filled_store(where, num_rows=num_rows))
            turns[f"psstore, {where}"] = store_turn(store, sets, gradients)
        return Found(num_ids, alternate(turns, warm_up=NUM_SETS, rounds=rounds, progress=f"{num_ids:,} ids"), absent)


def measure(chosen: argparse.Namespace) -> Report:
    if chosen.growth:
        return growth_report(chosen.growth)
    if chosen.links:
        return links_report(row_links.linked(rounds=5 if chosen.quick else 20))
    torch.set_num_threads(row_peers.CORES)
    rounds = 2 * NUM_SETS if chosen.quick else 8 * NUM_SETS
    of_parts = in_parts(num_rows=NUM_ROWS, rounds=2 * rounds)
    if chosen.parts:
        return parts_report(of_parts)
    found = [contest(num_ids, num_rows=NUM_ROWS, rounds=rounds) for num_ids in SET_SIZES]
    in_codecs = [coded(num_ids, num_rows=NUM_ROWS, rounds=rounds) for num_ids in SET_SIZES]
    in_dtypes = [kept(rule, num_ids=SET_SIZES[0], num_rows=NUM_ROWS, rounds=rounds) for rule in KEPT_RULES]
    in_caches = row_caches.cached(read_store, HYPERS, rounds=2 * rounds)
    return report(found, in_codecs, in_dtypes, in_caches, of_parts)


def report(
    found: Sequence[Found],
    in_codecs: Sequence[Coded],
    in_dtypes: Sequence[Kept],
    in_caches: Sequence[Cached],
    of_parts: Sequence[Parts],
) -> Report:
    return Report(
        subject="rows",
        about=(
            f"{NUM_ROWS:,} rows × {DIM} float32 with Adagrad's sums; a step pulls the rows of a set of ids, pushes"
            " their gradients and commits. The plain loop, in C, gathers and steps the same rows of a hash map; over"
            " TCP it is behind a plain socket. FBGEMM has one sum a row. Each on one core, but for servers' processes;"
            " by turns."
        ),
        tables=[
            Table("Rows", HEADERS, [_row(one, name) for one in found for name in one.series]),
            Table("Codecs", CODEC_HEADERS, [_coded_row(one, codec) for one in in_codecs for codec in CODECS]),
            Table("Kept in bfloat16", KEPT_HEADERS, [_kept_row(one, dtype) for one in in_dtypes for dtype in DTYPES]),
            Table("Caches", row_caches.HEADERS, [row for one in in_caches for row in row_caches.rows_of(one)]),
            parts_table(of_parts),
        ],
        charts=[_rates(found)],
        notes=[f"Not run: {name}: {why}." for name, why in found[0].absent.items()],
        summary=[
            ["rows", f"{one.num_ids:,} ids, {where}", f"{1e3 * _median(one, name):.3g} ms", *_ratios(one, name)]
            for one in found
            for where in ("local", "tcp")
            for name in (f"psstore, {where}",)
        ],
        machine=machine("torch"),
    )


def parts_report(of_parts: Sequence[Parts]) -> Report:
    return Report(
        subject="rows",
        about=(
            f"{NUM_ROWS:,} rows × {DIM} float32 with Adagrad's sums in an embedded store: the processor time of each"
            " call of a step, and of the loop in C that gathers and steps the same rows of a hash map."
        ),
        tables=[parts_table(of_parts)],
        notes=[],
        summary=[],
        machine=machine("torch"),
    )


def parts_table(of_parts: Sequence[Parts]) -> Table:
    return Table("Parts", row_parts.HEADERS, [row for one in of_parts for row in one.rows()])


def growth_report(num_rows: int) -> Report:
    return Report(
        subject="rows",
        about=(
            "An embedded store's table of 16 float32 and one sum a row grows by steps of 4,096 new rows, and a row of"
            " each step is read. Memory is what the process has grown by; calls are pushes, commits and reads."
        ),
        tables=[growth(num_rows)],
        notes=[],
        summary=[],
        machine=machine("torch"),
    )


def links_report(table: Table) -> Report:
    return Report(
        subject="rows",
        about=(
            f"Steps of {row_links.NUM_IDS:,} rows × {DIM} float32 of {row_links.WORKERS} workers and as many shards, on"
            f" hosts of their own, whose links carry {row_links.RATE_MBIT:g} Mbit/s each way. The formula is what ids"
            " and rows take by themselves, at the rate of one plain connection."
        ),
        tables=[table],
        notes=[],
        summary=[],
        machine=machine("torch"),
    )


def _rates(found: Sequence[Found]) -> Chart:
    """A panel for steps of so many ids, of those that are measured by the same limit."""
    series = {
        f"{one.num_ids:,} ids a step, {'over tcp' if limit == SOCKETS else 'on one host'}": {
            name: _million_rows_per_s(one, name) for name in one.series if limit_of(name) == limit
        }
        for one in found
        for limit in (LIMIT, SOCKETS)
    }
    return Chart("", "Rows pulled, pushed and stepped", "million rows/s", series)


def _million_rows_per_s(found: Found, name: str) -> float:
    return found.num_ids / _median(found, name) / 1e6


def _median(found: Found, name: str) -> float:
    return found.series[name].median


def limit_of(name: str) -> str:
    """What a contestant is measured by."""
    return SOCKETS if name.endswith("tcp") else LIMIT


def _ratios(found: Found, name: str) -> list[Cell]:
    """× its limit, × the fastest peer that has the same one."""
    limit = limit_of(name)
    peers = [one for one in found.series if not one.startswith("psstore") and one != limit and limit_of(one) == limit]
    best = min((_median(found, one) for one in peers), default=None)
    mine = _median(found, name)
    return [mine / _median(found, limit), None if best is None else mine / best]


def _row(found: Found, name: str) -> list[Cell]:
    series, limit = found.series[name], found.series[limit_of(name)]
    ratios = [series.median / limit.median, 1e3 * series.cpu_s, series.cpu_s / limit.cpu_s]
    return [f"{found.num_ids:,}", name, 1e3 * series.median, _million_rows_per_s(found, name), *ratios]


def _coded_row(found: Coded, codec: str) -> list[Cell]:
    (sent, received), (plain_sent, plain_received) = found.num_bytes[codec], found.num_bytes["none"]
    bytes_of = [sent / found.num_ids, sent / plain_sent, received / found.num_ids, received / plain_received]
    return [f"{found.num_ids:,}", codec, *bytes_of, found.series[codec].median / found.series["none"].median]


def _kept_row(found: Kept, dtype: str) -> list[Cell]:
    series, wide = found.series[dtype], found.series["float32"]
    num_bytes = found.row_bytes[dtype]
    ratios = [num_bytes / found.row_bytes["float32"], series.cpu_s / wide.cpu_s, series.median / wide.median]
    return [found.rule, dtype, f"{num_bytes:.0f}", *ratios]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", action="store_true", help="measure only where the time of a step goes")
    parser.add_argument("--links", action="store_true", help="measure only steps over slow links")
    parser.add_argument("--growth", type=int, metavar="ROWS", help="measure only how a table grows to so many rows")


SUBJECT = Subject("rows", __doc__.splitlines()[0], measure, _add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
