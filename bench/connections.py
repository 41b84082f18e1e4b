"""What several connections to a shard make of a link that one TCP connection can't fill.

    python -m bench.connections [--quick] [--megabytes M] [--json FILE]

A client on one host, a shard on another, a link between them (long_link.py): one that caps each flow, one that is long
and loses some packets, and one with neither. The client pushes and pulls a plain tensor of `--megabytes`; stores with
1, 2 and 4 connections take turns. The limit is the bytes at the link's rate, out and back. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib

import numpy as np

import psstore
from bench.command import Subject, run
from bench.far import crew
from bench.harness import Series, alternate
from bench.long_link import LongLink, Quality, why_not
from bench.machine import machine
from bench.report import Cell, Report, Table, three_digits
from bench.servers import TOKEN, shards

LINKS = {
    "each flow capped at a quarter": Quality(delay_s=0.0005, rate_mbit=200.0, flow_mbit=50.0),
    "20 ms each way, 0.1 % lost": Quality(delay_s=0.020, rate_mbit=200.0, loss=0.001),
    "neither": Quality(delay_s=0.0005, rate_mbit=200.0),
}
CONNECTIONS = (1, 2, 4)
CONGESTION_CONTROLS = ("cubic", "bbr")


class Pusher:
    """On the client's host: one store for each number of connections."""

    def __init__(self, num_bytes: int) -> None:
        self._value = np.random.default_rng(0).standard_normal(num_bytes // 4, np.float32)
        self._into = np.empty_like(self._value)
        self._stores: dict[int, psstore.Store] = {}

    def connect(self, url: str) -> None:
        for count in CONNECTIONS:
            store = psstore.connect(url, role="client", token=TOKEN, connections=count, connect_timeout_s=30.0)
            store.create(f"by {count}", self._value, rule="assign")
            self._stores[count] = store

    def round(self, count: int) -> None:
        store = self._stores[count]
        store.push(f"by {count}", self._value)
        store.pull(f"by {count}", out=self._into)

    def leave(self) -> None:
        for store in self._stores.values():
            store.close()


def measure(quality: Quality, congestion_control: str, *, num_bytes: int, rounds: int) -> dict[int, Series]:
    with contextlib.ExitStack() as ends:
        hosts = ends.enter_context(LongLink(quality, congestion_control=congestion_control))
        pushers = ends.enter_context(crew(hosts, 1, lambda _: Pusher(num_bytes)))
        url = ends.enter_context(shards(hosts, 1, first_host=1))
        pushers.call("connect", url)
        turns = {str(count): pushers.turn("round", count) for count in CONNECTIONS}
        series = alternate(turns, warm_up=1, rounds=rounds, progress="connections")
        pushers.call("leave")
        return {count: series[str(count)] for count in CONNECTIONS}


# ---- showing ----

HEADERS = ("link", "TCP", "limit, s", *(f"{count}, s: median (min–max)" for count in CONNECTIONS), "2 to 1", "4 to 1")


def row(name: str, congestion_control: str, limit_s: float, series: dict[int, Series]) -> list[Cell]:
    times: list[Cell] = []
    for one in series.values():
        median, low, high = map(three_digits, (one.median, one.min, one.max))
        times.append(f"{median} ({low}–{high})")
    gains: list[Cell] = [series[1].median / series[count].median for count in CONNECTIONS[1:]]
    return [name, congestion_control, three_digits(limit_s), *times, *gains]


def summary_row(name: str, congestion_control: str, limit_s: float, series: dict[int, Series]) -> list[Cell]:
    """Of the number of connections that is fastest."""
    count, best = min(series.items(), key=lambda one: one[1].median)
    what = f"{name}, {congestion_control}: {count} of {', '.join(map(str, series))} connections"
    return ["connections", what, f"{best.median:.2f} s", best.median / limit_s, None]


def connections(arguments: argparse.Namespace) -> Report:
    num_bytes = arguments.megabytes << 20
    about = (
        f"{arguments.megabytes} MiB pushed and pulled by one client from one shard, over links of 200 Mbit/s each way;"
        " a flow that is capped has 50. The limit: the bytes at the link's rate, out and back."
    )
    if reason := why_not():
        return Report("connections", about, [], notes=[f"not run: {reason}"], machine=machine())
    rows, figures, summary = [], [], []
    for name, quality in LINKS.items():
        for control in CONGESTION_CONTROLS:
            series = measure(quality, control, num_bytes=num_bytes, rounds=1 if arguments.quick else 3)
            limit_s = 2 * 8e-6 * num_bytes / quality.rate_mbit
            rows.append(row(name, control, limit_s, series))
            summary.append(summary_row(name, control, limit_s, series))
            figures += [
                {"link": name, "congestion_control": control, "connections": count, "times_s": one.times_s}
                for count, one in series.items()
            ]
    table = Table("push, pull", HEADERS, rows)
    return Report("connections", about, [table], figures=figures, summary=summary, machine=machine())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=8, metavar="M", help="of the tensor, in MiB (default: 8)")


SUBJECT = Subject("connections", __doc__.splitlines()[0], connections, add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
