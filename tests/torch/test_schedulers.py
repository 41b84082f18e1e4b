"""Every scheduler of torch.optim: the same series of hyper-parameters and the same weights as without a store."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, Adam, Optimizer, lr_scheduler, swa_utils

import psstore
from psstore.torch import DistributedOptimizer
from tests.kernels.parity import exact_square_root
from tests.torch.support import Odd, assert_same_bits, backward, batches

STEPS = 12

Make = Callable[[Optimizer], Any]


def _sequential(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    warm, decay = lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[4])


def _chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: Mapping[str, Make] = {
    "ChainedScheduler": _chained,
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.95**epoch),
    "LinearLR": lr_scheduler.LinearLR,
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda epoch: 0.95),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=10, power=2.0),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1, threshold=0.5),
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.02, anneal_epochs=5),
    "SequentialLR": _sequential,
    "StepLR": partial(lr_scheduler.StepLR, step_size=3),
}

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, foreach=False),
    "adam": partial(Adam, lr=0.01, foreach=False),
}


def test_schedulers_are_all_that_torch_has() -> None:
    base = lr_scheduler.LRScheduler
    modules = (lr_scheduler, swa_utils)
    classes = itertools.chain.from_iterable(inspect.getmembers(module, inspect.isclass) for module in modules)
    public = {name for name, kind in classes if issubclass(kind, base) and kind is not base and name[0] != "_"}
    assert public - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("on_wrapped", [False, True], ids=["of the distributed", "of the plain"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedules_are_torchs(scheduler: str, optimizer: str, on_wrapped: bool) -> None:
    plain, stored = Odd(), Odd()
    with psstore.connect("local://") as store, exact_square_root():
        local = OPTIMIZERS[optimizer](plain.parameters())
        inner = OPTIMIZERS[optimizer](stored.parameters())
        outer = DistributedOptimizer(inner, store, stored.named_parameters())
        expected = _series(plain, local, SCHEDULERS[scheduler](local))
        assert _series(stored, outer, SCHEDULERS[scheduler](inner if on_wrapped else outer)) == expected
    assert_same_bits(plain, stored)


def _series(model: Odd, optimizer: Optimizer, schedule: Any) -> list[list[float]]:
    """What the group's hyper-parameters were before each step. Warnings are errors: there is nothing to warn of."""
    series = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What torch 2.4 says of its own SequentialLR.
        warnings.filterwarnings("ignore", "The epoch parameter in")
        for inputs in batches(STEPS):
            series.append(_hypers(optimizer))
            optimizer.zero_grad()
            loss = backward(model, inputs)
            optimizer.step()
            schedule.step(*[loss] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else [])
    return series


def _hypers(optimizer: Optimizer) -> list[float]:
    group = optimizer.param_groups[0]
    return [float(group["lr"]), *([group["momentum"]] if "momentum" in group else group["betas"])]
