"""A model on a device, trained by a store through copies on the device or in main memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import psstore


def train(
    overlap: Any, *, through_main_memory: bool, compression: str | None = None, device: str = "cuda"
) -> list[torch.Tensor]:
    """The parameters after five steps. `through_main_memory`: a copy of the model there is what the store trains; its
    gradients are those of the model on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8)).to(
        device
    )
    trained = [p.detach().cpu().clone().requires_grad_() if through_main_memory else p for p in model.parameters()]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(trained)]
    with psstore.connect("local://?shards=2") as store:
        opt = psstore.torch.DistributedOptimizer(
            torch.optim.AdamW(trained, lr=0.01),
            store,
            named,
            overlap="none" if through_main_memory else overlap,
            compression=compression,
        )
        for step in range(5):
            inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
            if through_main_memory:  # as the store has them: rounded from the beginning, where pulls are
                for copy, parameter in zip(trained, model.parameters(), strict=True):
                    parameter.detach().copy_(copy)
            model.zero_grad()
            model(inputs).square().mean().backward()
            if through_main_memory:
                for copy, parameter in zip(trained, model.parameters(), strict=True):
                    assert parameter.grad is not None
                    copy.grad = parameter.grad.cpu()
            opt.step()
    return [parameter.detach().cpu() for parameter in trained]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
