"""A learner of `bench.learners`, as a process: its compute is slept, all else is what any learner does."""

from __future__ import annotations

import time
from typing import Protocol

import torch

import psstore
import psstore.torch

EVERY = 10
"""Steps to a round, which is of the whole model."""

WIDTH = 64


class Shared(Protocol):
    """Steps of each rank that a round has shared."""

    def __getitem__(self, rank: int) -> int: ...

    def __setitem__(self, rank: int, steps: int) -> None: ...


DELAY = 4
"""Steps that are taken while a round is under way."""


def learn(url: str, rank: int, start_s: float, step_s: float, shared: Shared) -> None:
    """Takes steps until it is killed, and counts them when their round is over."""
    torch.set_num_threads(1)
    time.sleep(start_s)
    store = psstore.connect(url, rank=rank)
    torch.manual_seed(rank)
    model = torch.nn.Linear(WIDTH, WIDTH)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = psstore.torch.DiLoCo(model, inner, store, every=EVERY, fragments=1, delay=DELAY)
    for _ in range(EVERY + DELAY):
        _step(model, optimizer, step_s)
    while True:
        shared[rank] += EVERY
        for _ in range(EVERY):
            _step(model, optimizer, step_s)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step_s: float) -> None:
    inputs = torch.randn(8, WIDTH)
    optimizer.zero_grad()
    (model(inputs) - inputs).square().mean().backward()
    time.sleep(step_s)
    optimizer.step()
