"""What fewer bytes make of a slow link: rounds in each codec, beside the same in float32.

    python -m bench.links [--quick] [--rate MBIT] [--megabytes M] [--json FILE]

2 workers and 2 shards on hosts of their own (virtual_hosts.py), whose links carry `--rate` each way, so little that
float32 waits for them alone. A round is push_many, commit, pull_many of a model of tensors of 1 MiB; pulls in int8 and
sign bring deltas, which begin with the warm-up. The ideal is the ratio of payload bytes: what is missing are headers,
round trips, and the time in which somebody encodes, steps or decodes and the link stands still. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping

import numpy as np

import psstore
from bench.command import Subject, run
from bench.far import Crew, crew
from bench.harness import Series, alternate
from bench.machine import CONGESTION_CONTROL, machine
from bench.report import Cell, Report, Table, three_digits
from bench.servers import TOKEN, shards
from bench.virtual_hosts import VirtualHosts, why_not
from psstore.client.store import Store
from psstore.types import TensorSpec

WORKERS = SHARDS = 2
TENSOR_ELEMS = 256 << 10

PLAIN = "none"
DELTAS = ("int8", "sign")
CODECS = (PLAIN, "bf16", *DELTAS)

BURST_BYTES = 16 << 10
"""What a link carries at once after a pause: next to nothing of what a round in 1 bit has."""


class Worker:
    """One of the two. Each codec has tensors of its own, so that deltas follow rounds of that codec."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        self._rank = rank
        chance = np.random.default_rng(rank)
        num_tensors = num_bytes // (4 * TENSOR_ELEMS)
        self._gradients = chance.standard_normal((num_tensors, TENSOR_ELEMS), np.float32)
        self._into = np.empty_like(self._gradients)

    def join(self, url: str) -> None:
        self._store = psstore.connect(url, rank=self._rank, num_workers=WORKERS, token=TOKEN, connect_timeout_s=30.0)
        specs = [TensorSpec(name=n, shape=(TENSOR_ELEMS,), rule="sgd") for codec in CODECS for n in self._names(codec)]
        self._store.create_many(specs)

    def leave(self) -> None:
        self._store.close()

    def round(self, codec: str) -> None:
        names, store = self._names(codec), self._store
        chosen = None if codec == PLAIN else codec
        store.push_many(dict(zip(names, self._gradients, strict=True)), codec=chosen)
        store.commit({"lr": 1e-3})
        store.pull_many(names, out=list(self._into), codec=chosen)

    def payload_bytes(self, codec: str) -> int:
        """Of one round, both ways, as the store counts them."""
        before = self._moved(self._store)
        self.round(codec)
        return self._moved(self._store) - before

    def _names(self, codec: str) -> list[str]:
        return [f"{codec}.{index}" for index in range(len(self._gradients))]

    @staticmethod
    def _moved(store: Store) -> int:
        return store.bytes_pushed + store.bytes_pulled

    def ready(self) -> None:
        """Answered when what came before is done."""


def measure(workers: Crew, *, rounds: int) -> tuple[dict[str, Series], dict[str, int]]:
    """Also: payload bytes of a round."""
    for codec in DELTAS:
        workers.call("round", codec)  # the first pull brings whole values
    num_bytes = {codec: int(workers.call("payload_bytes", codec)[0]) for codec in CODECS[1:]}
    turns = {codec: workers.turn("round", codec) for codec in CODECS}
    return alternate(turns, warm_up=0, rounds=rounds, progress="links"), num_bytes


def measure_all(arguments: argparse.Namespace) -> tuple[dict[str, Series], dict[str, int]]:
    with contextlib.ExitStack() as ends:
        hosts = ends.enter_context(
            VirtualHosts(
                WORKERS + SHARDS,
                rate_mbit=arguments.rate,
                burst_bytes=BURST_BYTES,
                congestion_control=CONGESTION_CONTROL,
            )
        )
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, arguments.megabytes << 20)))
        workers.call("ready")
        url = ends.enter_context(shards(hosts, SHARDS, first_host=WORKERS))
        workers.call("join", url)
        found = measure(workers, rounds=1 if arguments.quick else 3)
        workers.call("leave")
        return found


# ---- showing ----

HEADERS = ("codec", "s: median (min–max)", "× float32", "bytes, float32 to 1", "of the ideal", "CPU s per GB of values")


def ratios(
    series: Mapping[str, Series], num_bytes: Mapping[str, int], plain_bytes: int
) -> list[tuple[str, float, float]]:
    """Of each codec: how many times faster than float32 it was, and would be if bytes were all."""
    return [
        (codec, series[PLAIN].median / one.median, plain_bytes / num_bytes.get(codec, plain_bytes))
        for codec, one in series.items()
    ]


def table(series: Mapping[str, Series], num_bytes: Mapping[str, int], plain_bytes: int) -> Table:
    rows: list[list[Cell]] = []
    for codec, times, ideal in ratios(series, num_bytes, plain_bytes):
        median, low, high = (three_digits(t) for t in (series[codec].median, series[codec].min, series[codec].max))
        name = "float32" if codec == PLAIN else f"**{codec}**"
        cpu_s_per_gb = series[codec].cpu_s / (WORKERS * plain_bytes) * 1e9
        rows.append([name, f"{median} ({low}–{high})", times, ideal, times / ideal, cpu_s_per_gb])
    return Table("push, commit, pull", HEADERS, rows)


def links(arguments: argparse.Namespace) -> Report:
    about = (
        f"{WORKERS} workers and {SHARDS} shards on hosts of their own, a model of {arguments.megabytes} MiB in 1-MiB"
        f" tensors, links of {arguments.rate:g} Mbit/s each way, all connections under {CONGESTION_CONTROL}. The same"
        " codec both ways; pulls in int8 and sign are deltas. A GB of values is 10⁹ bytes of them in"
        " float32, sent or received."
    )
    if reason := why_not():
        return Report("links", about, [], notes=[f"not run: {reason}"], machine=machine())
    series, num_bytes = measure_all(arguments)
    plain_bytes = 2 * (arguments.megabytes << 20)
    found = table(series, num_bytes, plain_bytes)
    figures = [
        {"codec": codec, "times_s": one.times_s, "cpu_times_s": one.cpu_times_s} for codec, one in series.items()
    ]
    summary: list[list[Cell]] = [
        ["links", f"a round in {codec}", f"{three_digits(series[codec].median)} s", ideal / times, None]
        for codec, times, ideal in ratios(series, num_bytes, plain_bytes)
        if codec != PLAIN
    ]
    return Report("links", about, [found], figures=figures, summary=summary, machine=machine())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=20.0, metavar="MBIT", help="of each link (default: 20 Mbit/s)")
    parser.add_argument("--megabytes", type=int, default=16, metavar="M", help="of the model, in MiB (default: 16)")


SUBJECT = Subject("links", __doc__.splitlines()[0], links, add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
