"""Gradients travel while backward runs: each once, as it is at step(), and nothing else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import psstore
from psstore.errors import StoreClosed, UsageError
from psstore.torch import DistributedOptimizer
from psstore.torch.training import Overflow, Overlap
from tests.torch.support import (
    WIDTH,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    deep,
    distributed,
    in_threads,
    num_bytes,
)

PLAIN = partial(SGD, lr=0.05, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 1) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def pushed_by(store: psstore.Store) -> int:
    store.settle()
    return store.bytes_pushed


# ---- when they are sent ----


def test_large_layers_are_sent_while_backward_runs(store: psstore.Store) -> None:
    """When backward comes to the first layer, those after it have been handed over."""
    model = deep(3)
    optimizer = distributed(model, store, PLAIN)
    before, seen = store.bytes_pushed, []
    first, *others = model.parameters()
    first.register_hook(lambda _: seen.append(pushed_by(store) - before))  # type: ignore[no-untyped-call]
    train(model, optimizer)
    assert seen == [sum(weight.nbytes for weight in others)]


def test_small_layers_wait_for_company(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, PLAIN)
    before = store.bytes_pushed
    backward(model, next(batches(1)))
    assert pushed_by(store) == before
    optimizer.step()
    assert store.bytes_pushed == before + num_bytes(model)


def test_without_overlap_step_sends_all(store: psstore.Store) -> None:
    model = deep(4)
    optimizer = DistributedOptimizer(
        PLAIN(model.parameters()), store, named_parameters=model.named_parameters(), overlap="none"
    )
    before = store.bytes_pushed
    model(torch.ones(1, WIDTH)).sum().backward()
    assert pushed_by(store) == before
    optimizer.step()
    assert store.bytes_pushed == before + num_bytes(model)


def test_what_only_has_to_be_copied_is_left_to_step(store: psstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the shards shared memory with this process."""
    monkeypatch.setattr(psstore.Store, "shares_memory", True)
    model = deep(4)
    optimizer = distributed(model, store, PLAIN)
    before = store.bytes_pushed
    model(torch.ones(1, WIDTH)).sum().backward()
    assert pushed_by(store) == before
    optimizer.step()
    assert store.bytes_pushed == before + num_bytes(model)


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_a_step_moves_each_byte_once_in_each_direction(store: psstore.Store, overlap: Overlap) -> None:
    model = deep(4)
    optimizer = DistributedOptimizer(
        PLAIN(model.parameters()), store, named_parameters=model.named_parameters(), overlap=overlap
    )
    pushed, pulled = store.bytes_pushed, store.bytes_pulled
    train(model, optimizer, steps=3)
    assert store.bytes_pushed - pushed == store.bytes_pulled - pulled == 3 * num_bytes(model)


def test_layers_give_the_same_bits_as_plain_torch(store: psstore.Store) -> None:
    plain, stored = deep(4), deep(4)
    train(plain, PLAIN(plain.parameters()), steps=4)
    train(stored, distributed(stored, store, PLAIN), steps=4)
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("rule", [PLAIN, torch.optim.NAdam], ids=["store", "worker"])
def test_gradients_that_were_made_in_inference_mode_are_sent(store: psstore.Store, rule: OptimizerFactory) -> None:
    plain, stored = deep(4), deep(4)
    for model, optimizer in ((plain, rule(plain.parameters())), (stored, distributed(stored, store, rule))):
        for _ in range(2):
            for parameter in model.parameters():
                with torch.inference_mode():
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert_same_bits(plain, stored)


# ---- what comes back ----


def test_parameters_that_did_not_change_are_not_pulled_again(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, PLAIN)
    inputs = next(batches(1))
    for number in range(3):
        optimizer.zero_grad()
        backward(model, inputs, use_all=False)
        before = store.bytes_pulled
        optimizer.step()
        if number:  # the first step pulls all
            assert store.bytes_pulled - before == num_bytes(model) - model.sometimes.nbytes


def test_what_is_newer_is_asked_only_where_something_may_be_as_it_was(
    store: psstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that question a pull of small tensors goes past the event loop."""
    asked = []
    pull_many: Callable[..., Any] = psstore.Store.pull_many

    def noted(self: psstore.Store, *args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["if_newer_than"])
        return pull_many(self, *args, **kwargs)

    model = Odd()
    optimizer = distributed(model, store, PLAIN)
    monkeypatch.setattr(psstore.Store, "pull_many", noted)
    for use_all in (True, True, False, True):
        optimizer.zero_grad()
        backward(model, next(batches(1)), use_all=use_all)
        optimizer.step()
    optimizer.overflow = Overflow(found=True)
    optimizer.step()
    assert asked == [None, None, 2, None, 4]


def test_a_graph_kept_across_a_step_is_known_to_be_outdated(store: psstore.Store) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = distributed(model, store, PLAIN)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- what counts is what is there at step() ----


def test_a_gradient_that_is_none_at_step_does_not_count(store: psstore.Store) -> None:
    model, plain = deep(2), deep(2)
    optimizer, inner = distributed(model, store, PLAIN), PLAIN(plain.parameters())
    for one, chosen in ((model, optimizer), (plain, inner)):
        one(torch.ones(1, WIDTH)).sum().backward()
        one[1].weight.grad = None
        chosen.step()
    assert_same_bits(model, plain)


@pytest.mark.parametrize("way", ["scaled", "replaced"])
def test_changed_gradients_are_sent_again_and_hooks_give_up(store: psstore.Store, way: str) -> None:
    model, plain = deep(3), deep(3)
    optimizer, inner = distributed(model, store, PLAIN), PLAIN(plain.parameters())
    sent = []
    for _ in range(3):
        before = store.bytes_pushed
        for one, chosen in ((model, optimizer), (plain, inner)):
            chosen.zero_grad()
            one(torch.ones(1, WIDTH)).sum().backward()
            for parameter in one.parameters():
                assert parameter.grad is not None
                if way == "scaled":
                    with torch.no_grad():
                        parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 0.5
            chosen.step()
        sent.append(store.bytes_pushed - before)
    assert_same_bits(model, plain)
    assert sent == [2 * num_bytes(model), num_bytes(model), num_bytes(model)]


def test_gradients_changed_behind_torchs_back_are_noticed(store: psstore.Store) -> None:
    model = deep(2)
    optimizer = distributed(model, store, PLAIN)
    model(torch.ones(1, WIDTH)).sum().backward()
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad.data.clamp_(-1e-3, 1e-3)
    with pytest.raises(UsageError, match=r"'1.weight' was changed behind torch's back.*overlap='none'"):
        optimizer.step()


def test_a_batch_that_is_given_up_leaves_nothing(store: psstore.Store) -> None:
    model, plain = deep(2), deep(2)
    optimizer, inner = distributed(model, store, PLAIN), PLAIN(plain.parameters())
    for one, chosen in ((model, optimizer), (plain, inner)):
        one(torch.full((1, WIDTH), 7.0)).sum().backward()
        chosen.zero_grad()
        one(torch.ones(1, WIDTH)).sum().backward()
        chosen.step()
    assert_same_bits(model, plain)


def test_sparse_gradients_are_sent_dense_with_a_word(store: psstore.Store) -> None:
    model, plain = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2)
    plain.load_state_dict(model.state_dict())
    optimizer, inner = distributed(model, store, PLAIN), PLAIN(plain.parameters())
    model(torch.tensor([1, 1, 3])).sum().backward()
    plain(torch.tensor([1, 1, 3])).sum().backward()
    with pytest.warns(UserWarning, match=r"gradient of 'weight' is sparse"):
        optimizer.step()
    inner.step()
    assert_same_bits(model, plain)


# ---- several optimizers on one store ----


def test_what_one_optimizer_sends_does_not_count_in_the_others_round() -> None:
    """A GAN: the generator's backward fires the discriminator's hooks."""

    def networks() -> tuple[nn.Sequential, nn.Sequential]:
        return deep(1), deep(2)

    def step(generator: nn.Module, critic: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        of_generator, of_critic = optimizers
        noise, real = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
        of_critic.zero_grad()
        (critic(generator(noise).detach()) - critic(real)).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(noise)).mean().backward()
        of_generator.step()

    plain, stored = networks(), networks()
    inner = tuple(PLAIN(network.parameters()) for network in plain)
    with psstore.connect("local://?shards=2") as store:
        outer = tuple(
            DistributedOptimizer(PLAIN(one.parameters()), store, named_parameters=one.named_parameters(), name=name)
            for name, one in zip(("generator", "critic"), stored, strict=True)
        )
        for networks_, optimizers in ((plain, inner), (stored, outer)):
            torch.manual_seed(2)
            for _ in range(4):
                step(*networks_, optimizers)
    for one, other in zip(plain, stored, strict=True):
        assert_same_bits(one, other)


# ---- failures ----


def test_a_closed_store_fails_step_and_not_backward() -> None:
    model = deep(2)
    store = psstore.connect("local://")
    optimizer = distributed(model, store, PLAIN)
    before = copy.deepcopy(model)
    store.close()
    model(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(StoreClosed):
        optimizer.step()
    assert_same_bits(model, before)


# ---- hooks are nobody's burden ----


def test_models_with_hooks_can_be_copied_and_pickled(store: psstore.Store) -> None:
    model = deep(1)
    optimizer = distributed(model, store, PLAIN)
    twin = copy.deepcopy(model)
    assert_same_bits(pickle.loads(pickle.dumps(model)), model)
    torch.save(model, io.BytesIO())
    before = store.bytes_pushed
    twin(torch.ones(1, WIDTH)).sum().backward()
    assert pushed_by(store) == before, "the copy is not trained"
    train(model, optimizer)


def test_hooks_do_not_keep_a_discarded_optimizer_alive(store: psstore.Store) -> None:
    model = deep(1)
    optimizer = distributed(model, store, PLAIN)
    gradients = weakref.ref(optimizer._strategy._gradients)  # type: ignore[attr-defined]
    del optimizer
    gc.collect()
    assert gradients() is None
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())


def test_no_gradient_is_held_after_its_step(store: psstore.Store) -> None:
    model = deep(2)
    optimizer = distributed(model, store, PLAIN)
    model(torch.ones(1, WIDTH)).sum().backward()
    gradients = [weakref.ref(weight.grad) for weight in model.parameters() if weight.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [one() for one in gradients] == [None, None]


def test_backward_in_several_threads_sends_each_layer_once(store: psstore.Store) -> None:
    """As on several devices, whose hooks run in the threads of their own."""
    model = deep(4)
    optimizer = distributed(model, store, PLAIN)
    before = store.bytes_pushed
    in_threads([partial(backward_through, layer) for layer in model])
    optimizer.step()
    assert store.bytes_pushed - before == num_bytes(model)
    plain = deep(4)
    for layer in plain:
        backward_through(layer)
    PLAIN(plain.parameters()).step()
    assert_same_bits(model, plain)


def backward_through(layer: nn.Module) -> None:
    layer(torch.ones(1, WIDTH)).sum().backward()
