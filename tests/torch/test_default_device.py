"""A program may have torch make its tensors on another device, by torch.set_default_device or torch.device as a block:
what goes to a store and comes from it lies in main memory all the same. Tensors of device meta have no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psstore
from tests.torch.support import Odd

ELSEWHERE = torch.device("meta")


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 30, device="cpu").view(6, 5)


@pytest.mark.parametrize("overlap", ["none", "eager"])
def test_a_model_trains_and_its_state_is_in_main_memory(overlap: Any, store: psstore.Store) -> None:
    model = Odd()
    with ELSEWHERE:
        optimizer = psstore.torch.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), store, model.named_parameters(), overlap=overlap
        )
        model(inputs()).square().mean().backward()
        optimizer.step()
        for state in optimizer.state_dict()["state"].values():
            assert {one.device.type for one in state.values()} == {"cpu"}


def test_tables_are_looked_up_and_trained(store: psstore.Store) -> None:
    head = nn.Linear(4, 1)
    ids = torch.tensor([1, 2, 3])
    with ELSEWHERE:
        items = psstore.torch.Embedding("items", 4, store, lr=0.1)
        optimizer = psstore.torch.DistributedOptimizer(
            torch.optim.SGD(head.parameters(), lr=0.1), store, head.named_parameters(), tables=[items]
        )
        head(items(ids)).sum().backward()
        optimizer.step()
        assert items.to_torch(8).weight.device.type == "cpu"


def test_learners_share_what_they_have_made() -> None:
    model = nn.Linear(5, 1)
    with psstore.connect("local://") as store, ELSEWHERE:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = psstore.torch.DiLoCo(model, inner, store, every=1, fragments=1)
        model(inputs()).square().mean().backward()
        optimizer.step()
        assert store.version == 1


def test_published_tensors_are_loaded(store: psstore.Store) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with ELSEWHERE:
        psstore.torch.publish(store, model.named_parameters())
        psstore.torch.load(store, other.named_parameters())
    assert torch.equal(model.weight, other.weight)
