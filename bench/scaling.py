"""Iteration time with 8 workers and 1 to 8 shards, each on a host of its own whose link has a rate.

    python -m bench.scaling [--quick] [--shards 1,2,4,8] [--rate MBIT] [--megabytes M] [--json FILE] [--plot FILE.png]

Hosts are network namespaces; each one's link carries `--rate` each way, behind a queue as a switch's port has it. It
should be slow enough for the processor to be idle half the time, so that the network is seen and not the cores that
17 processes share: the last column tells whether it was. Needs root.

Contestants, in turns, with a model of M bytes, W workers, N shards and R bytes of payload per second and link:

- late commit: push all, commit, pull all. Limit: the links, once for each way, 2 max(M/R, WM/NR).
- early commit: commit first, then push in buckets while what has become of them comes back, as overlap="eager" does.
  Limit: the links are used both ways at once, max(M/R, WM/NR).
- early commit, paced: a bucket is not pushed before the third one before it has come back. What TCP gives the fast
  workers is of no use before the slow ones have sent the same; so none runs ahead of the others.
- plain sockets in both patterns, each worker to each shard: what TCP makes of these links.
- gloo's ring all-reduce among the workers, over the same links. Limit: 2(W-1)/W M/R.

R is what one plain connection carries over one link when nobody else sends. Tensors are of 64 KiB: M and the slices
are smaller than a real model's by the same factor as the links are slower than a data centre's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.distributed as dist

import psstore
from bench.command import Subject, run
from bench.far import Crew, Hosts, crew
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.report import Cell, Chart, Report, Table, three_digits
from bench.virtual_hosts import VirtualHosts, why_not
from psstore.client.store import Store
from psstore.errors import StoreUnreachable
from psstore.net.address import TcpAddress
from psstore.net.yardstick import RawLinks
from psstore.types import TensorSpec

WORKERS = 8
TENSOR_ELEMS = 16 << 10
BUCKET_TENSORS = 8
"""Pushed and pulled together: one for each shard where there are most."""

PACED_BUCKETS = 3

STORE_PORT, PEER_PORT, RING_PORT = 5700, 5800, 5900

TOKEN = secrets.token_hex(16)
HYPERS = {"lr": 1e-3}
CONGESTION_CONTROL = "cubic"


class Worker:
    """One of the workers, in the process and the network that it has to itself."""

    def __init__(self, rank: int, num_bytes: int, hosts: VirtualHosts) -> None:
        num_tensors = num_bytes // (4 * TENSOR_ELEMS)
        self._rank = rank
        self._hosts = hosts
        self._flat = np.full((num_tensors, TENSOR_ELEMS), rank + 1, np.float32)
        self._into = np.zeros((num_tensors, TENSOR_ELEMS), np.float32)
        self._names = [f"t{index}" for index in range(num_tensors)]
        self._gradients = dict(zip(self._names, self._flat, strict=True))
        self._parameters = dict(zip(self._names, self._into, strict=True))
        self._rounds = 0
        self._store: Store | None = None

    # ---- psstore ----

    def join_store(self, url: str) -> None:
        self._store = psstore.connect(url, rank=self._rank, num_workers=WORKERS, token=TOKEN, connect_timeout_s=30.0)
        specs = [TensorSpec(name=name, shape=(TENSOR_ELEMS,), rule="sgd") for name in self._names]
        self._store.create_many(specs)
        self._rounds = 0

    def leave_store(self) -> None:
        """Raises if the parameters are not what so many steps make of them."""
        expected = -HYPERS["lr"] * self._rounds * (WORKERS + 1) / 2
        assert np.allclose(self._into, expected, rtol=1e-3), f"{self._into.flat[0]} after {self._rounds} rounds"
        self._joined.close()

    def late(self) -> None:
        store = self._joined
        store.push_many(self._gradients)
        store.commit(HYPERS)
        store.pull_many(self._names, out=list(self._parameters.values()))
        self._rounds += 1

    def early(self) -> None:
        self._early(ahead=len(self._names))

    def paced(self) -> None:
        self._early(ahead=PACED_BUCKETS)

    def _early(self, *, ahead: int) -> None:
        """`ahead`: buckets that may be pushed before the first of them has come back."""
        store = self._joined
        store.start_commit(HYPERS, present=self._names, early=True).result()
        buckets = [self._names[i : i + BUCKET_TENSORS] for i in range(0, len(self._names), BUCKET_TENSORS)]
        pulls = [store.start_pull_many(names, out=[self._parameters[name] for name in names]) for names in buckets]
        pushes = []
        for index, names in enumerate(buckets):
            if index >= ahead:
                pulls[index - ahead].result()
            pushes.append(store.start_push_many({name: self._gradients[name] for name in names}))
        for push in pushes:
            push.result()
        finish = store.start_finish()
        for pull in pulls:
            pull.result()
        finish.result()
        self._rounds += 1

    @property
    def _joined(self) -> Store:
        assert self._store is not None, "join_store comes first"
        return self._store

    # ---- plain sockets ----

    def dial_peers(self, num_shards: int) -> None:
        peers = [TcpAddress(self._hosts.address(WORKERS + shard), PEER_PORT) for shard in range(num_shards)]
        self._ups, self._downs = ([_patiently_dialled(peer) for peer in peers] for _ in range(2))
        self._pool = ThreadPoolExecutor(2 * num_shards)

    def hang_up(self) -> None:
        for links in (*self._ups, *self._downs):
            links.close()
        self._pool.shutdown()

    def one_link(self) -> None:
        """All of the model from rank 0 to the first shard's host, and nobody else sends."""
        if self._rank == 0:
            self._ups[0].up(self._flat.reshape(-1).view(np.uint8).data)

    def raw_in_sequence(self) -> None:
        _wait(self._move_up())
        _wait(self._move_down())

    def raw_both_ways(self) -> None:
        _wait([*self._move_up(), *self._move_down()])

    def _move_up(self) -> list[Callable[[], None]]:
        parts = np.array_split(self._flat.reshape(-1).view(np.uint8), len(self._ups))
        return [self._pool.submit(links.up, part.data).result for links, part in zip(self._ups, parts, strict=True)]

    def _move_down(self) -> list[Callable[[], None]]:
        parts = np.array_split(np.empty(self._flat.nbytes, np.uint8), len(self._downs))
        return [self._pool.submit(links.down, part.data).result for links, part in zip(self._downs, parts, strict=True)]

    # ---- gloo ----

    def join_ring(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        where = f"tcp://{self._hosts.address(0)}:{RING_PORT}"
        dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=WORKERS)
        self._reduced = torch.ones(self._flat.size)

    def ring(self) -> None:
        dist.all_reduce(self._reduced)

    def ready(self) -> None:
        """Answered when what came before is done, everywhere."""


def _wait(results: Sequence[Callable[[], None]]) -> None:
    for result in results:
        result()


def _patiently_dialled(peer: TcpAddress, patience_s: float = 20.0) -> RawLinks:
    """It may be starting still."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return RawLinks(peer, 1)
        except StoreUnreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


# ---- servers ----


@contextlib.contextmanager
def shards(hosts: Hosts, count: int, token_file: Path, *, first_host: int) -> Iterator[str]:
    """A store with a shard on each of so many hosts, for as many workers as there are hosts before them. Yields its
    URL; it may be starting still."""
    at = [f"{hosts.address(first_host + shard)}:{STORE_PORT + count}" for shard in range(count)]
    told = ["--shards-at", ",".join(at), "--workers", str(first_host), "--token-file", str(token_file)]
    command = [sys.executable, "-m", "psstore.cli.server", *told, "--log-level", "error", "--shard-index"]
    with contextlib.ExitStack() as ends:
        for shard in range(count):
            ends.enter_context(_running(hosts.on(first_host + shard, [*command, str(shard)])))
        yield f"ps://{at[0]}"


@contextlib.contextmanager
def peers(hosts: Hosts, count: int, *, first_host: int) -> Iterator[None]:
    """A peer of plain sockets on each host of a shard."""
    with contextlib.ExitStack() as ends:
        for host in range(first_host, first_host + count):
            address = TcpAddress(hosts.address(host), PEER_PORT)
            command = [sys.executable, "-m", "psstore.cli.main", "bench", "--serve", str(address)]
            ends.enter_context(_running(hosts.on(host, command)))
        yield


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# ---- measuring ----


@dataclass(frozen=True)
class Found:
    """One contestant with one number of shards."""

    who: str
    num_shards: int
    series: Series
    limit_s: float
    idle: float
    """What the machine's processors were idle of the time."""

    @property
    def ratio(self) -> float:
        return self.series.median / self.limit_s


LATE, EARLY, PACED = "psstore, late commit", "psstore, early commit", "psstore, early commit, paced"
OURS = (LATE, EARLY, PACED)
METHODS = {
    LATE: "late",
    EARLY: "early",
    PACED: "paced",
    "plain sockets, up, then down": "raw_in_sequence",
    "plain sockets, both ways at once": "raw_both_ways",
    "gloo, ring all-reduce": "ring",
}
BOTH_WAYS = (EARLY, PACED, "plain sockets, both ways at once")
RING = "gloo, ring all-reduce"


def limit_s(who: str, num_shards: int, link_s: float) -> float:
    """`link_s`: M/R, what the model takes over one link."""
    if who == RING:
        return 2 * (WORKERS - 1) / WORKERS * link_s
    return (1 if who in BOTH_WAYS else 2) * max(1.0, WORKERS / num_shards) * link_s


class Idle:
    """Of the machine's processors, turn by turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.shares: list[float] = []

    def __call__(self) -> float | None:
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


def measure(workers: Crew, num_shards: int, *, warm_up: int, rounds: int) -> list[Found]:
    turns = {who: Idle(workers.turn(method)) for who, method in {"link": "one_link", **METHODS}.items()}
    series = alternate(turns, warm_up=warm_up, rounds=rounds, progress=f"{num_shards} shards")
    link_s = series.pop("link").median
    return [
        Found(who, num_shards, one, limit_s(who, num_shards, link_s), mean(turns[who].shares[warm_up:]))
        for who, one in series.items()
    ]


def measure_all(arguments: argparse.Namespace) -> list[Found]:
    num_bytes = arguments.megabytes << 20
    found: list[Found] = []
    with contextlib.ExitStack() as ends:
        hosts = VirtualHosts(2 * WORKERS, rate_mbit=arguments.rate, congestion_control=CONGESTION_CONTROL)
        ends.enter_context(hosts)
        token_file = Path(ends.enter_context(tempfile.TemporaryDirectory()), "token")
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, num_bytes, hosts)))
        workers.call("ready")
        workers.call("join_ring")
        for num_shards in arguments.shards:
            with (
                peers(hosts, num_shards, first_host=WORKERS),
                shards(hosts, num_shards, token_file, first_host=WORKERS) as url,
            ):
                workers.call("dial_peers", num_shards)
                workers.call("join_store", url)
                rounds = 1 if arguments.quick else 3
                found += measure(workers, num_shards, warm_up=0 if arguments.quick else 1, rounds=rounds)
                workers.call("leave_store")
                workers.call("hang_up")
    return found


# ---- showing ----

HEADERS = ("shards", "who", "s: median (min–max)", "limit, s", "× limit", "× ring", "processors idle, %")


def table(found: Sequence[Found]) -> Table:
    rings = {one.num_shards: one.series.median for one in found if one.who == RING}
    return Table("one iteration", HEADERS, [_row(one, rings) for one in found])


def _row(one: Found, rings: Mapping[int, float]) -> list[str | float]:
    median, low, high = (three_digits(time) for time in (one.series.median, one.series.min, one.series.max))
    return [
        str(one.num_shards),
        f"**{one.who}**" if one.who in OURS else one.who,
        f"{median} ({low}–{high})",
        one.limit_s,
        one.ratio,
        one.series.median / rings[one.num_shards],
        100 * one.idle,
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
    return Chart(name="scaling", title=title, unit="seconds", series=lines, kind="lines", x_axis="shards")


def scaling(arguments: argparse.Namespace) -> Report:
    about = (
        f"{WORKERS} workers and N shards on hosts of their own, a model of {arguments.megabytes} MiB in 64-KiB tensors,"
        f" links of {arguments.rate:g} Mbit/s each way, all connections under {CONGESTION_CONTROL}. Limits are those of"
        " the links, at the rate that one plain connection gets."
    )
    described = machine("torch")
    if reason := why_not():
        return Report("scaling", about, [], notes=[f"not run: {reason}"], machine=described)
    found = measure_all(arguments)
    figures = [
        {
            "who": one.who,
            "shards": one.num_shards,
            "times_s": one.series.times_s,
            "limit_s": one.limit_s,
            "idle": one.idle,
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
    parser.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="of each link (default: 100 Mbit/s)")
    parser.add_argument("--megabytes", type=int, default=8, metavar="M", help="of the model, in MiB (default: 8)")


SUBJECT = Subject(
    name="scaling",
    summary="Iteration time with 8 workers and 1 to 8 shards over links that have a rate.",
    run=scaling,
    add_options=add_options,
    isolated=False,
)

if __name__ == "__main__":
    run(SUBJECT)
