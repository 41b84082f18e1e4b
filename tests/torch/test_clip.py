"""Clipping by the global norm of what the workers' gradients come to together, as under DDP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

import psstore
from psstore.errors import DeadlineExceeded, UsageError
from tests.torch.support import Odd, assert_same_bits, backward, batches, distributed, on_each_worker

MAX_NORM = 0.02
STEPS = 6

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, foreach=False)


def clipped_by_hand(parameters: Iterator[nn.Parameter], max_norm: float) -> float:
    """As the store does it: the norm in float64, the factor rounded to the gradient's precision once."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    norm = torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt().item()
    factor = min(1.0, max_norm / (norm + 1e-6))
    for one in gradients:
        one.mul_(torch.tensor(factor, dtype=one.dtype))
    return norm


def one_process(num_workers: int, max_norm: float) -> tuple[Odd, list[float]]:
    model = Odd(seed=0)
    optimizer = MOMENTUM(model.parameters())
    norms = []
    streams = [batches(STEPS, seed=100 + rank) for rank in range(num_workers)]
    for inputs in zip(*streams, strict=True):
        optimizer.zero_grad()
        for one in inputs:
            backward(model, one)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_workers
        norms.append(clipped_by_hand(model.parameters(), max_norm))
        optimizer.step()
    return model, norms


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_clipped_steps_equal_one_process_that_clips_the_average(num_workers: int, shards: int) -> None:
    models = [Odd(seed=rank) for rank in range(num_workers)]
    norms: list[list[float]] = [[] for _ in range(num_workers)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        for inputs in batches(STEPS, seed=100 + rank):
            optimizer.zero_grad()
            backward(models[rank], inputs)
            norm = optimizer.clip_grad_norm_(MAX_NORM)
            assert norm.dim() == 0
            norms[rank].append(norm.item())
            optimizer.step()

    on_each_worker(num_workers, work, shards=shards)
    expected, expected_norms = one_process(num_workers, MAX_NORM)
    assert max(expected_norms) > MAX_NORM
    for model, seen in zip(models, norms, strict=True):
        assert seen == pytest.approx(expected_norms, rel=1e-6)
        assert seen == norms[0]
        assert_same_bits(model, expected)


def test_a_norm_below_the_limit_changes_nothing(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    for inputs in batches(STEPS):
        for model, optimizer in ((plain, inner), (stored, outer)):
            optimizer.zero_grad()
            backward(model, inputs)
        outer.clip_grad_norm_(1e6)
        inner.step()
        outer.step()
    assert_same_bits(plain, stored)


def test_clipping_sends_each_gradient_once_and_tells_nobody_anything(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    before = store.bytes_pushed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in batches(STEPS):
            optimizer.zero_grad()
            backward(model, inputs)
            optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
    assert store.bytes_pushed - before == STEPS * sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("raises", [False, True])
def test_a_norm_that_is_not_finite_skips_the_step_of_all(raises: bool) -> None:
    models = [Odd(seed=0) for _ in range(2)]
    skips: list[list[bool]] = [[], []]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        for number, inputs in enumerate(batches(2, seed=rank)):
            optimizer.zero_grad()
            backward(models[rank], inputs * (torch.inf if (number, rank) == (0, 1) else 1.0))
            if number == 0 and raises:
                with pytest.raises(RuntimeError, match="skipped, by all workers"):
                    optimizer.clip_grad_norm_(MAX_NORM, error_if_nonfinite=True)
            else:
                optimizer.clip_grad_norm_(MAX_NORM)
                optimizer.step()
            skips[rank].append(optimizer.skipped)
            if number == 0:
                assert_same_bits(models[rank], Odd(seed=0))

    on_each_worker(2, work)
    assert skips == [[True, False]] * 2
    assert_same_bits(models[0], models[1])


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_where_rounds_are_one_workers_it_clips_that_workers_gradient(mode: str) -> None:
    plain = Odd(seed=0)
    inner = MOMENTUM(plain.parameters())
    stored = Odd(seed=0)

    def work(store: psstore.Store, rank: int) -> None:
        if rank:
            return
        outer = distributed(stored, store, MOMENTUM)
        for inputs in batches(STEPS):
            for model, optimizer in ((plain, inner), (stored, outer)):
                optimizer.zero_grad()
                backward(model, inputs)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            assert outer.clip_grad_norm_(MAX_NORM) == expected
            inner.step()
            outer.step()

    on_each_worker(2, work, mode=mode)
    assert_same_bits(plain, stored)


def test_clipping_can_be_taken_again_after_a_wait_in_vain() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=0, wait_s=0.01), local.connect(rank=1)]
        optimizers = [distributed(model, one, MOMENTUM) for model, one in zip(models, stores, strict=True)]
        for model in models:
            backward(model, next(batches(1)))
        with pytest.raises(DeadlineExceeded):
            optimizers[0].clip_grad_norm_(MAX_NORM)
        norms = [optimizer.clip_grad_norm_(MAX_NORM) for optimizer in reversed(optimizers)]
        for optimizer in optimizers:
            optimizer.step()
        assert norms[0] == norms[1]
        assert [one.round for one in stores] == [2, 2]
        for one in stores:
            one.close()
    assert_same_bits(*models)


# ---- what is refused ----


def test_clipping_twice_is_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    backward(model, next(batches(1)))
    optimizer.clip_grad_norm_(MAX_NORM)
    with pytest.raises(UsageError, match="twice"):
        optimizer.clip_grad_norm_(MAX_NORM)


def test_a_backward_pass_after_clipping_is_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    backward(model, next(batches(1)))
    optimizer.clip_grad_norm_(MAX_NORM)
    backward(model, next(batches(1)))
    with pytest.raises(UsageError, match="after the last backward"):
        optimizer.step()


def test_a_closure_that_makes_gradients_after_clipping_is_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    backward(model, next(batches(1)))
    optimizer.clip_grad_norm_(MAX_NORM)
    with pytest.raises(UsageError, match="within the closure"):
        optimizer.step(lambda: backward(model, next(batches(1))))


def test_a_closure_without_gradients_may_come_after_clipping(store: psstore.Store) -> None:
    """As Lightning passes one where the module optimises by itself."""
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    for model in (plain, stored):
        backward(model, next(batches(1)))
    clipped_by_hand(plain.parameters(), MAX_NORM)
    inner.step()
    outer.clip_grad_norm_(MAX_NORM)
    assert outer.step(lambda: 3.0) == 3.0
    assert_same_bits(plain, stored)


def test_clipping_within_a_closure_is_fine(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)

    def closure() -> float:
        loss = backward(stored, next(batches(1)))
        outer.clip_grad_norm_(MAX_NORM)
        return loss

    outer.step(closure)
    backward(plain, next(batches(1)))
    clipped_by_hand(plain.parameters(), MAX_NORM)
    inner.step()
    assert_same_bits(plain, stored)


def test_hyper_parameters_changed_after_clipping_are_refused(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, MOMENTUM)
    backward(model, next(batches(1)))
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(UsageError, match="between clip_grad_norm_ and step"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()


def test_other_norms_are_refused(store: psstore.Store) -> None:
    optimizer = distributed(Odd(), store, MOMENTUM)
    with pytest.raises(UsageError, match="2-norm"):
        optimizer.clip_grad_norm_(MAX_NORM, norm_type=1)


def test_clipping_with_backup_workers_is_refused_with_the_reason() -> None:
    with psstore.LocalStore(workers=2, mode="backup") as local, local.connect(rank=0) as store:
        optimizer = distributed(Odd(), store, MOMENTUM)
        with pytest.raises(UsageError, match="late ones"):
            optimizer.clip_grad_norm_(MAX_NORM)
