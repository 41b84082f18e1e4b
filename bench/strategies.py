"""A training step of two workers under each strategy, beside the same step without communication.

    python -m bench.strategies [--quick] [--json FILE]

Axes: model (the demo's, and 25 million parameters in 24 layers), strategy (the parameter server with 1 and 2 shards,
all-reduce by torch's DistributedDataParallel over gloo, model averaging every 8 steps). Two worker processes with a
thread each, TCP over loopback, fp32, SGD with momentum, 32 samples per worker and step.

Each strategy trains a model of its own for 8 steps in turn, all of them once per round, so that what else the machine
does slows all alike: the ratios to the step without communication, which is the peer, are the result. The limit of a
network is told by what a worker sends and receives per step, over the speed of its link; loopback has no such link,
but costs the cores copies, which on a machine with as many workers as cores the workers have to do without.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psstore
from bench.machine import machine
from bench.processes import store_server
from bench.report import write_json
from psstore.cli.demo.data import scikit_learn_digits
from psstore.cli.demo.worker import seeded_model
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.torch import DistributedOptimizer

NUM_WORKERS = 2
BATCH = 32
STEPS = 8
"""In a turn: a whole period of the averaging."""

LEARNING_RATE = 1e-4
"""So small that hundreds of steps on one batch stay finite."""


class Layers(nn.Module):
    """24 layers of 1024x1024: 25.2 million parameters, 101 MB, in tensors of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(24))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + 0.1 * torch.relu(layer(inputs))
        return inputs


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "demo": (lambda: seeded_model(scikit_learn_digits(), seed=0), (1, 8, 8)),
    "25M": (Layers, (1024,)),
}
"""How to make it, and the shape of a sample."""


@dataclass(frozen=True)
class Figure:
    """One strategy with one model; times in milliseconds per step."""

    model: str
    strategy: str
    median_ms: float
    min_ms: float
    max_ms: float
    ratio: float
    """Of the medians: how many times as long as without communication."""
    mb_per_step: float
    """Sent by a worker; it receives as much."""


# ---- the strategies ----


@dataclass(frozen=True)
class Strategy:
    name: str
    shards: int = 0
    """Of a store of its own; 0: it has none."""


ALONE = Strategy("no communication")
ALL_REDUCE = Strategy("all-reduce (DDP, gloo)")
SERVERS = (Strategy("ps, 1 shard", 1), Strategy("ps, 2 shards", 2))
AVERAGING = Strategy(f"averaging every {STEPS}, 1 shard", 1)
STRATEGIES = (ALONE, *SERVERS, ALL_REDUCE, AVERAGING)

EXACT = (*SERVERS, ALL_REDUCE)
"""With two workers, these take the same steps, bit for bit."""


class Trained:
    """A model under one strategy, in one worker."""

    def __init__(self, strategy: Strategy, model: str, store: psstore.Store | None) -> None:
        make, sample = MODELS[model]
        self.model = self._called = make()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False
        )
        self._strategy = strategy
        self._store = store
        if store is not None:
            mode: dict[str, Any] = {"mode": "average", "every": STEPS} if strategy == AVERAGING else {}
            self.optimizer = DistributedOptimizer(
                self.optimizer, store, named_parameters=self.model.named_parameters(), **mode
            )
        elif strategy == ALL_REDUCE:
            self._called = DistributedDataParallel(self.model)
        self._pushed_before = 0 if store is None else store.bytes_pushed
        self._num_steps = 0
        self._inputs = torch.randn(BATCH, *sample, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._called(self._inputs).square().mean().backward()
        self.optimizer.step()
        self._num_steps += 1

    @property
    def mb_per_step(self) -> float:
        """That this worker has sent: a ring all-reduce sends 2(W-1)/W of the gradients, a store says how much."""
        if self._store is not None:
            return 1e-6 * (self._store.bytes_pushed - self._pushed_before) / self._num_steps
        num_bytes = sum(4 * parameter.numel() for parameter in self.model.parameters())
        return 1e-6 * num_bytes * 2 * (NUM_WORKERS - 1) / NUM_WORKERS if self._strategy == ALL_REDUCE else 0.0


# ---- measuring ----


def turn(trained: Trained) -> float:
    """Milliseconds per step of the slowest worker, all having begun together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        trained.step()
    took = torch.tensor(1e3 * (time.perf_counter() - begin) / STEPS)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(model: str, urls: Mapping[Strategy, str], *, warm_up: int, rounds: int) -> list[Figure]:
    """In each worker alike."""
    with contextlib.ExitStack() as ends:
        stores = {
            strategy: ends.enter_context(psstore.connect(url, rank=dist.get_rank(), num_workers=NUM_WORKERS))
            for strategy, url in urls.items()
        }
        trained = {strategy: Trained(strategy, model, stores.get(strategy)) for strategy in STRATEGIES}
        times: dict[Strategy, list[float]] = {strategy: [] for strategy in STRATEGIES}
        for number in range(warm_up + rounds):
            for strategy, one in trained.items():
                took = turn(one)
                if number >= warm_up:
                    times[strategy].append(took)
        for strategy in EXACT[1:]:
            pairs = zip(trained[EXACT[0]].model.parameters(), trained[strategy].model.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), f"{strategy.name} trained something else"
    alone = statistics.median(times[ALONE])
    return [
        Figure(
            model=model,
            strategy=strategy.name,
            median_ms=statistics.median(found),
            min_ms=min(found),
            max_ms=max(found),
            ratio=statistics.median(found) / alone,
            mb_per_step=trained[strategy].mb_per_step,
        )
        for strategy, found in times.items()
    ]


def worker(
    rank: int,
    rendezvous: str,
    urls: Mapping[str, Mapping[Strategy, str]],
    counts: Mapping[str, int],
    results: mp.SimpleQueue[list[Figure]],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_WORKERS)
    for model in MODELS:
        figures = measure(model, urls[model], **counts)
        if rank == 0:
            results.put(figures)
    dist.destroy_process_group()


def run(counts: Mapping[str, int]) -> list[Figure]:
    """With a store for each model and strategy that needs one. Raises what a worker raised."""
    results: mp.SimpleQueue[list[Figure]] = mp.get_context("spawn").SimpleQueue()
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        urls = {
            model: {
                strategy: ends.enter_context(store_server("tcp", strategy.shards, workers=NUM_WORKERS))
                for strategy in STRATEGIES
                if strategy.shards
            }
            for model in MODELS
        }
        arguments = (str(Path(folder) / "rendezvous"), urls, counts, results)
        mp.spawn(worker, arguments, nprocs=NUM_WORKERS)  # type: ignore[attr-defined, no-untyped-call]
    return [figure for _ in MODELS for figure in results.get()]


# ---- showing ----


def show(figures: list[Figure]) -> None:
    print(f"{NUM_WORKERS} workers with a thread each, batch {BATCH}, TCP over loopback, fp32 SGD with momentum")
    print(", ".join(f"{name} {value}" for name, value in described().items()))
    print("| model | strategy | ms per step: median (min–max) | ratio | MB sent per worker and step |")
    print("|---|---|---|---|---|")
    for f in figures:
        print(
            f"| {f.model} | {f.strategy} | {f.median_ms:.1f} ({f.min_ms:.1f}–{f.max_ms:.1f})"
            f" | {f.ratio:.2f} | {f.mb_per_step:.1f} |"
        )


def described() -> dict[str, str | int]:
    return machine("torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    figures = run({"warm_up": 1, "rounds": 3} if arguments.quick else {"warm_up": 2, "rounds": 11})
    show(figures)
    if arguments.json:
        write_json(arguments.json, {"machine": described(), "figures": [asdict(figure) for figure in figures]})


if __name__ == "__main__":
    main()
