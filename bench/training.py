"""A training step of two workers, beside the same step without communication, over loopback and over slow links.

    python -m bench.training [--quick] [--part PART] [--transport T] [--rate MBIT] [--json FILE] [--plot FILE.png]

Models: a small convolutional network and a small transformer, fp32, SGD with momentum, one thread per worker. On one
host the store has one shard, and its process, the workers and the kernel's copying share the machine's cores; psstore
has the transport that `connect` finds by itself there, shared memory, and DDP, which has no other, TCP over loopback;
DDP has torch's optimizer as it comes, and fused, too.
Links with a rate are those of four hosts, two of them with a shard each, as virtual hosts (needs root): there
W = N = 2, so that psstore and a ring all-reduce send and receive the same bytes, the size of the model, and the limit
for both is the slower of computing and sending. Beside it is the chain of an eager step: nothing can be sent before the
first gradient is there, and when all is sent the last slice has to come back.

Each contestant trains a model of its own, all in turns, and its weights are held to the others' where they must be
alike: DDP takes the same steps.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from bench.command import Subject, run
from bench.far import Crew, Hosts, ThisHost, crew
from bench.harness import Series, alternate
from bench.machine import CONGESTION_CONTROL, machine
from bench.report import Cell, Chart, Report, Table, three_digits
from bench.servers import TOKEN, shards
from bench.training_worker import ALONE, COMPRESSED, DDP, DDP_FUSED, DEFAULT, MODELS, OVERLAPS, WORKERS, Way, Worker
from bench.virtual_hosts import VirtualHosts, why_not
from psstore.config import Transport
from psstore.partition.slicing import SLICE_BYTES

STEPS = 5
"""In a turn on one host. The first one finds the caches full of another contestant's model."""

STEPS_ON_LINKS = 2
"""In a turn there, where a step takes several times as long, and caches matter less."""

FIRST_GRADIENTS = 15
"""Steps by which it is found how long the first gradient takes."""

RATE_MBIT = 250.0
"""Sending the model then takes longer than a step's work takes two cores, the kernel's for the links included: it is
the links that are measured. At 800 Mbit/s it is the processor."""

PARTS = ("loopback", "links")

# ---- measuring ----


@dataclass(frozen=True)
class Found:
    """One way to train one model over one network."""

    network: str
    model: str
    way: Way
    series: Series
    """Of turns."""
    steps: int
    """In a turn."""
    alone: Series
    ddp_s: float
    num_bytes: int
    """In float32, of the gradients and values that the workers sent and received in a turn."""
    limit_s: float
    """For a turn: the slower of computing and sending."""
    chain_s: float | None
    """For a turn of eager steps over links: until there is a gradient, sending, and the last slice's way back."""

    @property
    def cpu_s_per_gb(self) -> float | None:
        """Beyond what computing takes."""
        if self.way.kind == "alone":
            return None
        return (self.series.cpu_s - self.alone.cpu_s) / self.num_bytes * 1e9


def measure(
    workers: Crew, network: str, link_bytes_s: float | None, ways: Sequence[Way], arguments: argparse.Namespace
) -> list[Found]:
    found = []
    quick, steps = arguments.quick, STEPS_ON_LINKS if link_bytes_s else STEPS
    for model in arguments.model or MODELS:
        num_bytes = workers.call("make", model, ways)[0]
        turns = {way.name: workers.turn("steps", way.name, steps) for way in ways}
        series = alternate(turns, warm_up=1 if quick else 2, rounds=3 if quick else 9, progress=f"{model}, {network}")
        workers.call("check")
        alone, ddp_s = series[ALONE.name], series[DDP.name].median
        first_s = max(workers.call("first_gradient_s", FIRST_GRADIENTS))
        limit_s, chain_s = alone.median, None
        if link_bytes_s is not None:
            limit_s = max(alone.median, steps * num_bytes / link_bytes_s)
            chain_s = steps * (first_s + (num_bytes + SLICE_BYTES) / link_bytes_s)
        for way in ways:
            chain = chain_s if way.options.get("overlap") == "eager" else None
            moved = 2 * WORKERS * steps * num_bytes
            found.append(Found(network, model, way, series[way.name], steps, alone, ddp_s, moved, limit_s, chain))
    return found


@contextlib.contextmanager
def joined(hosts: Hosts, *, num_shards: int, transport: Transport) -> Iterator[Crew]:
    """The workers, and a store that they have joined."""
    with contextlib.ExitStack() as ends:
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, hosts, transport)))
        url = ends.enter_context(shards(hosts, num_shards, first_host=WORKERS))
        workers.call("join", url, TOKEN)
        yield workers
        workers.call("leave")


PAYLOAD_SHARE = 0.957
"""Of a link's rate: TCP over Ethernet, 1,448 bytes of 1,514 in each packet. bench.scaling measures 0.95 to 0.96."""


def measure_all(arguments: argparse.Namespace) -> tuple[list[Found], list[str]]:
    """And what was not measured, and why."""
    parts = arguments.part or PARTS
    found: list[Found] = []
    if "loopback" in parts:
        with joined(ThisHost(), num_shards=1, transport=arguments.transport) as workers:
            found += measure(workers, "one host", None, (ALONE, DEFAULT, *OVERLAPS, DDP, DDP_FUSED), arguments)
    if "links" not in parts:
        return found, []
    if reason := why_not():
        return found, [f"links with a rate: {reason}"]
    rate = arguments.rate
    link_bytes_s = PAYLOAD_SHARE * rate * 1e6 / 8
    with (
        VirtualHosts(2 * WORKERS, rate_mbit=rate, congestion_control=CONGESTION_CONTROL) as hosts,
        joined(hosts, num_shards=WORKERS, transport="tcp") as workers,
    ):
        ways = (ALONE, *OVERLAPS, DDP, DDP_FUSED, *COMPRESSED)
        found += measure(workers, f"{rate:g} Mbit/s", link_bytes_s, ways, arguments)
    return found, []


# ---- showing ----

HEADERS = (
    "network",
    "model",
    "who",
    "ms per step: median (min–max)",
    "processor ms",
    "CPU s per GB",
    "× no communication",
    "× limit",
    "× chain",
    "× DDP's rate",
)


def table(found: Sequence[Found]) -> Table:
    return Table("one step", HEADERS, [_row(one) for one in found])


def _row(one: Found) -> list[Cell]:
    median, low, high = (three_digits(1e3 * t / one.steps) for t in (one.series.median, one.series.min, one.series.max))
    return [
        one.network,
        one.model,
        f"**{one.way.name}**" if one.way.kind == "psstore" else one.way.name,
        f"{median} ({low}–{high})",
        three_digits(1e3 * one.series.cpu_s / one.steps),
        one.cpu_s_per_gb,
        one.series.median / one.alone.median,
        one.series.median / one.limit_s,
        None if one.chain_s is None else one.series.median / one.chain_s,
        one.ddp_s / one.series.median,
    ]


def charts(found: Sequence[Found]) -> list[Chart]:
    groups: dict[str, dict[str, float]] = {}
    for one in found:
        groups.setdefault(f"{one.model}, {one.network}", {})[one.way.name] = 1e3 * one.series.median / one.steps
    return [Chart(name="", title="one step of two workers", unit="ms", series=groups)]


def training(arguments: argparse.Namespace) -> Report:
    found, notes = measure_all(arguments)
    return Report(
        subject="training",
        about=f"A step of {WORKERS} workers with a thread each, fp32, SGD with momentum. The limit is the step without"
        " communication, or on links with a rate what sending the model once takes, if that is longer. The chain of an"
        " eager step: computing until there is a gradient, sending the model, and the last slice's way back. Processor"
        " time is that of all processes; on a host with two cores a step can't take less than half of it. CPU s per GB:"
        " what is beyond the step without communication, per 10⁹ bytes of gradients and values in float32. Connections"
        f" on links with a rate are under {CONGESTION_CONTROL}.",
        tables=[table(found)],
        notes=notes,
        charts=charts(found),
        figures=[
            {
                "network": one.network,
                "model": one.model,
                "who": one.way.name,
                "steps": one.steps,
                "times_s": one.series.times_s,
                "cpu_times_s": one.series.cpu_times_s,
                "limit_s": one.limit_s,
                "chain_s": one.chain_s,
            }
            for one in found
        ],
        summary=[
            [
                "training",
                f"{one.model}, {one.network}: {one.way.name}",
                f"{three_digits(1e3 * one.series.median / one.steps)} ms",
                one.series.median / one.limit_s,
                one.series.median / one.ddp_s,
            ]
            for one in found
            if one.way.kind == "psstore"
        ],
        machine=machine("torch"),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument(
        "--transport", choices=get_args(Transport), default="auto", help="of psstore on one host (default: auto)"
    )
    parser.add_argument(
        "--rate", type=float, default=RATE_MBIT, metavar="MBIT", help=f"of slow links (default: {RATE_MBIT:g} Mbit/s)"
    )


SUBJECT = Subject(
    name="training",
    summary="A training step of two workers, beside DDP and the same step without communication.",
    run=training,
    add_options=add_options,
    isolated=False,
)

if __name__ == "__main__":
    run(SUBJECT)
