"""Optimizers that the store has no rule for: it reduces, and every worker takes the same step."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, Adadelta, Adamax, NAdam, Optimizer, RAdam, Rprop, lr_scheduler

import psstore
from psstore.errors import UsageError
from tests.torch.support import (
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    distributed,
    on_each_worker,
)

STEPS = 6


class Halved(SGD):
    """A subclass may step like no other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 2
        super().step()


class Signs(Optimizer):
    """As a script's own: no torch.optim class, with a state of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                    parameter -= group["lr"] / count * parameter.grad.sign()


CASES: dict[str, OptimizerFactory] = {
    "nadam": partial(NAdam, lr=0.01, momentum_decay=0.01),
    "radam": partial(RAdam, lr=0.01),
    "adamax": partial(Adamax, lr=0.01),
    "adadelta": partial(Adadelta, lr=0.5),
    "rprop": partial(Rprop, lr=0.01),
    "asgd": partial(ASGD, lr=0.01),
    "a subclass of sgd": partial(Halved, lr=0.1, momentum=0.9),
    "a class of its own": partial(Signs, lr=0.01),
}


def train(model: Odd, optimizer: Optimizer, steps: int = STEPS, *, seed: int = 1) -> None:
    for number, inputs in enumerate(batches(steps, seed=seed)):
        optimizer.zero_grad()
        backward(model, inputs, use_all=number % 3 != 1)
        optimizer.step()


def test_gradients_whose_elements_share_memory_count(store: psstore.Store) -> None:
    """As a script may set them by expand()."""
    plain, stored = Odd(), Odd()
    factory = CASES["nadam"]
    for model, optimizer in ((plain, factory(plain.parameters())), (stored, distributed(stored, store, factory))):
        for size in (1.0, 2.0):
            for parameter in model.parameters():
                parameter.grad = torch.tensor(size).expand(parameter.shape)
            optimizer.step()
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("case", CASES)
def test_one_worker_trains_as_plain_torch(store: psstore.Store, case: str) -> None:
    plain, stored = Odd(), Odd()
    train(plain, CASES[case](plain.parameters()))
    train(stored, distributed(stored, store, CASES[case]))
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("case", CASES)
def test_workers_equal_one_process_that_averages(case: str) -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        train(models[rank], distributed(models[rank], store, CASES[case]), seed=100 + rank)

    on_each_worker(2, work, shards=2)
    plain = Odd(seed=0)
    optimizer = CASES[case](plain.parameters())
    for number, pair in enumerate(zip(*(batches(STEPS, seed=100 + rank) for rank in range(2)), strict=True)):
        optimizer.zero_grad()
        for inputs in pair:
            backward(plain, inputs, use_all=number % 3 != 1)
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        optimizer.step()
    for model in models:
        assert_same_bits(model, plain)


def test_the_reduced_gradient_is_where_the_local_one_was() -> None:
    """Also for a worker that had none; nobody's stays None."""
    models = [Odd(seed=0) for _ in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model, store, CASES["nadam"])
        model.bias.grad = torch.full_like(model.bias, 2.0 * rank)
        if rank == 0:
            model.first.grad = torch.ones_like(model.first)
        optimizer.step()
        assert model.bias.grad is not None
        assert torch.equal(model.bias.grad, torch.ones(9))
        assert model.first.grad is not None
        assert torch.equal(model.first.grad, torch.full((17, 5), 0.5))
        assert model.scale.grad is None

    on_each_worker(2, work)
    assert_same_bits(*models)


def test_a_closures_loss_is_returned(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local, outer = CASES["nadam"](plain.parameters()), distributed(stored, store, CASES["nadam"])
    inputs = next(batches(1))
    assert outer.step(lambda: backward(stored, inputs)) == local.step(lambda: backward(plain, inputs))
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("case", CASES)
def test_state_goes_to_plain_torch_and_back(case: str) -> None:
    plain, stored, resumed = Odd(), Odd(), Odd(seed=4)
    local = CASES[case](plain.parameters())
    with psstore.connect("local://") as first, psstore.connect("local://") as second:
        outer = distributed(stored, first, CASES[case])
        for model, optimizer in ((plain, local), (stored, outer)):
            train(model, optimizer)
        assert outer.state is outer.optimizer.state
        resumed.load_state_dict(plain.state_dict())
        again = distributed(resumed, second, CASES[case])
        again.load_state_dict(deepcopy(local.state_dict()))
        local.load_state_dict(deepcopy(outer.state_dict()))
        for model, optimizer in ((plain, local), (stored, outer), (resumed, again)):
            train(model, optimizer, seed=2)
    assert_same_bits(plain, stored)
    assert_same_bits(plain, resumed)


@pytest.mark.parametrize("on_wrapped", [False, True], ids=["of the distributed", "of the plain"])
@pytest.mark.filterwarnings("error", "ignore:the store has no rule for NAdam")
def test_schedules_work_on_either_optimizer(store: psstore.Store, on_wrapped: bool) -> None:
    plain, stored = Odd(), Odd()
    local, outer = CASES["nadam"](plain.parameters()), distributed(stored, store, CASES["nadam"])
    schedules = [lr_scheduler.StepLR(one, 1, 0.5) for one in (local, outer.optimizer if on_wrapped else outer)]
    for number in range(3):
        for model, optimizer, schedule in zip((plain, stored), (local, outer), schedules, strict=True):
            train(model, optimizer, 2, seed=number)
            schedule.step()
    assert_same_bits(plain, stored)


def test_groups_and_unfrozen_parameters_join(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    for model in (plain, stored):
        model.bias.requires_grad_(False)
    factory = CASES["nadam"]
    outer = psstore.torch.DistributedOptimizer(
        factory([stored.first, stored.bias]), store, named_parameters=stored.named_parameters()
    )
    for model, optimizer in ((plain, factory([plain.first, plain.bias])), (stored, outer)):
        train(model, optimizer, 2)
        model.bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model.transposed], "lr": 0.001})
        train(model, optimizer, 2, seed=2)
    assert_same_bits(plain, stored)


def test_publish_makes_rank_0s_weights_everybodys() -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, CASES["nadam"])
        models[rank].load_state_dict(Odd(seed=10 + rank).state_dict())
        outer.publish()
        assert_same_bits(models[rank], Odd(seed=10))

    on_each_worker(2, work)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("factory", "reason"),
    [(torch.optim.LBFGS, "several times in a step"), (torch.optim.SparseAdam, "sparse=False, and use Adam")],
)
def test_what_cant_be_distributed_is_refused_with_the_reason(
    store: psstore.Store, factory: OptimizerFactory, reason: str
) -> None:
    with pytest.raises(UsageError, match=rf"{factory.__name__} can't be distributed: .*{reason}"):
        distributed(Odd(), store, factory)
    assert store.keys() == []


@pytest.mark.parametrize("mode", ["backup", "ssp", "async"])
def test_another_mode_is_refused_by_name(mode: str) -> None:
    with psstore.LocalStore(workers=2, mode=mode) as local, local.connect(rank=0) as store:
        with pytest.raises(UsageError, match=rf"NAdam, which the store has no rule for, .* is '{mode}'.*--mode sync"):
            distributed(Odd(), store, CASES["nadam"])
        assert store.keys() == []


def test_a_worker_that_comes_after_the_first_step_is_refused() -> None:
    model = Odd()
    with psstore.LocalStore() as local:
        with local.connect() as store:
            train(model, distributed(model, store, CASES["nadam"]), 1)
        with local.connect() as store, pytest.raises(UsageError, match=r"took steps before .* exist='overwrite'"):
            distributed(model, store, CASES["nadam"])


def test_a_new_life_may_overwrite_what_the_old_one_left() -> None:
    plain, model = Odd(), Odd()
    with psstore.LocalStore() as local:
        with local.connect() as store:
            train(model, distributed(model, store, CASES["nadam"]), 3)
        with local.connect() as store:
            again = Odd()
            optimizer = psstore.torch.DistributedOptimizer(
                CASES["nadam"](again.parameters()), store, again.named_parameters(), exist="overwrite"
            )
            train(again, optimizer)
    train(plain, CASES["nadam"](plain.parameters()))
    assert_same_bits(plain, again)


# ---- clipping and scaling ----


def test_clipping_is_of_the_average_as_in_one_process() -> None:
    """The norm is summed in another order than torch's, so the last bits differ."""
    models = [Odd(seed=0) for _ in range(2)]
    norms: list[list[torch.Tensor]] = [[], []]

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, CASES["a subclass of sgd"])
        for inputs in batches(STEPS, seed=100 + rank):
            outer.zero_grad()
            backward(models[rank], inputs)
            norms[rank].append(outer.clip_grad_norm_(0.01))
            outer.step()

    on_each_worker(2, work, shards=2)
    plain = Odd(seed=0)
    optimizer = CASES["a subclass of sgd"](plain.parameters())
    for pair in zip(*(batches(STEPS, seed=100 + rank) for rank in range(2)), strict=True):
        optimizer.zero_grad()
        for inputs in pair:
            (plain(inputs).square().mean() / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert norm > 0.01
        for seen in norms:
            torch.testing.assert_close(seen.pop(0), norm)
        optimizer.step()
    assert_same_bits(*models)
    for one, other in zip(models[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_one_workers_overflow_skips_the_step_of_all() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    scalers = [psstore.torch.GradScaler("cpu", init_scale=4.0) for _ in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, CASES["nadam"])
        for number, inputs in enumerate(batches(3, seed=100 + rank)):
            outer.zero_grad()
            loss = models[rank](inputs).square().mean()
            scalers[rank].scale(loss * (torch.inf if (number, rank) == (1, 1) else 1.0)).backward()
            scalers[rank].step(outer)
            scalers[rank].update()
            assert outer.skipped == (number == 1)

    on_each_worker(2, work)
    assert_same_bits(*models)
    plain = Odd(seed=0)
    optimizer = CASES["nadam"](plain.parameters())
    for number, pair in enumerate(zip(*(batches(3, seed=100 + rank) for rank in range(2)), strict=True)):
        optimizer.zero_grad()
        for inputs in pair:
            backward(plain, inputs)
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        if number != 1:
            optimizer.step()
    assert_same_bits(models[0], plain)
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]
