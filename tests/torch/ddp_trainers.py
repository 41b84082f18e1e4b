"""One training script under local torch, DistributedDataParallel and psstore: what differs between them, and how to
run it under each.

A script is a function that gets a `Trainer`, and returns the model that it trained. It asks the trainer for whatever
is not the same in all three, and for nothing else; seeds, data and model are its own. The batch of a step is the
concatenation of one part per worker: local torch computes it whole, each worker its part.

DDP's workers are two processes on gloo, joined by a file; psstore's are threads on a store in this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import psstore
from psstore.errors import WorkerLost
from tests.kernels.parity import exact_square_root

NUM_WORKERS = 2

WAIT_S = 60.0
"""A worker that failed is not waited for any longer."""

T = TypeVar("T")

Weights = dict[str, npt.NDArray[Any]]
"""A model's parameters and buffers, by name."""

Options = Mapping[str, Any]


class Trainer(ABC):
    """What a script asks for, since it is not the same under all three. After `prepare`, `model` is what is called
    and `optimizer` what is stepped."""

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        """Whose parts of each batch are computed here."""

    @property
    def knows_first(self) -> bool:
        """Whether rank 0's part is computed here, too."""
        return 0 in self.ranks

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """What of a batch is computed here."""
        parts = batch.chunk(NUM_WORKERS)
        return torch.cat([parts[rank] for rank in self.ranks])

    def spread(self, model: nn.Module) -> nn.Module:
        """The model on several devices of one worker, where that can be."""
        return model

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Makes them train together with the other workers'."""

    def unfreeze(self, parameters: Iterator[nn.Parameter]) -> None:
        """They require a gradient from now on."""
        for parameter in parameters:
            parameter.requires_grad_(True)

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backward passes that only accumulate."""
        return nullcontext()

    def uneven(self) -> AbstractContextManager[None]:
        """Around a loop that does not have as many batches on every worker."""
        return nullcontext()

    def scaler(self, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **options)

    def exact_square_root(self) -> AbstractContextManager[None]:
        """Within it, torch's optimizers round square roots as IEEE 754 says."""
        return exact_square_root()


class LocalTrainer(Trainer):
    """Ordinary PyTorch: whole batches in one process."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer


class DdpTrainer(Trainer):
    """One of the processes of a group."""

    def __init__(self, ranks: Sequence[int], options: Options) -> None:
        super().__init__(ranks)
        self._options = options

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._ddp = DistributedDataParallel(model, **self._options)
        self.model, self.optimizer = self._ddp, optimizer

    def unfreeze(self, parameters: Iterator[nn.Parameter]) -> None:
        """DDP looks at requires_grad once, when it is made."""
        super().unfreeze(parameters)
        self.prepare(self._ddp.module, self.optimizer)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def uneven(self) -> AbstractContextManager[None]:
        """As with a store, gradients are divided by the number of workers that are still there."""
        joined: AbstractContextManager[None] = self._ddp.join(divide_by_initial_world_size=False)
        return joined


class StoreTrainer(Trainer):
    """One of the workers of a store."""

    optimizer: psstore.torch.DistributedOptimizer

    def __init__(self, ranks: Sequence[int], store: psstore.Store, options: Options) -> None:
        super().__init__(ranks)
        self._store = store
        self._options = options

    def spread(self, model: nn.Module) -> nn.Module:
        return psstore.torch.Replicas(model, devices=["cpu", "cpu"])

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = psstore.torch.DistributedOptimizer(
            optimizer,
            self._store,
            model.named_parameters(),
            named_buffers=model.named_buffers(),
            **self._options,
        )

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.optimizer.clip_grad_norm_(max_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        yield
        self._store.leave()

    def scaler(self, **options: Any) -> torch.amp.GradScaler:
        return psstore.torch.GradScaler("cpu", **options)

    def exact_square_root(self) -> AbstractContextManager[None]:
        """The store's are always so."""
        return nullcontext()


Script = Callable[[Trainer], nn.Module]

EVERYBODY = range(NUM_WORKERS)


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def train_locally(script: Script) -> Weights:
    return weights_of(script(LocalTrainer(EVERYBODY)))


# ---- with a store ----


def train_on_store(script: Script, options: Options, *, shards: int = 2) -> list[Weights]:
    """What each of two workers has in the end."""
    return _on_store(script, options, [[rank] for rank in EVERYBODY], shards)


def train_alone_on_store(script: Script, options: Options, *, shards: int = 2) -> Weights:
    """What a single worker has in the end, which computes whole batches."""
    return _on_store(script, options, [EVERYBODY], shards)[0]


def _on_store(script: Script, options: Options, parts: Sequence[Sequence[int]], shards: int) -> list[Weights]:
    def work(rank: int) -> Weights:
        with local.connect(rank=rank, wait_s=WAIT_S) as store:
            return weights_of(script(StoreTrainer(parts[rank], store, options)))

    with psstore.LocalStore(shards, workers=len(parts)) as local, ThreadPoolExecutor(len(parts)) as threads:
        return first_failure_or_all([threads.submit(work, rank) for rank in range(len(parts))])


# ---- with DDP ----


class DdpWorkers:
    """Two processes, kept for script after script. Scripts must be functions of a module, to get there.

    >>> with DdpWorkers() as workers:
    ...     rank_0, rank_1 = workers.train(script, {"find_unused_parameters": True})
    """

    def __enter__(self) -> DdpWorkers:
        self._processes = [
            ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_settle)
            for _ in EVERYBODY
        ]
        for settled in [process.submit(_is_there) for process in self._processes]:
            settled.result()  # to import torch takes a busy machine longer than one waits for the other
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.shutdown()

    def train(self, script: Script, options: Options) -> list[Weights]:
        """What each of the workers has in the end."""
        return self.run(partial(_train, script, options))

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work` comes to on each rank of a group."""
        with tempfile.TemporaryDirectory() as folder:
            meeting_point = str(Path(folder) / "group")
            return first_failure_or_all(
                [process.submit(_in_group, work, rank, meeting_point) for rank, process in enumerate(self._processes)]
            )


def _settle() -> None:
    """Of a worker process: gloo on loopback, and one thread, as the scripts have it elsewhere."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


def _is_there() -> bool:
    return True


def _train(script: Script, options: Options, rank: int) -> Weights:
    return weights_of(script(DdpTrainer([rank], options)))


def _in_group(work: Callable[[int], T], rank: int, meeting_point: str) -> T:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=NUM_WORKERS,
        timeout=timedelta(seconds=WAIT_S),
    )
    try:
        torch.distributed.barrier()  # else one that has nothing to do may leave before the other is there
        return work(rank)
    finally:
        torch.distributed.destroy_process_group()


def first_failure_or_all(results: Sequence[Future[T]]) -> list[T]:
    """Waits for all. Of several failures the first in time is the cause, which rank says nothing of: the worker that
    lost its peer only tells that it did."""
    ended = as_completed(results)
    failures = [failure for failure in (result.exception() for result in ended) if failure is not None]
    for failure in failures:
        if not isinstance(failure, WorkerLost):
            raise failure
    return [result.result() for result in results]
