"""A training step of two workers, beside the same step without communication, over loopback and over slow links.

    python -m bench.training [--quick] [--part PART] [--transport T] [--rate MBIT] [--json FILE] [--plot FILE.png]

Models: a small convolutional network and a small transformer, fp32, SGD with momentum, one thread per worker. On one
host the store has one shard, and its process, the workers and the kernel's copying share the machine's cores; psstore
has the transport that `connect` finds by itself there, shared memory, and DDP, which has no other, TCP over loopback.
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
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psstore
from bench.command import Subject, run
from bench.far import Crew, Hosts, ThisHost, crew
from bench.harness import Series, alternate
from bench.machine import machine
from bench.report import Cell, Chart, Report, Table, three_digits
from bench.scaling import CONGESTION_CONTROL, TOKEN, shards
from bench.virtual_hosts import VirtualHosts, why_not
from psstore.config import Transport
from psstore.partition.slicing import SLICE_BYTES
from psstore.torch import DistributedOptimizer

WORKERS = 2
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

RING_PORT = 5900
LEARNING_RATE = 1e-3


class Convolutions(nn.Sequential):
    """Four convolutions and a linear layer on images of 32x32: 1.6 million parameters."""

    def __init__(self) -> None:
        widths = (3, 64, 128, 256, 512)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Flatten(), nn.Linear(512 * 4, 10))


class Transformer(nn.Module):
    """Four layers of width 192 on 64 tokens of 1,000: 2.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 192)
        layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.output = nn.Linear(192, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(self.layers(self.embedding(tokens)))
        return result


def _images(chance: torch.Generator) -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, generator=chance)


def _tokens(chance: torch.Generator) -> torch.Tensor:
    return torch.randint(1000, (2, 64), generator=chance)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]]] = {
    "convolutions": (Convolutions, _images),
    "transformer": (Transformer, _tokens),
}
"""How to make it, and a batch for it."""


@dataclass(frozen=True)
class Way:
    """How workers train together."""

    name: str
    kind: str
    """'alone', 'psstore' or 'ddp'."""
    options: Mapping[str, Any]
    exact: bool = True
    """All that are take the same steps."""


ALONE = Way("no communication", "alone", {}, exact=False)
DDP = Way("DDP, gloo", "ddp", {"gradient_as_bucket_view": True})
DEFAULT = Way("psstore", "psstore", {})
OVERLAPS = tuple(Way(f"psstore, overlap={how!r}", "psstore", {"overlap": how}) for how in ("none", "backward", "eager"))
COMPRESSED = tuple(
    Way(f"psstore, {codec}", "psstore", {"overlap": "backward", "compression": codec}, exact=False)
    for codec in ("bf16", "int8", "sign")
)


class Worker:
    """One of the workers, in a process of its own."""

    def __init__(self, rank: int, hosts: Hosts, transport: Transport) -> None:
        self._rank = rank
        self._hosts = hosts
        self._transport = transport
        self._trained: dict[str, _Trained] = {}

    def join(self, url: str) -> None:
        """The store, and DDP's group."""
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = self._hosts.interface
        where = f"tcp://{self._hosts.address(0)}:{RING_PORT}"
        dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=WORKERS)
        self._store = psstore.connect(
            url,
            rank=self._rank,
            num_workers=WORKERS,
            token=TOKEN,
            transport=self._transport,
            connect_timeout_s=30.0,
        )

    def make(self, model: str, ways: Sequence[Way]) -> int:
        """A model for each way; returns its number of bytes."""
        self._trained = {way.name: _Trained(model, way, self._store, self._rank) for way in ways}
        return 4 * sum(p.numel() for p in self._trained[ALONE.name].model.parameters())

    def steps(self, way: str, count: int) -> None:
        for _ in range(count):
            self._trained[way].step()

    def first_gradient_s(self, count: int) -> float:
        """How long after a step's beginning the first one is there, where nothing is sent."""
        trained = self._trained[ALONE.name]
        times_s = []
        for _ in range(count):
            begin = time.perf_counter()
            times_s.append(trained.step_seen() - begin)
        return statistics.median(times_s)

    def check(self) -> None:
        """Raises if two that are exact trained to different weights."""
        first, *others = (one for one in self._trained.values() if one.way.exact)
        for other in others:
            for ours, theirs in zip(first.model.parameters(), other.model.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{other.way.name} and {first.way.name} differ"

    def leave(self) -> None:
        self._store.close()
        dist.destroy_process_group()


class _Trained:
    """A model that is trained in one way."""

    def __init__(self, model: str, way: Way, store: psstore.Store, rank: int) -> None:
        make, batch = MODELS[model]
        torch.manual_seed(0)
        self.way = way
        self.model = self._called = make()
        self._batch = batch(torch.Generator().manual_seed(rank))
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False
        )
        if way.kind == "ddp":
            self._called = DistributedDataParallel(self.model, **way.options)
        elif way.kind == "psstore":
            named = self.model.named_parameters()
            name = f"{model}: {way.name}"
            self._optimizer = DistributedOptimizer(self._optimizer, store, named, name=name, **way.options)

    def step_seen(self) -> float:
        """Takes a step; returns when its first gradient was there."""
        seen_s: list[float] = []
        hooks = [
            one.register_post_accumulate_grad_hook(lambda _: seen_s.append(time.perf_counter()))  # type: ignore[no-untyped-call]
            for one in self.model.parameters()
        ]
        self.step()
        for hook in hooks:
            hook.remove()
        return seen_s[0]

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._called(self._batch).square().mean().backward()
        self._optimizer.step()


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
        token_file = Path(ends.enter_context(tempfile.TemporaryDirectory()), "token")
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        workers = ends.enter_context(crew(hosts, WORKERS, lambda rank: Worker(rank, hosts, transport)))
        workers.call("join", ends.enter_context(shards(hosts, num_shards, token_file, first_host=WORKERS)))
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
            found += measure(workers, "one host", None, (ALONE, DEFAULT, *OVERLAPS, DDP), arguments)
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
        ways = (ALONE, *OVERLAPS, DDP, *COMPRESSED)
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
