"""Steps of rows over links that have a rate, beside what their ids and rows take by themselves.

4 workers and 4 shards on hosts of their own (virtual_hosts.py). A step pulls the rows of 4,096 ids, pushes a gradient
for each and commits, one after the other, so that what goes to the shards and what comes back do not overlap. The
formula is that of bench.scaling: a link carries, of each id, 8 bytes and a gradient when it is pushed, 8 bytes when its
row is asked for, and the row, at the rate that one plain connection has when nobody else sends. What the first shard's
link carries is metered, and held against what it carries of a plain connection for as many bytes. Needs root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np

import psstore
from bench.far import Crew, crew
from bench.harness import Series, alternate
from bench.link_meter import Meter, meter
from bench.machine import CONGESTION_CONTROL
from bench.report import Cell, Table, three_digits
from bench.row_work import DIM, HYPERS, NUM_ROWS, gradients_of, id_sets
from bench.scaling_worker import LINK_BYTES, patiently_dialled
from bench.servers import PEER_PORT, TOKEN, peers, shards
from bench.virtual_hosts import VirtualHosts, why_not
from psstore.net.address import TcpAddress
from psstore.types import ID_BYTES

WORKERS = SHARDS = 4
NUM_IDS = 4096

RATE_MBIT = 20.0
"""Of a link each way: so slow that processors that nine processes share are idle most of the time."""

BURST_BYTES = 16 << 10
"""What a link carries at once after a pause: next to nothing of what a step has."""

ROW_BYTES = 4 * DIM

UP_BYTES = NUM_IDS * (2 * ID_BYTES + ROW_BYTES)
DOWN_BYTES = NUM_IDS * ROW_BYTES
"""Of ids and rows that a worker sends in a step, and gets."""

STEP, LINK = "step", "one_link"

HEADERS = (
    "workers, shards",
    "s a step: median (min–max)",
    "formula, s",
    "formula / time",
    "bytes to a shard, × plain",
    "bytes from it, × plain",
)


class Worker:
    """One of the four, in a process and a network of its own."""

    def __init__(self, rank: int, hosts: VirtualHosts) -> None:
        self._rank = rank
        self._hosts = hosts
        sets = id_sets(NUM_IDS, num_rows=NUM_ROWS)
        self._sets = cycle(sets[rank:] + sets[:rank])
        self._gradients = gradients_of(NUM_IDS)
        self._out = np.zeros_like(self._gradients)

    def join(self, url: str) -> None:
        self._link = patiently_dialled(TcpAddress(self._hosts.address(WORKERS), PEER_PORT))
        self._store = psstore.connect(url, rank=self._rank, num_workers=WORKERS, token=TOKEN, connect_timeout_s=30.0)
        self._store.create_table("t", dim=DIM, rule="adagrad")

    def one_link(self) -> None:
        """LINK_BYTES from rank 0 to the first shard's host, and nobody else sends."""
        if self._rank == 0:
            self._link.up(memoryview(bytes(LINK_BYTES)))

    def step(self) -> None:
        ids = next(self._sets)
        self._store.pull_rows("t", ids, out=self._out)
        self._store.push_rows("t", ids, self._gradients)
        self._store.commit(HYPERS)

    def leave(self) -> None:
        self._link.close()
        self._store.close()

    def ready(self) -> None:
        """Answered when what came before is done."""


@dataclass(frozen=True)
class Linked:
    """What steps took, and one of them moved by the first shard's link, by each byte of ids and rows."""

    series: Series
    formula_s: float
    came: float
    left: float
    plain: float
    """Bytes that the link carried for each of a plain connection's."""

    def row(self) -> list[Cell]:
        one = self.series
        times = "{} ({}–{})".format(*(three_digits(t) for t in (one.median, one.min, one.max)))
        bytes_of: list[Cell] = [self.came / self.plain, self.left / self.plain]
        return [f"{WORKERS}, {SHARDS}", times, self.formula_s, self.formula_s / one.median, *bytes_of]


@contextlib.contextmanager
def joined(rate_mbit: float) -> Iterator[tuple[Crew, Meter]]:
    """Workers of a store, and what meters the first shard's link."""
    with contextlib.ExitStack() as ends:
        hosts = VirtualHosts(
            WORKERS + SHARDS, rate_mbit=rate_mbit, burst_bytes=BURST_BYTES, congestion_control=CONGESTION_CONTROL
        )
        ends.enter_context(hosts)
        first_link = ends.enter_context(meter(hosts, WORKERS))
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, hosts)))
        workers.call("ready")
        ends.enter_context(peers(hosts, 1, first_host=WORKERS))
        workers.call("join", ends.enter_context(shards(hosts, SHARDS, first_host=WORKERS)))
        yield workers, first_link
        workers.call("leave")


def linked(*, rounds: int) -> Table:
    """Raises SystemExit where there can be no virtual hosts."""
    if (reason := why_not()) is not None:
        raise SystemExit(f"bench.rows --links: {reason}")
    with joined(RATE_MBIT) as (workers, first_link):
        step, plain = (first_link.during(workers.turn(what)) for what in (STEP, LINK))
        series = alternate({LINK: plain, STEP: step}, warm_up=2, rounds=rounds, progress="rows over links")
    assert step.up is not None, "a step is more than one look at the link"
    assert step.down is not None, "likewise"
    assert plain.up is not None, "likewise"
    share = WORKERS / SHARDS
    found = Linked(
        series[STEP],
        formula_s=series[LINK].median * (UP_BYTES + DOWN_BYTES) / LINK_BYTES,
        came=step.up.num_bytes / (share * UP_BYTES),
        left=step.down.num_bytes / (share * DOWN_BYTES),
        plain=plain.up.num_bytes / LINK_BYTES,
    )
    return Table("Links", HEADERS, [found.row()])
