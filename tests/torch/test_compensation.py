"""Parameter groups whose gradients are made up for the steps of others: passed on to the store, and refused by name."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

import psstore
from psstore.errors import BadArgument, RuleMismatch, UsageError
from psstore.torch import DistributedOptimizer
from tests.torch.support import Odd, assert_same_bits, backward, batches


def distributed(model: torch.nn.Module, store: psstore.Store, **options: object) -> DistributedOptimizer:
    groups = [{"params": list(model.parameters()), **options}]
    return DistributedOptimizer(SGD(groups, lr=0.1), store, named_parameters=model.named_parameters())


def test_a_stale_step_is_that_of_one_process_which_knows_both_values() -> None:
    """Both workers take a gradient at the first values; the second's is applied to what the first has made of them."""
    models, reference = [Odd(), Odd()], Odd()
    with psstore.LocalStore(2, workers=2, mode="async") as local:
        stores = [local.connect(rank=rank) for rank in range(2)]
        optimizers = [distributed(model, store, compensation=0.5) for model, store in zip(models, stores, strict=True)]
        for rank, inputs in enumerate(batches(2, seed=1)):
            backward(models[rank], inputs)
        for optimizer in optimizers:
            optimizer.step()
    base = [parameter.detach().clone() for parameter in reference.parameters()]
    gradients = []
    for inputs in batches(2, seed=1):
        reference.zero_grad()
        backward(reference, inputs)
        gradients.append([parameter.grad for parameter in reference.parameters()])
    with torch.no_grad():
        for rank in range(2):
            for parameter, taken, gradient in zip(reference.parameters(), base, gradients[rank], strict=True):
                if gradient is not None:
                    made_up = torch.addcmul(gradient, 0.5 * gradient * gradient, parameter - taken)
                    parameter.add_(made_up, alpha=-0.1)
    assert_same_bits(models[1], reference)


@pytest.mark.parametrize("mode", ["sync", "backup"])
def test_a_store_where_nobody_steps_meanwhile_refuses_it(mode: str) -> None:
    options = {"backups": 1} if mode == "backup" else {}
    with (
        psstore.LocalStore(workers=2, mode=mode, **options) as local,  # type: ignore[arg-type]
        local.connect(rank=0) as store,
        pytest.raises(BadArgument, match=f"in mode '{mode}' there are none: .* --mode async or ssp"),
    ):
        distributed(Odd(), store, compensation=0.5)


@pytest.mark.parametrize("compensation", ["0.5", True, None])
def test_a_group_that_says_it_otherwise_is_refused(compensation: object) -> None:
    with psstore.connect("local://") as store, pytest.raises(UsageError, match="expected a number from 0 on"):
        distributed(Odd(), store, compensation=compensation)


def test_workers_have_to_say_the_same() -> None:
    with psstore.LocalStore(workers=2, mode="async") as local:
        stores = [local.connect(rank=rank) for rank in range(2)]
        distributed(Odd(), stores[0], compensation=0.5)
        with pytest.raises(RuleMismatch, match=r"has compensation 0.5 in the store, not 0;"):
            distributed(Odd(), stores[1])
