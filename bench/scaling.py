"""Iteration time with 8 workers and 1 to 8 shards, each on a host of its own whose link has a rate.

    python -m bench.scaling [--quick] [--shards 1,2,4,8] [--rate MBIT] [--megabytes M] [--json FILE] [--plot FILE.png]

Hosts are network namespaces; each one's link carries `--rate` each way, behind a queue as a switch's port has it. It
has to be slow enough for the processor to be idle half the time, so that the network is seen and not the cores that
17 processes share: without `--rate` the bench begins with FIRST_RATE_MBIT and halves it until it is. Needs root.

Contestants, in turns, with a model of M bytes, W workers, N shards and R bytes of payload per second and link:

- late commit: push all, commit, pull all. Limit: the links, once for each way, 2 max(M/R, WM/NR).
- early commit: commit first, then push in buckets while what has become of them comes back, as overlap="eager" does.
  Limit: the links are used both ways at once, max(M/R, WM/NR).
- plain sockets in both patterns, each worker to each shard: what TCP makes of these links.
- gloo's ring all-reduce among the workers, over the same links. Limit: 2(W-1)/W M/R.

R is what one plain connection carries over one link when nobody else sends. The model has `--megabytes` for each shard,
so that a turn takes as long with any number of them, and tensors are of 16 KiB: all is smaller than in a data centre by
the factor by which the links are slower. What the first shard's link carries is metered: what a round takes longer than
its limit is more bytes than payload, links that are not full, or a way back that begins late.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from bench.command import Subject, run
from bench.far import Crew, crew
from bench.harness import Series, Took, Turn, alternate
from bench.link_meter import Carried, Meter, meter
from bench.machine import CONGESTION_CONTROL, machine
from bench.report import Cell, Chart, Report, Table, three_digits
from bench.scaling_worker import LINK_BYTES, WORKERS, Worker
from bench.servers import PEER_PORT, TOKEN, peers, shards
from bench.virtual_hosts import VirtualHosts, why_not

FIRST_RATE_MBIT = 80.0
LEAST_IDLE = 0.5
"""Of the processors, with all that the bench runs, while a round is committed early."""

BURST_BYTES = 16 << 10
"""What a link carries at once after a pause: a slice."""


# ---- measuring ----


@dataclass(frozen=True)
class Found:
    """One contestant with one number of shards."""

    who: str
    num_shards: int
    series: Series
    limit_s: float
    num_bytes: int
    """Payload that the workers sent and received in one turn."""
    idle: float
    """What the machine's processors were idle of the time."""
    busy: float
    """What this bench's processes used of the processors' time."""
    alone_bytes_s: float
    """At which the link carries one plain connection."""
    up: Carried | None
    """To the first shard, in the last turn."""
    down: Carried | None

    @property
    def ratio(self) -> float:
        return self.series.median / self.limit_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.series.cpu_s / self.num_bytes * 1e9


LINK = "one link"
LATE, EARLY = "psstore, late commit", "psstore, early commit"
OURS = (LATE, EARLY)
METHODS = {
    LATE: "late",
    EARLY: "early",
    "plain sockets, up, then down": "raw_in_sequence",
    "plain sockets, both ways at once": "raw_both_ways",
    "gloo, ring all-reduce": "ring",
}
BOTH_WAYS = (EARLY, "plain sockets, both ways at once")
RING = "gloo, ring all-reduce"


def limit_s(who: str, num_shards: int, link_s: float) -> float:
    """`link_s`: M/R, what the model takes over one link."""
    if who == RING:
        return 2 * (WORKERS - 1) / WORKERS * link_s
    return (1 if who in BOTH_WAYS else 2) * max(1.0, WORKERS / num_shards) * link_s


def moved_bytes(who: str, model_bytes: int) -> int:
    """By all workers in a turn, both ways."""
    return 4 * (WORKERS - 1) * model_bytes if who == RING else 2 * WORKERS * model_bytes


class Idle:
    """Of the machine's processors, turn by turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.shares: list[float] = []

    def __call__(self) -> float | Took | None:
        before = self._times()
        took = self._turn()
        total, idle = (now - then for now, then in zip(self._times(), before, strict=True))
        self.shares.append(idle / total)
        return took

    @staticmethod
    def _times() -> tuple[int, int]:
        """All, and idle: proc(5), the first line of /proc/stat."""
        times = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(times), times[3] + times[4]


class Site:
    """Hosts, the workers on them, and shards as they are needed."""

    def __init__(self, hosts: VirtualHosts, workers: Crew, meter: Meter, *, rate_mbit: float) -> None:
        self.hosts = hosts
        self._meter = meter
        self.rate_mbit = rate_mbit
        self.workers = workers

    @contextlib.contextmanager
    def joined(self, num_shards: int, num_bytes: int) -> Iterator[None]:
        """Workers have a model of so many bytes, a store of so many shards, and a peer of plain sockets beside each."""
        with (
            peers(self.hosts, num_shards, first_host=WORKERS),
            shards(self.hosts, num_shards, first_host=WORKERS) as url,
        ):
            self.workers.call("take_model", num_bytes, num_shards)
            self.workers.call("dial_peers", PEER_PORT)
            self.workers.call("join_store", url, TOKEN)
            self.workers.call("early")  # which finds out how far pushes may run ahead
            yield
            self.workers.call("leave_store")
            self.workers.call("hang_up")

    def measure(self, num_shards: int, num_bytes: int, *, warm_up: int, rounds: int) -> list[Found]:
        metered = {
            who: self._meter.during(self.workers.turn(method)) for who, method in {LINK: "one_link", **METHODS}.items()
        }
        turns = {who: Idle(turn) for who, turn in metered.items()}
        series = alternate(turns, warm_up=warm_up, rounds=rounds, progress=f"{num_shards} shards")
        link_s = series.pop(LINK).median * num_bytes / LINK_BYTES
        alone = metered[LINK].up
        return [
            Found(
                who,
                num_shards,
                one,
                limit_s(who, num_shards, link_s),
                moved_bytes(who, num_bytes),
                mean(turns[who].shares[warm_up:]),
                busy(one),
                alone.middle_bytes_s if alone else math.nan,
                metered[who].up,
                metered[who].down,
            )
            for who, one in series.items()
        ]

    def find_rate(self) -> None:
        """Halves the rate until the processors are idle enough."""
        while busy(alternate({EARLY: self.workers.turn("early")}, warm_up=0, rounds=1)[EARLY]) > 1 - LEAST_IDLE:
            self.rate_mbit /= 2
            self.hosts.set_rate(self.rate_mbit)


def busy(series: Series) -> float:
    """The part of all processors' time that was used."""
    return series.cpu_s / series.median / (os.cpu_count() or 1)


def measure_all(arguments: argparse.Namespace) -> tuple[list[Found], float]:
    """Also: the rate in Mbit/s."""
    found: list[Found] = []
    rate = arguments.rate or FIRST_RATE_MBIT
    with contextlib.ExitStack() as ends:
        hosts = VirtualHosts(
            2 * WORKERS, rate_mbit=rate, burst_bytes=BURST_BYTES, congestion_control=CONGESTION_CONTROL
        )
        ends.enter_context(hosts)
        first_link = ends.enter_context(meter(hosts, WORKERS))
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, hosts)))
        workers.call("ready")
        workers.call("join_ring")
        site = Site(hosts, workers, first_link, rate_mbit=rate)
        for num_shards in sorted(arguments.shards, reverse=True):  # with the most work for the processors first
            num_bytes = int(num_shards * arguments.megabytes * (1 << 20))
            with site.joined(num_shards, num_bytes):
                if not arguments.rate and not found:
                    site.find_rate()
                rounds = 1 if arguments.quick else 3
                found = site.measure(num_shards, num_bytes, warm_up=0 if arguments.quick else 1, rounds=rounds) + found
        return found, site.rate_mbit


# ---- showing ----

HEADERS = (
    "shards",
    "who",
    "s: median (min–max)",
    "limit, s",
    "× limit",
    "× ring",
    "link's bytes by payload's: up, down",
    "its rate by one connection's: up, down",
    "way back begins, s",
    "CPU s per GB",
    "processors used, %",
    "idle, %",
)


def table(found: Sequence[Found]) -> Table:
    rings = {one.num_shards: one.series.median for one in found if one.who == RING}
    return Table("one iteration", HEADERS, [_row(one, rings) for one in found])


def _row(one: Found, rings: Mapping[int, float]) -> list[Cell]:
    median, low, high = (three_digits(time) for time in (one.series.median, one.series.min, one.series.max))
    return [
        str(one.num_shards),
        f"**{one.who}**" if one.who in OURS else one.who,
        f"{median} ({low}–{high})",
        one.limit_s,
        one.ratio,
        one.series.median / rings[one.num_shards],
        *_link_cells(one),
        one.cpu_s_per_gb,
        100 * one.busy,
        100 * one.idle,
    ]


def _link_cells(one: Found) -> list[Cell]:
    """Of who has shards."""
    if one.who == RING or one.up is None or one.down is None:
        return [None, None, None]
    payload = one.num_bytes / 2 / one.num_shards  # each way
    return [
        ", ".join(three_digits(way.num_bytes / payload) for way in (one.up, one.down)),
        ", ".join(three_digits(way.middle_bytes_s / one.alone_bytes_s) for way in (one.up, one.down)),
        one.down.begins_s,
    ]


def summary(found: Sequence[Found]) -> list[list[Cell]]:
    rings = {one.num_shards: one.series.median for one in found if one.who == RING}
    return [
        [
            "scaling",
            f"{one.num_shards} shards: {one.who}",
            f"{three_digits(one.series.median)} s",
            one.ratio,
            one.series.median / rings[one.num_shards],
        ]
        for one in found
        if one.who in OURS
    ]


def chart(found: Sequence[Found]) -> Chart:
    lines: dict[str, dict[str, float]] = {}
    for one in found:
        lines.setdefault(one.who, {})[str(one.num_shards)] = one.series.median
        if one.who in (LATE, EARLY):
            lines.setdefault(f"limit, {one.who.partition(', ')[2]}", {})[str(one.num_shards)] = one.limit_s
    title = f"one iteration, {WORKERS} workers, links with a rate"
    return Chart(name="", title=title, unit="seconds", series=lines, kind="lines", x_axis="shards")


def scaling(arguments: argparse.Namespace) -> Report:
    described = machine("torch")
    if reason := why_not():
        return Report("scaling", "", [], notes=[f"not run: {reason}"], machine=described)
    found, rate = measure_all(arguments)
    chosen = "as asked for" if arguments.rate else f"at which the processors are idle {LEAST_IDLE:.0%} of the time"
    about = (
        f"{WORKERS} workers and N shards on hosts of their own, a model of {arguments.megabytes:g} MiB per shard in"
        f" 16-KiB tensors, links of {rate:g} Mbit/s each way ({chosen}), all connections under {CONGESTION_CONTROL}."
        " Limits are those of the links, at the rate that one plain connection gets. Of the first shard's link: what it"
        " carried by what there was to carry, and how fast the middle nine tenths of that went. Used: what of the"
        " processors this bench's processes used. Idle: what nobody did."
    )
    figures = [
        {
            "who": one.who,
            "shards": one.num_shards,
            "times_s": one.series.times_s,
            "limit_s": one.limit_s,
            "num_bytes": one.num_bytes,
            "idle": one.idle,
            "rate_mbit": rate,
            "alone_bytes_s": one.alone_bytes_s,
            "up": one.up and asdict(one.up),
            "down": one.down and asdict(one.down),
            "cpu_times_s": one.series.cpu_times_s,
        }
        for one in found
    ]
    return Report(
        "scaling",
        about,
        [table(found)],
        charts=[chart(found)],
        figures=figures,
        summary=summary(found),
        machine=described,
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=_numbers, default=[1, 2, 4, 8], metavar="N,N,…", help="default: 1,2,4,8")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="of each link (default: found by itself)")
    parser.add_argument(
        "--megabytes", type=float, default=1.0, metavar="M", help="of the model, in MiB per shard (default: 1)"
    )


SUBJECT = Subject(
    name="scaling",
    summary="Iteration time with 8 workers and 1 to 8 shards over links that have a rate.",
    run=scaling,
    add_options=add_options,
    isolated=False,
)

if __name__ == "__main__":
    run(SUBJECT)
