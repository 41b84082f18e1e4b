"""Parameter groups that are reduced by a median or a trimmed mean: a few workers that send anything do no harm."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, NAdam

import psstore
from psstore.errors import BadArgument, RuleMismatch, UsageError
from psstore.torch import DiLoCo, DistributedOptimizer
from tests.torch.support import Odd, OptimizerFactory, assert_same_bits, backward, batches, on_each_worker

STEPS = 5
MEDIAN = {"reduction": "median"}
TRIMMED = {"reduction": "trimmed_mean", "trim": 1}

FACTORIES: dict[str, OptimizerFactory] = {
    "the store's step": partial(SGD, lr=0.1, momentum=0.9),
    "the workers' step": partial(NAdam, lr=0.01),
}


def group_of(model: torch.nn.Module, **options: object) -> list[dict[str, object]]:
    return [{"params": list(model.parameters()), **options}]


def distributed(model: torch.nn.Module, store: psstore.Store, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer, store, named_parameters=model.named_parameters())


# ---- against one process ----


@pytest.mark.parametrize("name", FACTORIES)
def test_workers_equal_one_process_that_steps_with_the_medians(name: str) -> None:
    models, reference = [Odd() for _ in range(3)], Odd()

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, FACTORIES[name](group_of(models[rank], **MEDIAN)))
        for inputs in batches(STEPS, seed=100 + rank):
            optimizer.zero_grad()
            backward(models[rank], inputs)
            optimizer.step()

    on_each_worker(3, work, shards=2)
    alone = FACTORIES[name](reference.parameters())
    for each in zip(*(batches(STEPS, seed=100 + rank) for rank in range(3)), strict=True):
        gradients = []
        for inputs in each:
            reference.zero_grad()
            backward(reference, inputs)
            gradients.append([parameter.grad for parameter in reference.parameters()])
        for parameter, *of_workers in zip(reference.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack([one for one in of_workers if one is not None]).median(dim=0).values
        alone.step()
    for model in models:
        assert_same_bits(model, reference)


def test_averaged_parameters_may_be_medians() -> None:
    models = [Odd(seed=rank) for rank in range(3)]
    alone = [Odd() for _ in range(3)]

    def step(model: Odd, optimizer: torch.optim.Optimizer, rank: int) -> None:
        (inputs,) = batches(1, seed=rank)
        backward(model, inputs)
        optimizer.step()

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        inner = SGD(group_of(model, **MEDIAN), lr=0.1)
        step(model, DistributedOptimizer(inner, store, model.named_parameters(), mode="average"), rank)

    on_each_worker(3, work)
    for rank, model in enumerate(alone):
        step(model, SGD(model.parameters(), lr=0.1), rank)
    with torch.no_grad():
        for first, *others in zip(*(model.parameters() for model in alone), strict=True):
            first.copy_(torch.stack([first, *others]).median(dim=0).values)
    for model in models:
        assert_same_bits(model, alone[0])


def test_learners_take_the_median_of_what_each_has_made_of_a_fragment() -> None:
    """With an outer step of lr 1: of the weights themselves, up to the rounding of a difference."""
    models, begun = [Odd() for _ in range(3)], Odd()
    moved = (torch.nan, 0.25, 0.5)

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        inner, outer = SGD(model.parameters(), lr=1.0), SGD(group_of(model, **MEDIAN), lr=1.0)
        optimizer = DiLoCo(model, inner, store, every=1, fragments=1, outer=outer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e6 if rank == 0 else moved[rank])
        optimizer.step()

    on_each_worker(3, work)
    for model in models:
        for now, was in zip(model.parameters(), begun.parameters(), strict=True):
            torch.testing.assert_close(now, was - 0.5, rtol=0, atol=1e-6)


# ---- one worker that sends anything ----


def loss_after_training(**options: object) -> tuple[float, float]:
    """The loss before and after, on four workers of which one sends a million times its gradient."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 64, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    models = [torch.nn.Linear(8, 1) for _ in range(4)]

    def loss(rank: int, of: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(models[rank](inputs[of]), targets[of])

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, SGD(group_of(models[rank], **options), lr=0.1))
        for _ in range(30):
            optimizer.zero_grad()
            (loss(rank, rank) * (1e6 if rank == 2 else 1)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    before = loss(0, 0).item()
    on_each_worker(4, work)
    return before, loss(0, 0).item()


@pytest.mark.parametrize("options", [MEDIAN, TRIMMED], ids=["median", "trimmed mean"])
def test_training_converges_beside_a_worker_that_sends_anything(options: dict[str, object]) -> None:
    before, after = loss_after_training(**options)
    assert after < before / 100


def test_a_mean_does_not_converge_beside_it() -> None:
    before, after = loss_after_training()
    assert not after < before


# ---- what is refused ----


def test_each_group_has_its_own_and_all_workers_the_same() -> None:
    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        first, *others = model.parameters()
        options = MEDIAN if rank == 0 else {}
        groups: list[dict[str, object]] = [{"params": [first]}, {"params": others, **options}]
        if rank == 0:
            distributed(model, store, SGD(groups, lr=0.1))
            store.barrier("made")
            return
        store.barrier("made")
        with pytest.raises(RuleMismatch, match=r"'transposed' has reduction 'median' .* not 'mean'"):
            distributed(model, store, SGD(groups, lr=0.1))

    on_each_worker(2, work)


@pytest.mark.parametrize("options", [{"reduction": 3}, {"reduction": "trimmed_mean", "trim": "1"}])
def test_a_group_that_says_it_otherwise_is_refused(options: dict[str, object]) -> None:
    model = Odd()
    with psstore.connect("local://") as store, pytest.raises(UsageError, match="expected 'mean', 'median' or"):
        distributed(model, store, SGD(group_of(model, **options), lr=0.1))


def test_a_store_whose_workers_do_not_share_steps_refuses_it() -> None:
    model = Odd()
    with (
        psstore.LocalStore(workers=2, mode="async") as local,
        local.connect(rank=0) as store,
        pytest.raises(BadArgument, match="in mode 'async'"),
    ):
        distributed(model, store, SGD(group_of(model, **MEDIAN), lr=0.1))


@pytest.mark.parametrize(
    ("begun", "later", "said"),
    [
        (MEDIAN, {"reduction": "mean"}, "group 0 has reduction 'mean', and had 'median' when its parameters"),
        (TRIMMED, {"trim": 2}, "group 0 has trim 2, and had 1"),
        ({}, {"compensation": 0.5}, "group 0 has compensation 0.5, and had 0.0"),
    ],
)
def test_a_group_that_changes_what_the_store_has_for_good_is_refused(
    begun: dict[str, object], later: dict[str, object], said: str
) -> None:
    model = Odd()
    with psstore.LocalStore(workers=3) as local, local.connect(rank=0) as store:
        optimizer = distributed(model, store, SGD(group_of(model, **begun), lr=0.1))
        optimizer.param_groups[0].update(later)
        backward(model, next(batches(1)))
        with pytest.raises(UsageError, match=f"{said}.*set it back"):
            optimizer.step()
        assert (store.version, store.round) == (0, 1), "nothing has begun"


def test_a_state_dict_that_says_nothing_of_reductions_leaves_them_as_they_are() -> None:
    model = Odd()
    plain = SGD(model.parameters(), lr=0.25).state_dict()
    with psstore.connect("local://") as store:
        optimizer = distributed(model, store, SGD(group_of(model, **MEDIAN), lr=0.1))
        optimizer.load_state_dict(plain)
        backward(model, next(batches(1)))
        optimizer.step()
        assert store.describe("bias").spec.reduction == "median"


def test_an_outer_optimizer_that_changes_its_reduction_is_refused() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        outer = SGD(group_of(model, **MEDIAN), lr=1.0)
        optimizer = DiLoCo(model, SGD(model.parameters(), lr=0.1), store, every=1, fragments=1, outer=outer)
        outer.param_groups[0]["reduction"] = "mean"
        backward(model, next(batches(1)))
        with pytest.raises(UsageError, match="the outer optimizer's group has reduction 'mean', and had 'median'"):
            optimizer.step()
        assert store.version == 0
