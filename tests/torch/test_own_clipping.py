"""Who clips one worker's gradient with torch's functions, as under DDP, is told so: here the average is made later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn import utils
from torch.optim import SGD, NAdam

import psstore
from psstore.torch import DistributedOptimizer
from psstore.torch.change_detection import CHECKED_ROUNDS
from tests.torch.support import Odd, assert_same_bits, backward, batches, on_each_worker

Parameters = Iterable[torch.Tensor]
Clip = Callable[[Parameters], object]

STEPS = 3
PLAIN = partial(SGD, lr=0.05, foreach=False)


def by_accelerate(parameters: Parameters) -> None:
    """As Hugging Face's Trainer does."""
    accelerate: Any = import_module("accelerate")
    accelerate.Accelerator(cpu=True).clip_grad_norm_(parameters, 0.01)


CLIPS: dict[str, Clip] = {
    "norm": lambda parameters: utils.clip_grad_norm_(parameters, 0.01),
    "norm, one by one": lambda parameters: utils.clip_grad_norm_(parameters, 0.01, foreach=False),
    "value": lambda parameters: utils.clip_grad_value_(parameters, 0.001),
    "accelerate": by_accelerate,
}


def told_while_training(
    clip: Clip | None,
    *,
    num_workers: int = 2,
    mode: str = "sync",
    rule: Any = PLAIN,
    steps: int = STEPS,
    **options: Any,
) -> list[str]:
    """The warnings of all workers."""
    models = [Odd(seed=rank) for rank in range(num_workers)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = DistributedOptimizer(rule(model.parameters()), store, model.named_parameters(), **options)
        stream = batches(2 * steps, seed=rank)
        for first, second in zip(stream, stream, strict=True):
            optimizer.zero_grad(set_to_none=False)
            with optimizer.no_sync() if options.get("overlap") != "eager" else nullcontext():
                backward(model, first)
            if options.get("overlap") != "eager":
                backward(model, second)
            if clip is not None:
                clip(model.parameters())
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_each_worker(num_workers, work, mode=mode)
    if mode == "sync" and options.get("mode") != "average":
        for model in models:
            assert_same_bits(model, models[0])
    return [str(one.message) for one in caught if "changed after backward" in str(one.message)]


@pytest.mark.parametrize("overlap", ["backward", "none"])
@pytest.mark.parametrize("clip", CLIPS)
def test_workers_that_clip_their_own_gradient_are_told_what_to_write_instead_once(clip: str, overlap: str) -> None:
    if clip == "accelerate":
        pytest.importorskip("accelerate").Accelerator(cpu=True)  # before warnings are caught: it sets their filters
    told = told_while_training(CLIPS[clip], overlap=overlap)
    assert len(told) == 2, "one for each worker"
    for message in told:
        assert "optimizer.clip_grad_norm_(max_norm)" in message
        assert ("no longer backward" in message) == (overlap == "backward")


def test_over_shared_memory_they_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the shards shared memory with this process."""
    monkeypatch.setattr(psstore.Store, "shares_memory", True)
    assert len(told_while_training(CLIPS["norm"])) == 2


def test_where_the_workers_step_they_are_told_too() -> None:
    assert len(told_while_training(CLIPS["norm"], rule=partial(NAdam, lr=0.01), overlap="none")) == 2


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"mode": "ssp"}, {"mode": "async"}],
    ids=["a worker alone", "ssp", "async"],
)
@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_nobody_is_told_where_it_is_one_workers_step(overlap: str, options: dict[str, Any]) -> None:
    assert told_while_training(CLIPS["norm"], overlap=overlap, **options) == []


@pytest.mark.parametrize("overlap", ["backward", "none", "eager"])
def test_nobody_is_told_who_clips_nothing(overlap: str) -> None:
    assert told_while_training(None, overlap=overlap, steps=CHECKED_ROUNDS + 2) == []


def test_no_hook_stays_where_gradients_are_sent_by_step() -> None:
    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        optimizer = DistributedOptimizer(PLAIN(model.parameters()), store, model.named_parameters(), overlap="none")
        for number, inputs in enumerate(batches(CHECKED_ROUNDS + 1)):
            assert bool(model.bias._post_accumulate_grad_hooks) == (number < CHECKED_ROUNDS)
            backward(model, inputs)
            optimizer.step()

    on_each_worker(2, work)


def test_a_worker_alone_gets_plain_torchs_bits() -> None:
    models = [Odd(), Odd()]
    with psstore.connect("local://") as store:
        inner = PLAIN(models[0].parameters())
        outer = DistributedOptimizer(PLAIN(models[1].parameters()), store, models[1].named_parameters(), overlap="none")
        for model, optimizer in zip(models, (inner, outer), strict=True):
            for inputs in batches(STEPS):
                optimizer.zero_grad()
                backward(model, inputs)
                CLIPS["norm"](model.parameters())
                optimizer.step()
    assert_same_bits(*models)
