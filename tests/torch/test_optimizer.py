"""DistributedOptimizer as a torch.optim.Optimizer: what it promises as one, and which parameters it takes."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

import psstore
from psstore.errors import StoreClosed, UsageError
from psstore.torch import DistributedOptimizer
from tests.kernels.parity import exact_square_root
from tests.torch.support import Odd, assert_same_bits, backward, batches, distributed, wrap

torch_names = pytest.mark.skipif(torch.__version__ < "2.6", reason="torch 2.4's optimizers take no names")


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


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
    with pytest.warns(UserWarning, match="without any gradient"):
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


def test_a_group_added_later_trains_as_torchs_does(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    through_store = wrap(SGD([model.first, model.bias], lr=0.1, momentum=0.9), store, model)
    local = SGD([plain.first, plain.bias], lr=0.1, momentum=0.9)
    for number, inputs in enumerate(batches(6)):
        for one, optimizer in ((model, through_store), (plain, local)):
            if number == 3:
                optimizer.add_param_group({"params": [one.transposed, one.scale], "lr": 0.01})
            optimizer.zero_grad()
            backward(one, inputs)
            optimizer.step()
    assert len(through_store.param_groups) == 2
    assert store.describe("scale").spec.group == 1
    assert_same_bits(model, plain)


def test_a_group_that_another_life_has_trained_has_the_stores_values_at_once(
    store: psstore.Store,
) -> None:
    def begun() -> tuple[Odd, DistributedOptimizer]:
        model = Odd()
        outer = wrap(SGD([model.first, model.bias], lr=0.1), store, model)
        outer.add_param_group({"params": [model.transposed, model.scale], "lr": 0.01})
        return model, outer

    model, outer = begun()
    for inputs in batches(2):
        outer.zero_grad()
        backward(model, inputs)
        outer.step()
    with pytest.warns(UserWarning, match="training goes on from the weights"):
        again, _ = begun()
    assert_same_bits(again, model)


def test_a_group_added_later_may_bring_its_names(store: psstore.Store) -> None:
    model = Odd()
    outer = wrap(SGD(model.parameters(), lr=0.1), store, model)
    grown = nn.Parameter(torch.ones(2))
    outer.add_param_group({"params": [("grown", grown)]})
    grown.grad = torch.ones(2)
    outer.step()
    assert torch.equal(torch.from_numpy(store.pull("grown")), torch.full((2,), 0.9))


@torch_names
def test_groups_that_know_their_names_keep_them(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    pairs = [(model, wrap(SGD([("first", model.first)], lr=0.1), store, model)), (plain, SGD([plain.first], lr=0.1))]
    for inputs in batches(3):
        for one, optimizer in pairs:
            optimizer.zero_grad()
            backward(one, inputs)
            optimizer.step()
    assert_same_bits(model, plain)
    outer = pairs[0][1]
    outer.add_param_group({"params": [("bias", model.bias)]})
    assert [group["param_names"] for group in outer.state_dict()["param_groups"]] == [["first"], ["bias"]]


def test_a_group_without_names_is_refused_and_not_added(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    with pytest.raises(UsageError, match=r"parameter 0 of group 1, of shape \(2,\), has no name"):
        outer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(outer.param_groups) == 1


def test_what_is_done_to_the_wrapped_optimizers_groups_is_seen(store: psstore.Store) -> None:
    model = Odd()
    inner = SGD(model.parameters(), lr=0.1)
    outer = wrap(inner, store, model)
    saved = inner.state_dict()
    outer.param_groups[0]["lr"] = 0.7
    inner.load_state_dict(saved)
    assert outer.param_groups is inner.param_groups
    assert outer.param_groups[0]["lr"] == 0.1


def test_repr_is_torchs_and_says_where_it_trains(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    assert repr(outer).startswith("DistributedOptimizer (\nParameter Group 0\n")
    assert repr(outer).endswith(f") of SGD on {store!r}")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused_with_the_way_out(
    store: psstore.Store, copied: Callable[[object], object]
) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    with pytest.raises(UsageError, match=r"save its state_dict\(\)"):
        copied(outer)


def test_zero_grad_can_leave_zeros(store: psstore.Store) -> None:
    model = Odd()
    outer = distributed(model, store, partial(SGD, lr=0.1))
    backward(model, next(batches(1)))
    outer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert model.first.grad is not None


def test_profilers_and_global_hooks_see_its_steps(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            outer.step()
    finally:
        handle.remove()
    assert seen == [outer]
    assert "Optimizer.step#DistributedOptimizer.step" in {event.key for event in profiler.key_averages()}


def test_a_step_without_any_gradient_is_told_of_once(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    with pytest.warns(UserWarning, match=r"without any gradient.*backward\(\) forgotten") as told:
        outer.step()
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer.step()


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


def test_an_unfrozen_parameter_joins_in_the_next_step(store: psstore.Store) -> None:
    model, plain = Odd(), Odd()
    for one in (model, plain):
        one.first.requires_grad_(False)
    pairs = [(model, distributed(model, store, partial(AdamW, lr=0.1))), (plain, AdamW(plain.parameters(), lr=0.1))]
    with exact_square_root():
        for number, inputs in enumerate(batches(6)):
            for one, optimizer in pairs:
                one.first.requires_grad_(number >= 3)
                optimizer.zero_grad()
                backward(one, inputs)
                optimizer.step()
    assert "first" in store.keys()
    assert_same_bits(model, plain)


def test_compiled_models_share_the_names_of_plain_ones(store: psstore.Store) -> None:
    inner = cast(nn.Module, torch.compile(nn.Linear(2, 2)))
    compiled = cast(nn.Module, torch.compile(nn.Sequential(nn.Linear(2, 2), inner)))
    assert "_orig_mod.1._orig_mod.weight" in dict(compiled.named_parameters())
    wrap(SGD(compiled.parameters(), lr=0.1), store, compiled)
    assert sorted(store.keys()) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_named_optimizers_share_a_store_and_no_tensor_or_group(store: psstore.Store) -> None:
    models = [linear(), linear()]
    named = [
        DistributedOptimizer(SGD(one.parameters(), lr=0.1), store, one.named_parameters(), name=name)
        for one, name in zip(models, ("generator", "critic"), strict=True)
    ]
    assert len(named) == 2
    assert sorted(store.keys()) == ["critic/bias", "critic/weight", "generator/bias", "generator/weight"]
    assert store.describe("critic/bias").spec.group != store.describe("generator/bias").spec.group


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


def test_a_worker_that_steps_with_gradients_astray_is_told_and_keeps_the_parameters() -> None:
    model = Odd(seed=0)
    with psstore.LocalStore(refuse_norm=10.0) as local, local.connect() as store:
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, store, named_parameters=model.named_parameters())
        for step in range(9):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1000.0 if step == 8 else 1.0)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            told = pytest.warns(UserWarning, match="rank 0 was refused") if step == 8 else contextlib.nullcontext()
            with told:
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters())) == (step == 8)
            assert optimizer.skipped == (step == 8)
