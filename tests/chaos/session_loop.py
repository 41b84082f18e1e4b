"""A session of torch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import psstore.torch
from psstore.errors import RolledBack
from tests.chaos.work import Work


class Model(torch.nn.Module):
    """A small network, and an element for each worker's each step that nothing but its gradient changes."""

    def __init__(self, num_workers: int, num_steps: int) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
        self.rounds = torch.nn.Parameter(torch.zeros(num_workers, num_steps))

    def loss(self, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        """The store subtracts the mean over all workers: so each adds one to its element."""
        output: torch.Tensor = self.network(inputs)
        return output.square().mean() - len(self.rounds) * self.rounds[rank, step - 1]


def train(work: Work, *, overlap: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model(*work.shape)
    groups: list[dict[str, Any]] = [
        {"params": model.network.parameters()},
        {"params": [model.rounds], "lr": 1.0, "momentum": 0.0},
    ]
    plain = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    optimizer = psstore.torch.DistributedOptimizer(plain, work.store, model.named_parameters(), overlap=overlap)
    for step in psstore.torch.session(optimizer, stop_at=work.num_steps, drain=False):
        with contextlib.suppress(RolledBack):  # which the optimizer hears, too
            work.write(step.number)
        draw = torch.Generator().manual_seed(1000 * step.number + work.rank)
        optimizer.zero_grad()
        model.loss(torch.randn(8, 40, generator=draw), work.rank, step.number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        work.stepped(step.number, hands_in=True)
    momenta = (one.get("momentum_buffer") for one in optimizer.state_dict()["state"].values())
    trained = [*model.network.state_dict().values(), *(one for one in momenta if one is not None)]
    work.end(model.rounds.detach().numpy(), (one.numpy() for one in trained))
