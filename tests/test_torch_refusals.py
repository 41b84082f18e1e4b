"""What DistributedOptimizer can't train, said in a sentence that tells what to do, before anything is created."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch_support import distributed

import psstore
from psstore.errors import NotAWorker, UsageError
from psstore.torch import DistributedOptimizer


@pytest.fixture
def store() -> Iterator[psstore.Store]:
    with psstore.connect("local://?shards=2") as connection:
        yield connection


def wrap(optimizer: torch.optim.Optimizer, store: psstore.Store, model: nn.Module) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, store, named_parameters=model.named_parameters())


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


# ---- the optimizer ----


def test_implementation_flags_are_ignored_and_differentiable_is_not(store: psstore.Store) -> None:
    model = linear()
    wrap(AdamW(model.parameters(), fused=True), store, model)
    with pytest.raises(UsageError, match="differentiable=True"):
        wrap(AdamW(model.parameters(), differentiable=True), store, model)


def test_a_store_that_is_no_worker_cant_train() -> None:
    model = linear()
    with (
        psstore.LocalStore() as local,
        local.connect(role="client") as reader,
        pytest.raises(NotAWorker, match="role='worker'"),
    ):
        distributed(model, reader, partial(SGD, lr=0.1))


def test_wrapping_twice_is_refused(store: psstore.Store) -> None:
    model = linear()
    outer = distributed(model, store, partial(SGD, lr=0.1))
    with pytest.raises(UsageError, match="already"):
        wrap(outer, store, model)


def test_unnamed_parameters_are_refused_with_their_place_and_shape(store: psstore.Store) -> None:
    model, other = linear(), nn.Linear(3, 5)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError, match=r"parameter 2 of group 0, of shape \(5, 3\), has no name"):
        wrap(optimizer, store, model)


def test_duplicate_names_are_refused_with_the_way_out(store: psstore.Store) -> None:
    one, other = linear(), linear()
    named = list(itertools.chain(one.named_parameters(), other.named_parameters()))
    optimizer = SGD([parameter for _, parameter in named], lr=0.1)
    with pytest.raises(UsageError, match=r"two parameters are named 'weight'.*prefix="):
        DistributedOptimizer(optimizer, store, named_parameters=named)


def test_parameters_in_place_of_named_parameters_are_refused(store: psstore.Store) -> None:
    model = linear()
    with pytest.raises(UsageError, match=r"not model\.parameters"):
        DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, named_parameters=model.parameters())  # type: ignore[arg-type]


def test_complex_parameters_are_refused(store: psstore.Store) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="dtype complex64"):
        DistributedOptimizer(SGD([weight], lr=0.1), store, named_parameters=[("w", weight)])


def test_a_fully_frozen_optimizer_has_nothing_to_train(store: psstore.Store) -> None:
    model = linear().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        distributed(model, store, partial(SGD, lr=0.1))
