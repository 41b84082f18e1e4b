"""A session of torch, on samples of which each epoch has each once, whoever takes part in which step: also where
workers come and go. What it ends with follows from the log of members, by which `replayed` trains in one process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import psstore.torch
from psstore.errors import RolledBack
from psstore.protocol.decisions import MIN_WEIGHT
from psstore.protocol.shares import Shares
from psstore.torch.loop import Step, TrainingSession
from psstore.wire.messages import Members
from tests.chaos.ledger import who_took_part
from tests.chaos.notes import FOUND, HANDED, NOTHING, WRONG
from tests.chaos.plan import NUM_SAMPLES
from tests.chaos.work import Work, said_of

BATCH_SIZE = 2
"""Of each worker. NUM_SAMPLES are not always shared out evenly among three."""

SEED = 1
"""Of the epochs' orders."""

INPUTS = torch.randn(NUM_SAMPLES, 40, generator=torch.Generator().manual_seed(1))
HARDLY = 1e-9
"""A sample of a larger share counts; else it is there because no batch is empty."""


class Model(torch.nn.Module):
    """A small network, and an element for each worker's each step's each sample that nothing but its gradient
    changes: it is the sample's share in the step."""

    def __init__(self, num_workers: int, num_steps: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
        self.used = torch.nn.Parameter(torch.zeros(num_workers, num_steps, NUM_SAMPLES))

    def loss(self, rank: int, step: int, inputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.network(inputs)
        return output.square().mean() - self.used[rank, step - 1, numbers].mean()


def _made(num_workers: int, num_steps: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = Model(num_workers, num_steps)
    groups: list[dict[str, Any]] = [
        {"params": model.network.parameters()},
        {"params": [model.used], "lr": 1.0, "momentum": 0.0},
    ]
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(work: Work, *, overlap: Any) -> None:
    work.until_done(partial(_is_done, work, overlap))


def _is_done(work: Work, overlap: Any) -> bool:
    """False: it leaves."""
    model, plain = _made(*work.shape)
    optimizer = psstore.torch.DistributedOptimizer(plain, work.store, model.named_parameters(), overlap=overlap)
    sampler = psstore.torch.ElasticSampler(NUM_SAMPLES, optimizer, batch_size=BATCH_SIZE, seed=SEED)
    data = DataLoader(TensorDataset(INPUTS, torch.arange(NUM_SAMPLES)), batch_sampler=sampler)
    batches = chain.from_iterable(repeat(data))
    place = Place(work)
    session = psstore.torch.session(
        optimizer, stop_at=work.num_steps, state={"place": place}, hooks=[place], drain=work.is_elastic
    )
    for step in session:
        with contextlib.suppress(RolledBack):  # which the optimizer hears, too
            work.write(step.number)
        inputs, numbers = next(batches)
        optimizer.zero_grad()
        model.loss(work.rank, step.number, inputs, numbers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if session.is_drained:
        return False
    used = model.used.detach().numpy()
    counts = used * (used > HARDLY).sum((0, 2))[:, None]  # each was one over how many there were
    most = counts.max(2)
    rounds = np.where(most > HARDLY, most.round(3), most > 0)
    for index, took in enumerate(who_took_part(work.store.member_log, *work.shape)):
        if not rounds[:, index].any():  # the step was of nothing, and skipped
            rounds[took, index] = 1
    samples = [list(_places(one)) for one in counts.transpose(1, 0, 2)]
    momenta = [one.get("momentum_buffer") for one in optimizer.state_dict()["state"].values()]
    work.end(rounds, _trained(model, momenta), used=samples)
    return True


def _places(counts: np.ndarray[Any, Any]) -> Iterator[int]:
    """The samples of a step, by workers and samples, each as often as it counts."""
    for _, sample in np.argwhere(counts > HARDLY):
        yield int(sample)


def _trained(model: Model, momenta: Sequence[torch.Tensor | None]) -> list[np.ndarray[Any, Any]]:
    values = [*model.state_dict().values(), *(one for one in momenta if one is not None)]
    return [one.numpy() for one in values]


class Place(psstore.torch.Hook):
    """Where a worker is: what it hands in, and looks for when it begins or the store went back."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._handed: tuple[int, bool] | None = None
        """The version as of which it is handed in just now, and whether the store had asked."""
        self._put_back: Any = None

    def state_dict(self) -> dict[str, Any]:
        store = self._work.store
        self._handed = (store.version, store.hand_in_wanted)
        return {"rank": self._work.rank, "version": store.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put_back = state

    def begin(self, session: TrainingSession) -> None:
        store, found = self._work.store, session.store.handed_in()
        number = NOTHING if found is None else found.version
        if number == session.version and self._put_back != {"rank": self._work.rank, "version": number}:
            number = WRONG
        self._put_back = None
        self._work.notes.note(FOUND, number, self._life, -1 if store.restored is None else store.restored)

    def rolled_back(self, session: TrainingSession) -> None:
        self._handed = None
        self._work.begins()
        with contextlib.suppress(RolledBack):  # the next step finds it, too
            self.begin(session)

    def before_step(self, session: TrainingSession, step: Step) -> None:
        if self._handed is not None:  # it was acknowledged
            version, is_asked = self._handed
            self._work.notes.note(HANDED, version, self._life, is_asked)
            self._handed = None

    def after_step(self, session: TrainingSession, step: Step) -> None:
        if session.version < step.number:  # it does not count
            return
        self._work.stepped(step.number, hands_in=True)
        if self._work.leaves_after(step.number):
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _life(self) -> str:
        """The store's, from which it goes on."""
        welcome = self._work.store._operations.client.sessions[0].welcome
        assert welcome is not None, "a store has been connected"
        return welcome.store


def replayed(num_workers: int, num_steps: int, log: Sequence[Members]) -> str:
    """How each worker has to end, by that log of members: what one process trains that takes each one's samples in
    the order of ranks."""
    model, plain = _made(num_workers, num_steps)
    parameters = list(model.parameters())
    shares = Shares(NUM_SAMPLES, () if log else range(num_workers), batch_size=BATCH_SIZE)
    for step, took in enumerate(who_took_part(log, num_workers, num_steps), 1):
        shares.advance(step - 1, log)
        order = np.random.default_rng((SEED, shares.epoch)).permutation(NUM_SAMPLES)
        sums, divisor = [torch.zeros_like(one) for one in parameters], 0.0
        for rank in took:
            share = shares.of(rank)
            weight = max(MIN_WEIGHT, len(share) * len(shares.members) / shares.round_size)
            numbers = torch.from_numpy(order[share or [0]])
            plain.zero_grad()
            model.loss(rank, step, INPUTS[numbers], numbers).backward()  # type: ignore[no-untyped-call]
            for total, one in zip(sums, parameters, strict=True):
                assert one.grad is not None, "backward has filled it"
                total += torch.tensor(weight, dtype=torch.float32) * one.grad
            divisor += weight
        if divisor <= len(took) * MIN_WEIGHT:  # it is of nothing, and skipped
            continue
        for total, one in zip(sums, parameters, strict=True):
            one.grad = total / torch.tensor(divisor, dtype=torch.float32)
        plain.step()
    momenta = [plain.state[one].get("momentum_buffer") for one in parameters]
    return said_of(num_steps, _trained(model, momenta))
