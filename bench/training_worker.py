"""One of the workers of bench.training: its models, and the ways in which workers train them together.

Methods of the same name are called on all workers at once (far.py).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psstore
from bench.far import Hosts
from psstore.config import Transport
from psstore.torch import DistributedOptimizer

WORKERS = 2
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
    fused: bool = False
    """torch's optimizer takes its step in one pass."""


ALONE = Way("no communication", "alone", {}, exact=False)
DDP = Way("DDP, gloo", "ddp", {"gradient_as_bucket_view": True})
DDP_FUSED = Way("DDP, gloo, fused SGD", "ddp", {"gradient_as_bucket_view": True}, exact=False, fused=True)
"""Its steps are rounded otherwise in the last place."""
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

    def join(self, url: str, token: str) -> None:
        """The store, and DDP's group."""
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = self._hosts.interface
        where = f"tcp://{self._hosts.address(0)}:{RING_PORT}"
        dist.init_process_group("gloo", init_method=where, rank=self._rank, world_size=WORKERS)
        self._store = psstore.connect(
            url,
            rank=self._rank,
            num_workers=WORKERS,
            token=token,
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
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False, fused=way.fused
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
