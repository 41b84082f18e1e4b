"""A small model with every kind of parameter, and workers as threads of one process."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

import psstore
from psstore.torch import DistributedOptimizer
from psstore.torch.gradients import BUCKET_BYTES

OptimizerFactory = Callable[..., torch.optim.Optimizer]

JOIN_S = 60.0

DECOUPLED_ADAM: dict[str, OptimizerFactory] = (
    {"adam decoupled": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)}
    if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
    else {}
)
"""Where torch has it: 2.4 does not."""

WIDTH = 520
"""Features of each layer of `deep`, which fills a bucket alone."""


class Odd(nn.Module):
    """Matrices, vectors, a 0-d parameter, an empty one and one that is not contiguous."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> torch.Tensor:
            return (torch.rand(shape, generator=generator) - 0.5).to(dtype)

        self.first = nn.Parameter(weights(17, 5))
        self.transposed = nn.Parameter(weights(9, 17).t())
        self.bias = nn.Parameter(weights(9))
        self.scale = nn.Parameter(weights())
        self.empty = nn.Parameter(weights(0, 3))
        self.sometimes = nn.Parameter(weights(9))

    def forward(self, inputs: torch.Tensor, *, use_all: bool = True) -> torch.Tensor:
        hidden = torch.tanh(inputs @ self.first.t()) @ self.transposed + self.bias
        if use_all:
            hidden = hidden * self.sometimes
        return self.scale * hidden + self.empty.sum()


def deep(num_layers: int = 3, *, seed: int = 0) -> nn.Sequential:
    """Layers whose gradients are sent one by one."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)])
    assert all(weight.nbytes > BUCKET_BYTES for weight in model.parameters())
    return model


def num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def batches(count: int, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(6, 5, generator=generator).to(dtype)


def backward(model: nn.Module, inputs: torch.Tensor, *, use_all: bool = True) -> float:
    loss: torch.Tensor = model(inputs, use_all=use_all).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def assert_same_bits(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other), f"{name}: {one} is not {other}"


def wrap(optimizer: torch.optim.Optimizer, store: psstore.Store, model: nn.Module) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, store, named_parameters=model.named_parameters())


def distributed(model: nn.Module, store: psstore.Store, factory: OptimizerFactory) -> DistributedOptimizer:
    return wrap(factory(model.parameters()), store, model)


def in_threads(calls: Sequence[Callable[[], object]]) -> None:
    """All at once, each in a thread. Raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a worker hangs"
    if failures:
        raise failures[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0)


def on_each_worker(
    num_workers: int, work: Callable[[psstore.Store, int], None], *, shards: int = 1, mode: str = "sync"
) -> None:
    """Runs `work` in one thread per rank, on a store in this process."""

    def run(rank: int) -> None:
        with store.connect(rank=rank) as connection:
            work(connection, rank)

    with psstore.LocalStore(shards, workers=num_workers, mode=mode) as store:
        in_threads([partial(run, rank) for rank in range(num_workers)])
