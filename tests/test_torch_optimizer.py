"""DistributedOptimizer as a torch.optim.Optimizer: what it takes, what it refuses, what it says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch_support import Odd, assert_same_bits, backward, batches, distributed

import psstore
from psstore.errors import NotAWorker, StoreClosed, UsageError
from psstore.torch import DistributedOptimizer


@pytest.fixture
def store() -> Iterator[psstore.Store]:
    with psstore.connect("local://?shards=2") as connection:
        yield connection


def wrap(optimizer: torch.optim.Optimizer, store: psstore.Store, model: nn.Module) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, store, named_parameters=model.named_parameters())


# ---- as an optimizer ----


def test_it_is_a_torch_optimizer_that_shares_its_groups(store: psstore.Store) -> None:
    model = Odd()
    inner = SGD(model.parameters(), lr=0.1)
    outer = wrap(inner, store, model)
    assert isinstance(outer, torch.optim.Optimizer)
    assert outer.param_groups is inner.param_groups
    assert outer.defaults == inner.defaults


def test_step_evaluates_a_closure_and_returns_its_loss(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    outer = distributed(model, store, partial(SGD, lr=0.1))
    inputs = next(batches(1))
    assert outer.step(lambda: backward(model, inputs)) == backward(plain, inputs)
    SGD(plain.parameters(), lr=0.1).step()
    assert_same_bits(model, plain)


def test_step_without_any_gradient_changes_nothing_and_ends_the_round(store: psstore.Store) -> None:
    model = Odd()
    outer = distributed(model, store, partial(AdamW, lr=0.1))
    outer.step()
    assert_same_bits(model, Odd())
    assert store.round == 2


def test_step_hooks_and_zero_grad_are_torchs(store: psstore.Store) -> None:
    model = Odd()
    outer = distributed(model, store, partial(SGD, lr=0.1))
    seen: list[str] = []
    outer.register_step_pre_hook(lambda *_: seen.append("before"))
    outer.register_step_post_hook(lambda *_: seen.append("after"))
    backward(model, next(batches(1)))
    outer.step()
    assert seen == ["before", "after"]
    outer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_dict_holds_the_hyper_parameters_and_loads_them_again(store: psstore.Store) -> None:
    model = Odd()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = wrap(inner, store, model)
    saved = outer.state_dict()
    assert saved["state"] == {}
    outer.param_groups[0]["lr"] = 0.7
    outer.load_state_dict(saved)
    assert outer.param_groups[0]["lr"] == 0.1
    assert inner.param_groups is outer.param_groups


def test_state_of_a_plain_optimizer_is_refused_with_the_way_out(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    outer = distributed(model, store, partial(AdamW, lr=0.1))
    other = AdamW(plain.parameters(), lr=0.2)
    backward(plain, next(batches(1)))
    other.step()
    with pytest.raises(UsageError, match=r"clear state_dict\['state'\]"):
        outer.load_state_dict(other.state_dict())


def test_a_parameter_group_is_refused_once_the_store_trains(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    with pytest.raises(UsageError, match="add it to the torch optimizer first"):
        outer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_closed_store_is_said_to_be_closed() -> None:
    model = Odd()
    store = psstore.connect("local://")
    outer = distributed(model, store, partial(SGD, lr=0.1))
    store.close()
    backward(model, next(batches(1)))
    with pytest.raises(StoreClosed):
        outer.step()


# ---- parameters ----


def test_frozen_parameters_stay_local(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    for one in (model, plain):
        one.first.requires_grad_(False)
    outer = distributed(model, store, partial(SGD, lr=0.1))
    assert "first" not in store.keys()
    inner = SGD(plain.parameters(), lr=0.1)
    for one, optimizer in ((model, outer), (plain, inner)):
        backward(one, next(batches(1)))
        optimizer.step()
    assert_same_bits(model, plain)


def test_unfreezing_later_is_refused_and_not_ignored(store: psstore.Store) -> None:
    model = Odd()
    model.first.requires_grad_(False)
    outer = distributed(model, store, partial(SGD, lr=0.1))
    model.first.requires_grad_(True)
    backward(model, next(batches(1)))
    with pytest.raises(UsageError, match="after unfreezing"):
        outer.step()


def test_tied_weights_are_one_tensor(store: psstore.Store) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    model, plain = tied(), tied()
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == 4
    outer = DistributedOptimizer(SGD(model.parameters(), lr=0.1), store, named_parameters=named)
    assert sorted(store.keys()) == ["0.bias", "0.weight", "2.bias"]
    inner = SGD(plain.parameters(), lr=0.1)
    inputs = torch.ones(3, 4)
    for one, optimizer in ((model, outer), (plain, inner)):
        one(inputs).sum().backward()
        optimizer.step()
    assert_same_bits(model, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_fp32_masters(store: psstore.Store, dtype: torch.dtype) -> None:
    """1,000 steps that bf16 alone would round away move the master, and the parameter follows it."""
    weight = nn.Parameter(torch.full((8,), 1.0, dtype=dtype))
    outer = DistributedOptimizer(SGD([weight], lr=1e-4), store, named_parameters=[("weight", weight)])
    weight.grad = torch.ones_like(weight)
    for _ in range(1000):
        outer.step()
    assert weight.dtype == dtype
    torch.testing.assert_close(weight.float(), torch.full((8,), 0.9), atol=4e-3, rtol=0)
    torch.testing.assert_close(torch.from_numpy(store.pull("weight")), torch.full((8,), 0.9), atol=1e-4, rtol=0)


def test_gradients_need_not_be_contiguous(store: psstore.Store) -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    outer = DistributedOptimizer(SGD([weight], lr=1.0), store, named_parameters=[("weight", weight)])
    weight.grad = torch.arange(6.0).reshape(2, 3).t()
    outer.step()
    assert torch.equal(weight, -weight.grad)


# ---- what is refused, before anything is created ----


class Halved(SGD):
    """Steps like no other."""


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_an_optimizer_without_a_rule_is_refused_by_name(store: psstore.Store) -> None:
    model = linear()
    for optimizer in (torch.optim.Rprop(model.parameters()), Halved(model.parameters(), lr=0.1)):
        with pytest.raises(UsageError, match=r"SGD, Adam, AdamW, Adagrad, RMSprop"):
            wrap(optimizer, store, model)
    assert store.keys() == []


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


def test_sparse_gradients_are_refused_by_name(store: psstore.Store) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    outer = distributed(model, store, partial(SGD, lr=0.1))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"gradient of 'weight'.*sparse=False"):
        outer.step()
