"""psstore.torch.GradScaler: torch's scaler, with one outcome for all workers."""

from __future__ import annotations

import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

import psstore
from psstore.errors import DeadlineExceeded, UsageError
from psstore.protocol.decisions import MIN_WEIGHT
from psstore.torch import GradScaler
from tests.torch.support import Odd, assert_same_bits, batches, distributed, on_each_worker

STEPS = 8
OVERFLOWS = (2, 5)
"""Rounds in which the gradients of one worker, or of the process that stands for both, are not finite."""

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, foreach=False)

Scaler = partial(torch.amp.GradScaler, "cpu", init_scale=1024.0, growth_interval=2)
Distributed = partial(GradScaler, "cpu", init_scale=1024.0, growth_interval=2)


def scaled_backward(model: nn.Module, scaler: torch.amp.GradScaler, inputs: torch.Tensor, *, spoil: bool) -> None:
    loss = model(inputs).square().mean() * (torch.inf if spoil else 1.0)
    scaler.scale(loss).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, unscale: bool = False
) -> list[float]:
    """Returns the scales."""
    scales = []
    for number, inputs in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        scaled_backward(model, scaler, inputs, spoil=number in OVERFLOWS)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("unscale", [False, True])
def test_a_worker_alone_trains_as_with_torchs_scaler(store: psstore.Store, unscale: bool) -> None:
    plain, stored = Odd(), Odd()
    scalers = Scaler(), Distributed()
    expected = train(plain, MOMENTUM(plain.parameters()), scalers[0], unscale=unscale)
    assert train(stored, distributed(stored, store, MOMENTUM), scalers[1], unscale=unscale) == expected
    assert len(set(expected)) > 1, "it grows and backs off"
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("unscale", [False, True])
def test_one_workers_overflow_skips_the_round_for_all(unscale: bool) -> None:
    models = [Odd(seed=rank) for rank in range(2)]
    scales: list[list[float]] = [[], []]
    skips: list[list[bool]] = [[], []]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        scaler = Distributed()
        for number, inputs in enumerate(batches(STEPS, seed=100 + rank)):
            optimizer.zero_grad()
            scaled_backward(models[rank], scaler, inputs, spoil=rank == 1 and number in OVERFLOWS)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales[rank].append(scaler.get_scale())
            skips[rank].append(optimizer.skipped)

    on_each_worker(2, work, shards=2)
    expected, expected_scales = one_process()
    assert scales == [expected_scales] * 2
    assert skips == [[number in OVERFLOWS for number in range(STEPS)]] * 2
    for model in models:
        assert_same_bits(model, expected)


def one_process() -> tuple[Odd, list[float]]:
    """Both workers' gradients, averaged, with torch's scaler."""
    model = Odd(seed=0)
    optimizer, scaler = MOMENTUM(model.parameters()), Scaler()
    scales = []
    for number, inputs in enumerate(zip(*[batches(STEPS, seed=100 + rank) for rank in range(2)], strict=True)):
        optimizer.zero_grad()
        for rank, one in enumerate(inputs):
            scaled_backward(model, scaler, one, spoil=rank == 1 and number in OVERFLOWS)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def test_scaled_gradients_are_sent_once(store: psstore.Store) -> None:
    model = Odd()
    optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
    before = store.bytes_pushed
    for inputs in batches(STEPS):
        optimizer.zero_grad()
        scaled_backward(model, scaler, inputs, spoil=False)
        scaler.step(optimizer)
        scaler.update()
    assert store.bytes_pushed - before == STEPS * sum(parameter.nbytes for parameter in model.parameters())


def test_unscaled_gradients_can_be_clipped_together() -> None:
    """And come to what they come to without a scaler and without the rounds that it skips."""
    scaled, plain = ([Odd(seed=rank) for rank in range(2)] for _ in range(2))

    def work(store: psstore.Store, rank: int, *, models: list[Odd], enabled: bool) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        scaler = Distributed(enabled=enabled)
        for number, inputs in enumerate(batches(STEPS, seed=rank)):
            overflows = number in OVERFLOWS
            if overflows and not enabled:
                continue
            optimizer.zero_grad()
            scaled_backward(models[rank], scaler, inputs, spoil=overflows and rank == 0)
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm_(0.02)
            scaler.step(optimizer)
            scaler.update()
            assert (math.isfinite(norm), optimizer.skipped) == (not overflows, overflows)

    on_each_worker(2, partial(work, models=scaled, enabled=True))
    on_each_worker(2, partial(work, models=plain, enabled=False))
    for one, other in zip(scaled, plain, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_nobody_has_samples_for_is_no_overflow(store: psstore.Store, clip: bool) -> None:
    model = Odd()
    optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
    before, scale = [one.detach().clone() for one in model.parameters()], scaler.get_scale()
    optimizer.weight = MIN_WEIGHT
    scaled_backward(model, scaler, next(batches(1)), spoil=False)
    if clip:
        scaler.unscale_(optimizer)
        assert optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True) == 0.0
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), optimizer.skipped) == (scale, False)
    assert all(map(torch.equal, model.parameters(), before)), "nothing is stepped, all the same"


def test_clipping_before_unscaling_is_refused_with_the_remedy(store: psstore.Store) -> None:
    model = Odd()
    optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
    scaled_backward(model, scaler, next(batches(1)), spoil=False)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match=r"scaler\.unscale_\(optimizer\)"):
        scaler.step(optimizer)


def test_gradients_unscaled_and_then_clipped_by_torch_count_as_they_are(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    pairs = (
        (plain, MOMENTUM(plain.parameters()), Scaler()),
        (stored, distributed(stored, store, MOMENTUM), Distributed()),
    )
    for model, optimizer, scaler in pairs:
        for inputs in batches(STEPS):
            optimizer.zero_grad()
            scaled_backward(model, scaler, inputs, spoil=False)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(plain, stored)


def test_torchs_own_scaler_is_refused_and_nothing_of_it_stays(store: psstore.Store) -> None:
    model = Odd()
    optimizer, stock = distributed(model, store, MOMENTUM), Scaler()
    scaled_backward(model, stock, next(batches(1)), spoil=False)
    with pytest.raises(UsageError, match=r"psstore\.torch\.GradScaler"):
        stock.step(optimizer)
    optimizer.zero_grad()
    ours = Distributed()
    scaled_backward(model, ours, next(batches(1)), spoil=False)
    ours.step(optimizer)
    ours.update()


def test_it_serves_other_optimizers_as_torchs_does() -> None:
    one, other = Odd(), Odd()
    assert train(one, MOMENTUM(one.parameters()), Distributed()) == train(other, MOMENTUM(other.parameters()), Scaler())
    assert_same_bits(one, other)


def test_disabled_it_does_nothing(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    for model, optimizer in ((plain, MOMENTUM(plain.parameters())), (stored, distributed(stored, store, MOMENTUM))):
        scaler = GradScaler("cpu", enabled=False)
        assert scaler.get_scale() == 1.0
        for inputs in batches(3):
            optimizer.zero_grad()
            scaled_backward(model, scaler, inputs, spoil=False)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(plain, stored)


def test_its_state_is_torchs_and_it_can_be_pickled(store: psstore.Store) -> None:
    model = Odd()
    scaler = Distributed()
    train(model, distributed(model, store, MOMENTUM), scaler)
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(scaler.state_dict())
    assert stock.get_scale() == scaler.get_scale()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_a_second_step_before_update_is_refused_as_torch_does(store: psstore.Store) -> None:
    model = Odd()
    optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
    scaled_backward(model, scaler, next(batches(1)), spoil=False)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: 0.0)


def test_a_round_without_a_gradient_on_this_worker_still_has_an_outcome(store: psstore.Store) -> None:
    model = Odd()
    optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
    scaled_backward(model, scaler, next(batches(1)), spoil=False)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="without any gradient"):
        scaler.step(optimizer)
    scaler.update()
    assert store.round == 2


def test_a_step_that_waited_in_vain_can_be_taken_again() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=0, wait_s=0.01), local.connect(rank=1)]
        optimizers = [distributed(model, one, MOMENTUM) for model, one in zip(models, stores, strict=True)]
        scalers = [Distributed(), Distributed()]
        for model, scaler in zip(models, scalers, strict=True):
            scaled_backward(model, scaler, next(batches(1)), spoil=False)
        with pytest.raises(DeadlineExceeded):
            scalers[0].step(optimizers[0])
        scalers[1].step(optimizers[1])
        scalers[0].step(optimizers[0])
        for scaler in scalers:
            scaler.update()
        assert [one.round for one in stores] == [2, 2]
        for one in stores:
            one.close()
    assert_same_bits(*models)


def test_an_overflow_is_not_sent_to_a_store_that_refuses_it() -> None:
    model = Odd()
    with psstore.LocalStore(refuse_non_finite=True) as local, local.connect() as store:
        optimizer, scaler = distributed(model, store, MOMENTUM), Distributed()
        scaled_backward(model, scaler, next(batches(1)), spoil=True)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.skipped
        assert scaler.get_scale() == 512.0
    assert_same_bits(model, Odd())
