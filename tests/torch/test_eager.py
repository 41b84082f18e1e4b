"""overlap='eager': the commit goes first, and parameters come back while backward still runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, NAdam

import psstore
from psstore.errors import DeadlineExceeded, TornRound, UsageError
from psstore.torch import DistributedOptimizer, GradScaler, session
from psstore.torch.eager_step import EarlyRound
from tests.support.server_process import StoreProcess
from tests.torch.support import (
    JOIN_S,
    WIDTH,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    deep,
    in_threads,
    num_bytes,
    on_each_worker,
    until,
)

STEPS = 6

MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)


def eager(model: nn.Module, store: psstore.Store, factory: OptimizerFactory = MOMENTUM) -> DistributedOptimizer:
    return DistributedOptimizer(
        factory(model.parameters()), store, named_parameters=model.named_parameters(), overlap="eager"
    )


# ---- the same results ----


def test_a_layer_frozen_with_its_gradient_kept_goes_on_as_in_torch(store: psstore.Store) -> None:
    model, plain = deep(), deep()
    optimizers = {model: eager(model, store), plain: MOMENTUM(plain.parameters())}
    for step in range(STEPS):
        for each, optimizer in optimizers.items():
            each[0].requires_grad_(step < STEPS // 2)
            optimizer.zero_grad(set_to_none=False)
            each(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
    assert_same_bits(model, plain)


@pytest.mark.parametrize("make", [Odd, deep])
def test_a_worker_alone_trains_as_plain_torch_does(store: psstore.Store, make: Callable[[], nn.Module]) -> None:
    plain, stored = make(), make()
    inputs = [torch.randn(2, 5 if make is Odd else WIDTH) for _ in range(STEPS)]
    for model, optimizer in ((plain, MOMENTUM(plain.parameters())), (stored, eager(stored, store))):
        for one in inputs:
            optimizer.zero_grad()
            model(one).square().mean().backward()
            optimizer.step()
    assert_same_bits(plain, stored)


@pytest.mark.filterwarnings("ignore:the store has trained")
def test_an_optimizer_made_anew_commits_alone(store: psstore.Store) -> None:
    """As in a notebook, where the one of before is about still."""
    plain, stored = Odd(), Odd()
    optimizers = [eager(stored, store)]
    local = MOMENTUM(plain.parameters())
    for lr in (0.05, 0.02):
        for group in local.param_groups:
            group["lr"] = lr
        optimizers.append(eager(stored, store, partial(MOMENTUM, lr=lr)))
        for inputs in batches(STEPS):
            for model, optimizer in ((plain, local), (stored, optimizers[-1])):
                optimizer.zero_grad()
                backward(model, inputs)
                optimizer.step()
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_equal_one_process_bit_for_bit(num_workers: int, shards: int) -> None:
    models = [Odd(seed=rank) for rank in range(num_workers)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = eager(models[rank], store)
        for inputs in batches(STEPS, seed=100 + rank):
            optimizer.zero_grad()
            backward(models[rank], inputs)
            optimizer.step()

    on_each_worker(num_workers, work, shards=shards)
    expected = Odd(seed=0)
    optimizer = MOMENTUM(expected.parameters())
    for inputs in zip(*[batches(STEPS, seed=100 + rank) for rank in range(num_workers)], strict=True):
        optimizer.zero_grad()
        for one in inputs:
            backward(expected, one)
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_workers
        optimizer.step()
    for model in models:
        assert_same_bits(model, expected)


# ---- the overlap ----


def test_last_layers_are_back_before_backward_comes_to_the_first() -> None:
    """Backward waits before the first layer, on both workers, until the others' new values have arrived."""
    arrived = [0, 0]

    def work(store: psstore.Store, rank: int) -> None:
        model = deep(seed=rank)
        optimizer = eager(model, store)
        first, *others = model.parameters()
        expected = sum(weight.nbytes for weight in others)
        before = store.bytes_pulled

        def wait(_: torch.Tensor) -> None:
            until(lambda: store.bytes_pulled - before >= expected)
            arrived[rank] += 1

        first.register_hook(wait)  # type: ignore[no-untyped-call]
        for inputs in torch.randn(2, 4, WIDTH):
            before = store.bytes_pulled
            held = [weight.detach().clone() for weight in others]
            model(inputs).square().mean().backward()
            for weight, value in zip(others, held, strict=True):
                assert torch.equal(weight, value), "backward needs it as it was"
            optimizer.step()
            optimizer.zero_grad()
            for weight, value in zip(others, held, strict=True):
                assert not torch.equal(weight, value)

    on_each_worker(2, work)
    assert arrived == [2, 2]


def test_a_step_moves_each_byte_once_in_each_direction(store: psstore.Store) -> None:
    model = deep()
    optimizer = eager(model, store)
    pushed, pulled = store.bytes_pushed, store.bytes_pulled
    for inputs in torch.randn(STEPS, 4, WIDTH):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert store.bytes_pushed - pushed == store.bytes_pulled - pulled == STEPS * num_bytes(model)


# ---- what is promised is kept ----


def test_values_come_back_in_the_order_and_the_company_in_which_gradients_went(
    store: psstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[list[str]]] = {"start_push_many": [], "start_pull_many": []}
    for what, names in calls.items():
        start = getattr(store, what)
        monkeypatch.setattr(
            store, what, lambda some, *args, _of=(start, names), **how: _noted(*_of, some, *args, **how)
        )
    model = nn.Sequential(*deep(), nn.Linear(WIDTH, 2), nn.Linear(2, 1))
    optimizer = eager(model, store)
    model[1].requires_grad_(False)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    pushed, pulled = calls.values()
    assert pulled == [*pushed, ["1.weight"]]
    assert pushed == [["4.bias", "4.weight", "3.bias", "3.weight", "2.weight"], ["0.weight"]]


def _noted(start: Callable[..., Any], noted: list[list[str]], names: Any, *args: Any, **how: Any) -> Any:
    noted.append(list(names))
    return start(names, *args, **how)


def test_zeros_are_sent_for_a_gradient_that_is_not_there_with_a_word(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), eager(stored, store)
    inputs = next(batches(1))
    for _ in range(STEPS):
        inner.zero_grad()
        backward(plain, inputs, use_all=False)
        plain.sometimes.grad = torch.zeros_like(plain.sometimes)
        inner.step()
    backward(stored, inputs, use_all=False)
    with pytest.warns(UserWarning, match="no gradient for 'sometimes': zeros are sent"):
        outer.step()
    for _ in range(STEPS - 1):
        outer.zero_grad()
        backward(stored, inputs, use_all=False)
        outer.step()
    assert_same_bits(plain, stored)


def test_frozen_parameters_are_not_promised(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), eager(stored, store)
    for model, optimizer in ((plain, inner), (stored, outer)):
        for number, inputs in enumerate(batches(STEPS)):
            model.first.requires_grad_(number % 2 == 0)
            optimizer.zero_grad()
            backward(model, inputs)
            optimizer.step()
    assert_same_bits(plain, stored)


def test_a_parameter_that_is_unfrozen_counts_from_the_next_step_on(store: psstore.Store) -> None:
    """In the step that takes it in, the promise has been made without it."""
    plain, stored = Odd(), Odd()
    stored.first.requires_grad_(False)
    inner, outer = MOMENTUM(plain.parameters()), eager(stored, store)
    stored.first.requires_grad_(True)
    for model, optimizer in ((plain, inner), (stored, outer)):
        for number, inputs in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            backward(model, inputs)
            if model is plain and number == 0:
                plain.first.grad = None
            optimizer.step()
    assert_same_bits(plain, stored)


def test_a_group_that_is_added_counts_from_the_next_step_on(store: psstore.Store) -> None:
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(plain, store, named_parameters=model.named_parameters(), overlap="eager")
    optimizer.add_param_group({"params": list(head.named_parameters("head")), "lr": 0.01})
    began = [head.weight.detach().clone(), model.weight.detach().clone()]
    for step in range(2):
        optimizer.zero_grad()
        head(model(torch.ones(1, 3))).sum().backward()
        optimizer.step()
        assert torch.equal(head.weight, began[0]) == (step == 0)
        assert not torch.equal(model.weight, began[1])


def test_with_no_sync_several_backward_passes_make_a_step(store: psstore.Store) -> None:
    plain, stored = deep(), deep()
    inner, outer = MOMENTUM(plain.parameters()), eager(stored, store)
    for inputs in torch.randn(STEPS, 2, 4, WIDTH):
        for model, optimizer in ((plain, inner), (stored, outer)):
            optimizer.zero_grad()
            with outer.no_sync():
                model(inputs[0]).square().mean().backward()
            model(inputs[1]).square().mean().backward()
            optimizer.step()
    assert_same_bits(plain, stored)


def test_a_step_without_backward_is_a_round_of_zeros(store: psstore.Store) -> None:
    model = Odd()
    optimizer = eager(model, store, partial(SGD, lr=0.1))
    with pytest.warns(UserWarning, match=r"without any gradient|zeros are sent"):
        optimizer.step()
    assert store.round == 2
    assert_same_bits(model, Odd())


@pytest.mark.filterwarnings("ignore:parameters were edited")
def test_edited_weights_become_everybodys() -> None:
    models = [Odd(seed=0), Odd(seed=0)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = eager(models[rank], store, partial(SGD, lr=0.0))
        for number, inputs in enumerate(batches(3)):
            if number == 1:
                with torch.no_grad():
                    models[rank].bias.fill_(float(rank + 7))
            optimizer.zero_grad()
            backward(models[rank], inputs)
            optimizer.step()

    on_each_worker(2, work)
    assert torch.equal(models[0].bias, torch.full((9,), 7.0))
    assert_same_bits(*models)


# ---- failures ----


def test_a_step_that_waited_in_vain_can_be_taken_again() -> None:
    models = [deep(), deep()]
    before = deep()
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=0, wait_s=0.01), local.connect(rank=1)]
        optimizers = [eager(model, one) for model, one in zip(models, stores, strict=True)]
        models[0](torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(DeadlineExceeded):
            optimizers[0].step()
        assert_same_bits(models[0], before)
        models[1](torch.ones(1, WIDTH)).sum().backward()

        def again() -> None:
            while stores[0].round == 1:
                try:
                    optimizers[0].step()
                except DeadlineExceeded:
                    assert_same_bits(models[0], before)

        in_threads([again, optimizers[1].step])
        assert [one.round for one in stores] == [2, 2]
        for one in stores:
            one.close()
    assert_same_bits(*models)


def be_torn(local: psstore.LocalStore, committed: threading.Barrier) -> None:
    """Rank 0, whose first round rank 1 leaves once both have committed it."""
    model = deep()
    with local.connect(rank=0) as store:
        optimizer = eager(model, store)
        model(torch.ones(1, WIDTH)).sum().backward()
        committed.wait(JOIN_S)
        with pytest.raises(TornRound, match="rank 1"):
            optimizer.step()
        assert_same_bits(model, deep())


def test_a_worker_that_is_lost_in_the_middle_tears_the_round() -> None:
    model = deep()
    committed = threading.Barrier(2)
    with psstore.LocalStore(workers=2) as local:

        def go() -> None:
            with suppress(Lost), local.connect(rank=1) as store:
                optimizer = eager(model, store)  # hooks end with their optimizer
                model(torch.ones(1, WIDTH)).sum().backward()
                committed.wait(JOIN_S)
                until(lambda: store.version == 1)
                assert not optimizer.skipped
                raise Lost

        in_threads([partial(be_torn, local, committed), go])


def test_a_session_that_an_error_ends_in_the_middle_waits_for_nobody() -> None:
    model = deep()
    committed = threading.Barrier(2)
    with psstore.LocalStore(workers=2) as local:

        def go() -> None:
            with suppress(Lost), local.connect(rank=1) as store:
                for _ in session(eager(model, store), log_every_s=None):
                    model(torch.ones(1, WIDTH)).sum().backward()
                    committed.wait(JOIN_S)
                    raise Lost

        in_threads([partial(be_torn, local, committed), go])


class Lost(Exception):
    """Ends a worker."""


# ---- what is refused ----


@pytest.mark.parametrize("mode", ["backup", "ssp", "async"])
def test_other_modes_than_sync_are_refused(mode: str) -> None:
    with (
        psstore.LocalStore(workers=2, mode=mode) as local,
        local.connect(rank=0) as store,
        pytest.raises(UsageError, match="--mode sync"),
    ):
        eager(Odd(), store)


def test_optimizers_without_a_rule_are_refused(store: psstore.Store) -> None:
    with pytest.raises(UsageError, match="no rule for NAdam"):
        eager(Odd(), store, partial(NAdam, lr=0.1))


def test_a_gradient_changed_after_its_hook_is_refused(store: psstore.Store) -> None:
    model = deep()
    optimizer = eager(model, store)
    model(torch.ones(1, WIDTH)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UsageError, match=r"was changed since"):
        optimizer.step()


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_decision_that_is_told_while_it_is_looked_for_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_decided = EarlyRound.is_decided.fget  # type: ignore[attr-defined]

    def slowly(early: EarlyRound) -> bool:
        time.sleep(0.005)  # the other thread runs
        return bool(is_decided(early))

    monkeypatch.setattr(EarlyRound, "is_decided", property(slowly))
    with StoreProcess() as process, psstore.connect(process.url, transport="tcp") as store:
        model, plain = deep(), deep()
        optimizers = {model: eager(model, store), plain: MOMENTUM(plain.parameters())}

        def train() -> None:
            for _ in range(STEPS):
                for each, optimizer in optimizers.items():
                    optimizer.zero_grad()
                    each(torch.ones(2, WIDTH)).square().mean().backward()
                    optimizer.step()

        in_threads([train])
        assert_same_bits(model, plain)


@pytest.mark.parametrize("make", [Odd, deep])
def test_accumulating_without_no_sync_is_refused(store: psstore.Store, make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = eager(model, store)
    for _ in range(2):
        model(torch.ones(1, 5 if make is Odd else WIDTH)).sum().backward()
    with pytest.raises(UsageError, match=r"no_sync\(\)"):
        optimizer.step()


def test_hyper_parameters_changed_before_step_are_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer = eager(model, store)
    backward(model, next(batches(1)))
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(UsageError, match="between backward and step"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()


def test_what_needs_the_gradients_first_or_the_round_over_is_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer, scaler = eager(model, store), GradScaler("cpu")
    saved = optimizer.state_dict()
    scaler.scale(model(next(batches(1))).sum()).backward()
    with pytest.raises(UsageError, match="clip"):
        optimizer.clip_grad_norm_(1.0)
    for call in (optimizer.publish, optimizer.state_dict, partial(optimizer.load_state_dict, saved)):
        with pytest.raises(UsageError, match="after step"):
            call()
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(optimizer)


def test_a_store_that_refuses_by_norm_is_for_gradients_that_are_there() -> None:
    refusal = pytest.raises(UsageError, match=r"leave overlap= out, or start the store without --refuse-norm")
    with psstore.LocalStore(refuse_norm=10.0) as local, local.connect() as store, refusal:
        eager(Odd(seed=0), store)
