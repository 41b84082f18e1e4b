"""A step leaves nothing to the garbage collector: its passes over all that a program has take a fifth of a second."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, NAdam

import psstore
from psstore.torch import DistributedOptimizer
from psstore.torch.change_detection import CHECKED_ROUNDS

NUM_PARAMETERS = 300
STEPS = 20
TRIES = 3
"""What a step leaves it leaves each time; what an earlier test's threads let go of meanwhile comes once."""

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"overlap": "backward"},
    "none": {"overlap": "none"},
    "eager": {"overlap": "eager"},
    "average": {"mode": "average", "every": 2},
    "average of differences": {"mode": "average", "every": 2, "compression": "int8"},
    "on the worker": {"rule": partial(NAdam, lr=0.01)},
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_leave_no_cyclic_garbage(way: str) -> None:
    options = dict(WAYS[way])
    rule = options.pop("rule", partial(SGD, lr=0.01))
    model = nn.ParameterList(torch.zeros(4) for _ in range(NUM_PARAMETERS))
    with psstore.connect("local://") as store:
        optimizer = DistributedOptimizer(rule(model.parameters()), store, model.named_parameters(), **options)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in model).backward()
                optimizer.step()

        def garbage() -> int:
            gc.collect()
            gc.disable()
            try:
                steps(STEPS)
                return gc.collect()
            finally:
                gc.enable()

        steps(CHECKED_ROUNDS + 1)
        assert 0 in (garbage() for _ in range(TRIES))


def test_steps_of_many_parameters_leave_few_containers() -> None:
    """Those that live until the next step, one for each parameter, would call the collector. Python 3.13 also counts
    what lives as long as a call, and collects right after it, when there is nothing to go through."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(NUM_PARAMETERS * 10)]
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    with psstore.connect("local://") as store:
        optimizer = DistributedOptimizer(SGD(parameters, lr=0.01), store, named, overlap="none")
        for _ in range(CHECKED_ROUNDS + 1):
            optimizer.step()
        gc.collect()
        gc.disable()
        try:
            optimizer.step()
            num_new = len(gc.get_objects(generation=0))
        finally:
            gc.enable()
    assert num_new < NUM_PARAMETERS
