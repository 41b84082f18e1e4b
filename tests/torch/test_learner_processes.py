"""A learner of two processes, by DistributedDataParallel or by fully_shard, beside one of one on the same batches.

The store and a second learner, of one process, are in the first process of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psstore
from psstore.errors import PsstoreError, StoreClosed, UsageError, WorkerLost
from psstore.torch import DiLoCo, learner_processes
from tests.torch.ddp_trainers import WAIT_S, DdpWorkers
from tests.torch.support import Odd, backward, batches, in_threads

STEPS = 12
CLOSE = 1e-6
MAX_NORM = 0.5

OPTIONS: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "merge": 0.5, "weight": "tokens"}

Weights = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor], object]


@pytest.fixture(scope="module")
def workers() -> Iterator[DdpWorkers]:
    with DdpWorkers() as workers:
        yield workers


def plain() -> nn.Module:
    """Parts of its last layer are not alike: three rows on two processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def plain_loss(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, store: psstore.Store | None, inputs: list[torch.Tensor], loss: Loss, **options: Any
) -> None:
    optimizer = DiLoCo(model, inner(model), store, max_norm=MAX_NORM, **{**OPTIONS, **options})
    for batch in inputs:
        optimizer.zero_grad()
        loss(model, batch)
        optimizer.count(len(batch))
        optimizer.step()
    optimizer.synchronize()


def both(rank: int, make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], loss: Loss) -> Weights:
    """What this process's learner has in the end; of the first also that of one process, as `plain …`."""
    first, second = list(batches(STEPS, seed=1)), [batch[:4] for batch in batches(STEPS, seed=2)]
    model = wrap(make())
    part = partial(train, model, inputs=[batch.chunk(2)[rank] for batch in first], loss=loss)
    if rank:
        part(store=None)
        return weights_of(model)
    alone = make()
    for learner, inputs in ((part, None), (partial(train, alone, loss=loss), first)):
        with psstore.LocalStore(2, workers=2) as local:
            stores = [local.connect(rank=number) for number in range(2)]
            told = {} if inputs is None else {"inputs": inputs}
            other = partial(train, make(), stores[1], second, loss)
            in_threads([partial(learner, store=stores[0], **told), other])
    return {**weights_of(model), **{f"plain {name}": value for name, value in weights_of(alone).items()}}


def weights_of(model: nn.Module) -> Weights:
    named = (model.module if isinstance(model, DistributedDataParallel) else model).named_parameters()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for name, one in named}


def with_ddp(rank: int) -> Weights:
    return both(rank, Odd, DistributedDataParallel, backward)


def with_fully_shard(rank: int) -> Weights:
    from torch.distributed.fsdp import fully_shard

    def cut(model: nn.Module) -> nn.Module:
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    return both(rank, plain, cut, plain_loss)


@pytest.mark.parametrize("script", [with_ddp, with_fully_shard])
def test_two_processes_are_one_learner(workers: DdpWorkers, script: Callable[[int], Weights]) -> None:
    """By its weight, too: tokens of both count, as those of the batches that one process sees whole."""
    first, second = workers.run(script)
    for name, value in second.items():
        assert torch.equal(first[name], value), "the processes differ"
        torch.testing.assert_close(value, first[f"plain {name}"], rtol=0.0, atol=CLOSE)


def said(rank: int, how: str) -> str:
    """The error that this process gets, by class and text."""
    model: nn.Module = Odd()
    options = dict(OPTIONS)
    if how != "no group" or rank == 0:
        model = DistributedDataParallel(model, init_sync=False)
    if how == "every":
        options["every"] += rank
    if how == "not finite":
        options.update(every=1, fragments=1, weight=1.0)
    with psstore.LocalStore() as local, patience(0.5 if how == "no group" else WAIT_S):
        store = local.connect() if rank == 0 or how == "two stores" else None
        try:
            optimizer = DiLoCo(model, inner(model), store, **options)
            backward(model, next(batches(1)))
            if how == "not finite" and rank:
                with torch.no_grad():
                    model.get_parameter("module.bias").fill_(float("nan"))
            if how == "closed" and store is not None:
                store.close()
            optimizer.step()
            optimizer.synchronize()
        except PsstoreError as error:
            return f"{type(error).__name__}: {error.message}"
    return "nothing"


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_processes, "PATIENCE_S", seconds)
        yield


@pytest.mark.parametrize(
    ("how", "kinds", "words"),
    [
        ("every", [UsageError, UsageError], "every=4 on its first process and 5 on its process 1"),
        ("two stores", [UsageError, UsageError], "process 1 of a learner has a store, too"),
        ("no group", [WorkerLost, UsageError], "a process of this learner is gone|store is None"),
        ("not finite", [UsageError, UsageError], "parameter 'bias' holds NaN or infinity"),
        ("closed", [StoreClosed, StoreClosed], "closed"),
    ],
)
def test_what_goes_wrong_in_one_process_is_said_in_all(
    workers: DdpWorkers, how: str, kinds: list[type], words: str
) -> None:
    for told, kind in zip(workers.run(partial(said, how=how)), kinds, strict=True):
        assert told.startswith(f"{kind.__name__}: ")
        assert re.search(words, told), told
