"""The same training in one process with plain PyTorch: what synchronous training must equal, bit for bit."""

from __future__ import annotations

import torch

from psstore.cli.demo.data import load
from psstore.cli.demo.settings import Settings
from psstore.cli.demo.training import Batches, backward, cosine, plain_optimizer, seeded_model


def train_in_one_process(settings: Settings) -> dict[str, torch.Tensor]:
    """Takes the workers' micro-batches of each round in rank order, sums their gradients, divides, steps."""
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
