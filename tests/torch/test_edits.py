"""Weights that are edited outside step(): noticed, made everybody's if they are rank 0's, and never lost in silence."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, AdamW

import psstore
from psstore.errors import UsageError
from psstore.torch import parameters
from tests.torch.support import Odd, assert_same_bits, backward, batches, distributed, on_each_worker

pytestmark = pytest.mark.filterwarnings("ignore:step\\(\\) without any gradient")

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, foreach=False)


def train(model: Odd, optimizer: torch.optim.Optimizer, steps: int, *, seed: int = 1, after: object = None) -> None:
    for inputs in batches(steps, seed=seed):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()
        if callable(after):
            after(model)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def load_others(model: nn.Module) -> None:
    model.load_state_dict(Odd(seed=8).state_dict())


def replace_data(model: Odd) -> None:
    model.first.data = model.first.data * 2


EDITS: dict[str, Callable[[Odd], None]] = {
    "under no_grad": clamp,
    "load_state_dict": load_others,
    "new data": replace_data,
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_counts_as_in_plain_torch(store: psstore.Store, edit: str) -> None:
    plain, stored = Odd(), Odd()
    local, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, 3)
        EDITS[edit](model)
    with pytest.warns(UserWarning, match=r"edited since the last step\(\): 'first'.*publish\(\)"):
        train(stored, outer, 3, seed=2)
    train(plain, local, 3, seed=2)
    assert_same_bits(plain, stored)


def test_an_edit_after_every_step_is_told_of_once(store: psstore.Store) -> None:
    """As a critic's weights are clamped."""
    plain, stored = Odd(), Odd()
    with pytest.warns(UserWarning, match="edited") as told:
        train(stored, distributed(stored, store, MOMENTUM), 6, after=clamp)
    assert len(told) == 1
    assert told[0].filename == __file__
    train(plain, MOMENTUM(plain.parameters()), 6, after=clamp)
    assert_same_bits(plain, stored)


def test_weights_that_were_exchanged_and_put_back_are_no_edit(store: psstore.Store) -> None:
    """As averaged weights are, for an evaluation: half-precision weights would lose their masters' low bits."""
    stored, other = Odd(dtype=torch.bfloat16), Odd(dtype=torch.bfloat16)
    outer = distributed(stored, store, partial(SGD, lr=1e-3))
    with psstore.connect("local://") as second, warnings.catch_warnings():
        warnings.simplefilter("error")
        undisturbed = distributed(other, second, partial(SGD, lr=1e-3))
        for inputs in batches(10, dtype=torch.bfloat16):
            for model, optimizer in ((stored, outer), (other, undisturbed)):
                optimizer.zero_grad()
                backward(model, inputs)
                optimizer.step()
            own = {name: value.clone() for name, value in stored.state_dict().items()}
            load_others(stored)
            stored.load_state_dict(own)
        for name, _ in stored.named_parameters():
            assert torch.equal(torch.from_numpy(store.pull(name)), torch.from_numpy(second.pull(name)))


def test_an_edit_that_torch_does_not_count_is_refused_with_the_way_out(store: psstore.Store) -> None:
    stored = Odd()
    outer = distributed(stored, store, MOMENTUM)
    train(stored, outer, 3)
    stored.first.data.mul_(2)
    with pytest.raises(UsageError, match=r"behind torch's back \('first'\).*torch\.no_grad\(\)"):
        train(stored, outer, 1)


def test_publish_takes_over_what_torch_does_not_count(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, 3)
        model.first.data.mul_(2)
    outer.publish()
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, 3, seed=2)
    assert_same_bits(plain, stored)


def test_rank_0s_edit_is_everybodys_and_others_give_way() -> None:
    models = [Odd(seed=rank) for rank in range(2)]
    barrier = threading.Barrier(2)

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, partial(AdamW, lr=0.01))
        train(models[rank], outer, 2)
        models[rank].load_state_dict(Odd(seed=10 + rank).state_dict())
        outer.optimizer.zero_grad()
        barrier.wait()
        outer.step()

    with pytest.warns(UserWarning, match="edited") as told:
        on_each_worker(2, work, shards=2)
    said = sorted(str(one.message) for one in told if "edited" in str(one.message))
    assert len(said) == 2
    assert "these edits are published" in said[0]
    assert "these edits give way to rank 0's" in said[1]
    for model in models:
        assert_same_bits(model, Odd(seed=10))


def test_an_edit_on_another_rank_alone_gives_way() -> None:
    """Also for what has no gradient in that round, and so does not travel by itself."""
    models = [Odd(seed=0) for _ in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, partial(AdamW, lr=0.01))
        train(models[rank], outer, 2)
        if rank == 1:
            clamp(models[rank])
        outer.zero_grad()
        outer.step()

    with pytest.warns(UserWarning, match="give way to rank 0's"):
        on_each_worker(2, work)
    assert_same_bits(*models)
    assert models[0].first.abs().max() > 0.2


def test_publish_makes_rank_0s_weights_everybodys_at_once() -> None:
    models = [Odd(seed=0) for _ in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, MOMENTUM)
        train(models[rank], outer, 2)
        models[rank].load_state_dict(Odd(seed=10 + rank).state_dict())
        outer.publish()
        assert_same_bits(models[rank], Odd(seed=10))

    on_each_worker(2, work)


def test_an_edit_is_published_where_workers_do_not_wait_for_each_other() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    with (
        psstore.LocalStore(workers=2, mode="async") as local,
        local.connect(rank=0) as first,
        local.connect(rank=1) as second,
    ):
        pairs = zip(models, (first, second), strict=True)
        optimizers = [distributed(model, store, MOMENTUM) for model, store in pairs]
        load_others(models[0])
        train(models[1], optimizers[1], 1)
        with pytest.warns(UserWarning, match="these edits are published"):
            optimizers[0].step()
        optimizers[1].zero_grad()
        optimizers[1].step()
    for model in models:
        assert_same_bits(model, Odd(seed=8))


def test_a_model_converted_after_wrapping_is_refused_by_name(store: psstore.Store) -> None:
    stored = Odd()
    outer = distributed(stored, store, MOMENTUM)
    train(stored, outer, 1)
    stored.double()
    outer.zero_grad()
    with pytest.raises(UsageError, match=r"'first' was float32 \(17, 5\) on cpu .* is float64 .*convert"):
        outer.step()


def test_a_parameter_of_another_shape_is_refused_by_name(store: psstore.Store) -> None:
    stored = Odd()
    outer = distributed(stored, store, MOMENTUM)
    stored.bias.data = stored.bias.data[:4]
    with pytest.raises(UsageError, match=r"'bias' was float32 \(9,\).*is float32 \(4,\).*reshape"):
        outer.step()


def test_autograd_is_told_of_what_is_written_where_torch_is_told_of_one_tensor_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is in 2.4."""

    def tell_of_one(tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")
        increment_version(tensor)

    monkeypatch.setattr(parameters, "increment_version", tell_of_one)
    monkeypatch.setattr(parameters, "_marks_many", parameters._marks_many.__wrapped__)
    written = [torch.zeros(1), torch.zeros(1)]
    parameters.mark_written(written)
    assert [one._version for one in written] == [1, 1]
