"""One worker of the demo, a process that `psstore demo` starts through the launcher; and the same in one process.

python -m psstore.cli.demo.worker SETTINGS-AS-JSON
"""

from __future__ import annotations

import math
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import chain, count, islice

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import psstore
from psstore.cli.demo.data import NUM_CLASSES, Digits, load
from psstore.cli.demo.messages import Settings, Strategy, WorkerBegan, emit
from psstore.cli.demo.reporter import Reporter
from psstore.cli.demo.weights import save
from psstore.config import worker_environment
from psstore.torch import DistributedOptimizer

MOMENTUM = 0.9

LABEL_SMOOTHING = 0.1
"""Takes the test accuracy on scikit-learn's digits from about 98 % to about 99 %."""

ALL_REDUCE_WAIT_S = 60.0
"""For a worker that is slow to start or to step. One that dies closes its connections, which is noticed at once."""

# ---- the network and its training, as ordinary PyTorch ----

Batch = tuple[torch.Tensor, torch.Tensor]


def seeded_model(digits: Digits, seed: int) -> nn.Module:
    """Two convolutions, a pooling, one more convolution, two linear layers: 150 thousand parameters at 8x8."""
    torch.manual_seed(seed)
    pooled = digits.image_size // 2
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * pooled * pooled, 128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )


def plain_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """SGD, which the store takes bit for bit as torch does (docs/update_rules.md). `foreach=False`: one tensor at a
    time, which is the arithmetic that it follows."""
    return torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=MOMENTUM, nesterov=True, foreach=False
    )


def cosine(optimizer: Optimizer, num_rounds: int, *, done: int = 0) -> torch.optim.lr_scheduler.LRScheduler:
    """From the learning rate to zero. A function of the round alone, unlike CosineAnnealingLR, which goes from rate to
    rate: so training that goes on after `done` rounds has the rates that it would have had, bit for bit."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * (done + step) / num_rounds)) / 2
    )


class Batches:
    """One worker's own part of the training images, reshuffled in each epoch."""

    def __init__(self, digits: Digits, settings: Settings, *, rank: int) -> None:
        dataset = TensorDataset(digits.train_images, digits.train_labels)
        self._sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            dataset, num_replicas=settings.num_workers, rank=rank, seed=settings.seed, drop_last=True
        )
        self._loader = DataLoader(dataset, batch_size=settings.batch_images, sampler=self._sampler, drop_last=True)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._loader)

    def epoch(self, number: int) -> Iterator[Batch]:
        self._sampler.set_epoch(number)
        yield from self._loader

    def after(self, done: int) -> Iterator[Batch]:
        """Epoch by epoch without an end, from the batch that follows so many."""
        epoch, batch = divmod(done, len(self))
        return islice(chain.from_iterable(map(self.epoch, count(epoch))), batch, None)


def backward(model: nn.Module, batch: Batch) -> float:
    """Leaves the gradients of one batch in the parameters; returns the loss."""
    images, labels = batch
    loss: torch.Tensor = nn.functional.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of the test images that are recognised."""
    recognised = model(digits.test_images).argmax(dim=1)
    return float((recognised == digits.test_labels).double().mean())


def train_in_one_process(settings: Settings) -> dict[str, torch.Tensor]:
    """The final weights of the same training in one process: what synchronous training must equal, bit for bit.

    Takes the workers' micro-batches of each round in rank order, sums their gradients, divides, steps.
    """
    torch.set_num_threads(1)
    digits = load(settings.data_dir)
    model = seeded_model(digits, settings.seed)
    optimizer = plain_optimizer(model, settings)
    parts = [Batches(digits, settings, rank=rank) for rank in range(settings.num_workers)]
    schedule = cosine(optimizer, settings.epochs * len(parts[0]))
    for epoch in range(settings.epochs):
        for micro_batches in zip(*(part.epoch(epoch) for part in parts), strict=True):
            optimizer.zero_grad()
            for batch in micro_batches:
                backward(model, batch)  # adds to the gradients that are there
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= settings.num_workers
            optimizer.step()
            schedule.step()
    return dict(model.state_dict())


# ---- one class for each strategy ----


class Peers(ABC):
    """The other workers, as one of them sees them, and the way to train one model together with them."""

    rank: int
    _num_steps = 0

    @property
    def round(self) -> int:
        """The one that the next step ends; the first is 1."""
        return self._num_steps + 1

    @property
    def staleness(self) -> int:
        """Rounds by which this worker is ahead of the slowest."""
        return 0

    @property
    @abstractmethod
    def bytes_moved(self) -> tuple[int, int]:
        """Sent and received since this worker was connected."""

    @abstractmethod
    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """What to call and what to step instead of these two. On return the model has rank 0's values."""

    @abstractmethod
    def meet(self, name: str) -> None:
        """Blocks until every worker is here."""

    @abstractmethod
    def finish(self, model: nn.Module) -> None:
        """Gives the model the final weights, once all have met after the last round."""

    def _count_steps(self, optimizer: Optimizer) -> None:
        def stepped(*_: object) -> None:
            self._num_steps += 1

        optimizer.register_step_post_hook(stepped)


class _StorePeers(Peers):
    def __init__(self, store: psstore.Store, settings: Settings) -> None:
        assert store.rank is not None, "a store is joined as a worker unless it is told otherwise"
        self.rank = store.rank
        self._store = store
        self._settings = settings

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self._store.bytes_pushed, self._store.bytes_pulled

    def meet(self, name: str) -> None:
        self._store.barrier(name)


class ParameterServer(_StorePeers):
    """Strategy `ps`: the store reduces the gradients and takes the step."""

    @property
    def round(self) -> int:
        """The store's, not a count of steps: so a backup worker that was late catches up."""
        return self._store.round

    @property
    def staleness(self) -> int:
        return self._store.staleness

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, DistributedOptimizer(
            optimizer, self._store, named_parameters=model.named_parameters(), compression=self._settings.compression
        )

    def finish(self, model: nn.Module) -> None:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._store.pull_many(list(weights), out=list(weights.values()))


class ModelAveraging(_StorePeers):
    """Strategy `average`: every worker steps alone, and every few steps the store averages the parameters.

    The worker's own steps count as rounds: the store sees one in every few.
    """

    _optimizer: DistributedOptimizer

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self._optimizer = DistributedOptimizer(
            optimizer,
            self._store,
            named_parameters=model.named_parameters(),
            mode="average",
            every=self._settings.every,
            compression=self._settings.compression,
        )
        self._count_steps(self._optimizer)
        return model, self._optimizer

    def finish(self, model: nn.Module) -> None:
        """Averages what the last steps made of it."""
        self._optimizer.synchronize()


class AllReduce(Peers):
    """Strategy `allreduce`: torch's DistributedDataParallel over gloo; every worker takes every step itself."""

    _round_bytes = 0

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """What a ring all-reduce of the gradients sends and receives, 2(W-1)/W of their bytes: gloo does not say."""
        moved = self._num_steps * self._round_bytes * 2 * (dist.get_world_size() - 1) // dist.get_world_size()
        return moved, moved

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._round_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._count_steps(optimizer)
        return DistributedDataParallel(model), optimizer

    def meet(self, name: str) -> None:
        dist.barrier()

    def finish(self, model: nn.Module) -> None:
        """Nothing to do: all have the same weights."""


@contextmanager
def parameter_server(settings: Settings) -> Iterator[Peers]:
    with psstore.connect() as store:
        yield ParameterServer(store, settings)


@contextmanager
def model_averaging(settings: Settings) -> Iterator[Peers]:
    with psstore.connect() as store:
        yield ModelAveraging(store, settings)


@contextmanager
def all_reduce(settings: Settings) -> Iterator[Peers]:
    rank = worker_environment().rank
    assert rank is not None, "the launcher says which worker this is"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.rendezvous_path}",
        rank=rank,
        world_size=settings.num_workers,
        timeout=timedelta(seconds=ALL_REDUCE_WAIT_S),
    )
    try:
        yield AllReduce()
    finally:
        dist.destroy_process_group()


STRATEGIES: Mapping[Strategy, Callable[[Settings], AbstractContextManager[Peers]]] = {
    Strategy.ps: parameter_server,
    Strategy.allreduce: all_reduce,
    Strategy.average: model_averaging,
}


# ---- the worker ----


def train(settings: Settings, peers: Peers) -> None:
    """Until the peers are past the last round: they count, since a strategy may let a late worker catch up, and a store
    that was restored begins after the rounds of its checkpoint."""
    digits = load(settings.data_dir)
    model = seeded_model(digits, settings.seed + peers.rank)  # rank 0's values are what everybody gets
    distributed, optimizer = peers.distribute(model, plain_optimizer(model, settings))
    batches = Batches(digits, settings, rank=peers.rank)
    rounds, done = settings.epochs * len(batches), peers.round - 1
    schedule = cosine(optimizer, rounds, done=done)
    emit(WorkerBegan(rank=peers.rank, process=os.getpid(), store=os.environ.get("PSSTORE_URL")))
    if done == 0:  # else the others train already, or all go on
        peers.meet("start")
    reporter = Reporter(peers, settings, rounds=rounds)
    stream = batches.after(done)
    while (round := peers.round) <= rounds:
        optimizer.zero_grad()
        loss = backward(distributed, next(stream))
        optimizer.step()
        schedule.step()
        reporter.stepped(round, loss)
        if round == settings.hold_after:
            signal.pause()
    result = reporter.result(digits)
    peers.meet("end")
    peers.finish(model)
    if peers.rank == 0 and settings.weights_path is not None:
        save(model, optimizer, settings.weights_path)
    emit(msgspec.structs.replace(result, accuracy=accuracy(model, digits)))


def main() -> None:
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with STRATEGIES[settings.strategy](settings) as peers:
        train(settings, peers)


if __name__ == "__main__":
    main()
