"""Model averaging with a quorum or compression: what travels is what has become of the parameters since the last
average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import psstore
from psstore.errors import DeadlineExceeded, RuleMismatch, UsageError
from psstore.torch import Compression, DistributedOptimizer, session
from tests.support.server_process import StoreProcess
from tests.torch.support import Odd, assert_same_bits, backward, batches, in_threads, on_each_worker

EVERY = 3
STEPS = 7

UNCODED = "int8"
"""Asks for differences, and leaves an `Odd` as it is: its tensors are too small for a codec."""

CODED = Compression("int8", min_elems=1)

keeps_state = pytest.mark.filterwarnings("ignore:this worker keeps optimizer state:UserWarning")


def averaging(
    model: nn.Module, store: psstore.Store, inner: Optimizer | None = None, *, every: int = EVERY, **options: Any
) -> DistributedOptimizer:
    """Of an optimizer that moves nothing, unless another one is given."""
    inner = SGD(model.parameters(), lr=0.0) if inner is None else inner
    return DistributedOptimizer(inner, store, model.named_parameters(), mode="average", every=every, **options)


def train(model: Odd, optimizer: Optimizer, steps: int, *, seed: int = 1) -> None:
    for inputs in batches(steps, seed=seed):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()


def move(model: Odd, by: float) -> None:
    with torch.no_grad():
        model.bias.add_(by)


def step_each(optimizers: list[DistributedOptimizer], *ranks: int) -> None:
    in_threads([optimizers[rank].step for rank in ranks])


class Three:
    """Workers of whom two make a round, and a model of each: their steps move nothing."""

    def __init__(self, store: psstore.LocalStore, *, every: int, **options: Any) -> None:
        self.models = [Odd() for _ in range(3)]
        self.begun = self.models[0].bias.detach().clone()
        self.optimizers = [
            averaging(model, store.connect(rank=rank), every=every, **options) for rank, model in enumerate(self.models)
        ]
        for model in self.models:
            backward(model, next(batches(1)))

    def step(self, *ranks: int) -> None:
        step_each(self.optimizers, *ranks)

    def synchronize(self, *ranks: int) -> None:
        in_threads([self.optimizers[rank].synchronize for rank in ranks])

    def check(self, rank: int, moved: float) -> None:
        torch.testing.assert_close(self.models[rank].bias, self.begun + moved, rtol=0, atol=1e-6)


@pytest.fixture
def patient() -> Iterator[psstore.LocalStore]:
    """Rounds that wait for nobody once they have two of three workers."""
    with psstore.LocalStore(workers=3, mode="backup", backups=1, grace_s=0.0) as store:
        yield store


# ---- with a quorum ----


@pytest.mark.parametrize("compression", [None, UNCODED])
def test_nobody_waits_for_a_slow_worker_whose_steps_count_when_it_comes(
    patient: psstore.LocalStore, compression: str | None
) -> None:
    three = Three(patient, every=2, compression=compression)
    move(three.models[2], 0.5)
    three.optimizers[2].step()
    for _ in range(3):
        for model in three.models[:2]:
            move(model, 1.0)
        three.step(0, 1)
        three.step(0, 1)
    assert three.optimizers[0].store.version == 3
    three.check(0, 3.0)
    move(three.models[2], 0.5)  # its steps of before and of now are a contribution to the fourth average
    three.step(0)
    three.step(0, 2)
    assert three.optimizers[2].store.version == 4
    for rank in (0, 2):
        three.check(rank, 3.5)


def test_who_comes_in_a_lost_workers_place_begins_with_the_average_and_counts(patient: psstore.LocalStore) -> None:
    three = Three(patient, every=1)
    move(three.models[2], 8.0)
    three.optimizers[2].store.end(leave=False)
    move(three.models[0], 1.0)
    move(three.models[1], 1.0)
    three.step(0, 1)
    three.check(0, 1.0)
    model = three.models[2] = Odd(seed=3)
    three.optimizers[2] = averaging(model, patient.connect(rank=2), every=1)
    three.check(2, 1.0)
    backward(model, next(batches(1)))
    move(model, 4.0)
    three.step(1, 2)
    for rank in (1, 2):
        three.check(rank, 3.0)


def test_workers_of_more_samples_count_for_more_of_those_who_are_there(patient: psstore.LocalStore) -> None:
    three = Three(patient, every=1)
    for rank, samples in enumerate((32, 96, 8)):
        three.optimizers[rank].weight = samples
    move(three.models[1], 1.0)
    move(three.models[2], 1.0)
    three.step(0, 1)
    three.check(0, 0.75)
    three.step(0, 2)
    for rank in (0, 2):
        three.check(rank, 0.75 + 0.2)


@pytest.mark.parametrize("late", [False, True])
def test_synchronize_averages_steps_that_none_has_shared(patient: psstore.LocalStore, *, late: bool) -> None:
    three = Three(patient, every=8)
    if late:
        three.synchronize(0, 1)
    for model in three.models:
        move(model, 1.0)
    three.step(2)
    move(three.models[0], 1.0)
    three.step(0)
    three.synchronize(0, 2)
    for rank in (0, 2):
        three.check(rank, 1.5)
    assert three.optimizers[0].store.version == 1 + late


def test_synchronize_takes_another_round_where_it_came_too_late_for_one(
    patient: psstore.LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = Three(patient, every=8)
    move(three.models[2], 1.0)
    three.step(2)
    three.synchronize(0, 1)
    strategy = three.optimizers[2]._strategy
    found = [three.optimizers[2].store.round]  # at first it finds the round open that is decided by now
    look = strategy._open_round  # type: ignore[attr-defined]
    monkeypatch.setattr(strategy, "_open_round", lambda: found.pop() if found else look())
    three.synchronize(0, 2)
    for rank in (0, 2):
        three.check(rank, 0.5)


@keeps_state
def test_a_session_ends_at_its_version_with_a_quorum() -> None:
    versions: list[int] = []

    def work(store: psstore.Store) -> None:
        model = Odd()
        optimizer = averaging(model, store, SGD(model.parameters(), lr=0.1), every=2)
        for number, _ in enumerate(session(optimizer, stop_at=4, log_every_s=None)):
            optimizer.zero_grad()
            backward(model, next(batches(1, seed=number)))
            optimizer.step()
        versions.append(store.version)

    with psstore.LocalStore(workers=3, mode="backup", backups=1, grace_s=0.0) as local, ExitStack() as stack:
        stores = [stack.enter_context(local.connect(rank=rank)) for rank in range(3)]
        in_threads([partial(work, store) for store in stores])
    assert versions == [4, 4, 4]


def test_a_bound_of_the_norm_is_each_workers_own(patient: psstore.LocalStore) -> None:
    plain, model = Odd(), Odd()
    inner = SGD(plain.parameters(), lr=0.1)
    optimizer = averaging(model, patient.connect(rank=0), SGD(model.parameters(), lr=0.1), max_norm=0.1)
    for inputs in batches(EVERY - 1):
        for one, stepping in ((plain, inner), (model, optimizer)):
            stepping.zero_grad()
            backward(one, inputs)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        inner.step()
        optimizer.step()
    assert_same_bits(plain, model)


# ---- with compression ----


def test_what_a_codec_loses_comes_later_so_that_averages_stay_near() -> None:
    """Of each block an element moves so much that the others' moves are less than half of a step of int8: a codec that
    forgot them would leave them where they are."""
    rounds, least = 60, 1e-4
    moves = torch.full((2, 4, 256), least)
    moves[:, :, 0] = 0.05
    moves[1] *= 3.0
    models = [nn.Linear(256, 4, bias=False) for _ in range(2)]
    begun = models[0].weight.detach().double()
    pushed: list[int] = []

    def work(store: psstore.Store, rank: int) -> None:
        weight = models[rank].weight
        optimizer = averaging(models[rank], store, every=1, compression=CODED)
        before = store.bytes_pushed
        for number in range(1, rounds + 1):
            with torch.no_grad():
                weight.add_(moves[rank])
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            exact = begun + number * moves.double().mean(dim=0)
            assert (weight.detach() - exact).abs().max() < 2 * 0.15 / 127, "of both ways the loss of one round"
        pushed.append(store.bytes_pushed - before)
        assert optimizer.residuals()

    on_each_worker(2, work, shards=2)
    assert rounds * least > 2 * 0.15 / 127
    assert torch.equal(models[0].weight, models[1].weight)
    assert max(pushed) < 0.26 * rounds * 4 * begun.numel()


def test_without_a_codec_for_small_tensors_it_is_the_plain_average_but_for_a_rounding() -> None:
    trained: dict[str | None, list[Odd]] = {}

    def work(store: psstore.Store, rank: int, compression: str | None) -> None:
        model = trained[compression][rank]
        optimizer = averaging(model, store, AdamW(model.parameters(), lr=0.01), compression=compression)
        train(model, optimizer, STEPS, seed=rank)
        assert store.version == STEPS // EVERY
        optimizer.synchronize()
        train(model, optimizer, EVERY - 1, seed=10 + rank)
        assert store.version == STEPS // EVERY + 1, "the next one is `every` steps after that"
        optimizer.synchronize()

    for compression in (None, UNCODED):
        trained[compression] = [Odd(seed=rank) for rank in range(2)]
        on_each_worker(2, partial(work, compression=compression))
    for one, *others in zip(*(model.parameters() for models in trained.values() for model in models), strict=True):
        for other in others:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_a_group_may_have_its_own_compression() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "compression": "int8"},
        {"params": model[1].parameters()},
    ]
    with psstore.connect("local://") as store:
        optimizer = averaging(model, store, SGD(groups, lr=0.1), every=1)
        before = store.bytes_pushed
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert store.bytes_pushed - before < 1.3 * 4 * 64 * 64
        assert list(optimizer.residuals()) == [0]


def test_medians_are_of_the_differences() -> None:
    models, begun = [Odd() for _ in range(3)], Odd()

    def work(store: psstore.Store, rank: int) -> None:
        inner = SGD([{"params": models[rank].parameters(), "reduction": "median"}], lr=0.0)
        optimizer = averaging(models[rank], store, inner, every=1, compression=UNCODED)
        backward(models[rank], next(batches(1)))
        move(models[rank], (1e6, 0.25, 0.5)[rank])
        optimizer.step()

    on_each_worker(3, work)
    for model in models:
        torch.testing.assert_close(model.bias, begun.bias + 0.5, rtol=0, atol=1e-6)


# ---- where it goes on ----


@pytest.mark.parametrize("compression", [None, "push=int8"], ids=["whole", "int8"])
def test_a_worker_goes_on_from_its_state_dict(compression: str | None) -> None:
    """In the middle between two averages, with what its codec has kept back."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def learn(model: nn.Module, optimizer: Optimizer, begin: int, end: int) -> None:
        for number in range(begin, end):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(number)
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()

    def adamw(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=0.01)

    plain, first, second = net(), net(), net()
    with psstore.connect("local://") as store:
        learn(plain, averaging(plain, store, adamw(plain), compression=compression), 0, 3 * EVERY)
        rounds = store.version
    with psstore.LocalStore() as local:
        with local.connect() as store:
            optimizer = averaging(first, store, adamw(first), compression=compression)
            learn(first, optimizer, 0, EVERY + 2)
            saved = deepcopy((first.state_dict(), optimizer.state_dict()))
        with local.connect() as store:
            with pytest.warns(UserWarning, match="has trained"):
                optimizer = averaging(second, store, adamw(second), compression=compression)
            second.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            learn(second, optimizer, EVERY + 2, 3 * EVERY)
            assert store.version == rounds
    assert_same_bits(second, plain)
    adamw(plain).load_state_dict(saved[1])  # the wrapped optimizer's class takes it, too


def test_a_state_dict_of_either_way_goes_on_in_the_other() -> None:
    model = Odd()
    for before, after in ((None, UNCODED), (UNCODED, None)):
        with psstore.connect("local://") as store:
            optimizer = averaging(model, store, compression=before)
            train(model, optimizer, EVERY - 1)
            saved = optimizer.state_dict()
        with psstore.connect("local://") as store:
            optimizer = averaging(model, store, compression=after)
            optimizer.load_state_dict(saved)
            train(model, optimizer, 1)
            assert store.version == 1


@keeps_state
def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_the_store(tmp_path: Path) -> None:
    """The average is in the store, what codecs kept back is handed in, and plain SGD has no state here."""

    def train_to(version: int, place: str) -> Odd:
        flags = ("--checkpoint", str(tmp_path / place), "--restore", "auto", "--checkpoint-every", "1000000")
        with StoreProcess(*flags) as process, psstore.connect(process.url) as store:
            model = Odd(seed=store.version)
            compression = Compression("int8", "none", min_elems=1)
            optimizer = averaging(model, store, SGD(model.parameters(), lr=0.1), every=2, compression=compression)
            done = optimizer.checkpoint_state
            for _ in session(optimizer, stop_at=version, log_every_s=None):
                done = optimizer.checkpoint_state
                done["steps"] = done.get("steps", 0) + 1
                optimizer.zero_grad()
                backward(model, next(batches(1, seed=done["steps"])))
                optimizer.step()
            assert done["steps"] == 2 * version
            assert any(kept.abs().max() > 0 for kept in optimizer.residuals().values() if kept.numel())
        return model

    train_to(2, "stopped")
    assert_same_bits(train_to(4, "stopped"), train_to(4, "undisturbed"))


@pytest.mark.parametrize("compression", [None, UNCODED])
def test_a_round_that_failed_goes_on_with_the_next_step_and_loses_none(compression: str | None) -> None:
    models = [Odd() for _ in range(2)]
    with psstore.LocalStore(workers=2) as local:
        stores = [local.connect(rank=0, wait_s=0.01), local.connect(rank=1)]
        optimizers = [
            averaging(model, store, SGD(model.parameters(), lr=1.0), every=2, compression=compression)
            for model, store in zip(models, stores, strict=True)
        ]
        begun = models[0].bias.detach().clone()

        def step(rank: int, *, by: float) -> None:
            for parameter in models[rank].parameters():
                parameter.grad = torch.full_like(parameter, -by)
            optimizers[rank].step()

        step(0, by=1.0)
        with pytest.raises(DeadlineExceeded):
            step(0, by=1.0)
        step(1, by=2.0)
        step_of_1 = partial(step, 1, by=2.0)
        in_threads([step_of_1, partial(_until_it_steps, partial(step, 0, by=0.5))])
        torch.testing.assert_close(models[1].bias, begun + 3.0, rtol=0, atol=1e-6)
        torch.testing.assert_close(models[0].bias, begun + 3.5, rtol=0, atol=1e-6)


@pytest.mark.parametrize("compression", [None, UNCODED])
def test_a_step_whose_round_failed_is_taken_once_though_it_is_asked_for_again(compression: str | None) -> None:
    """And clipped once: the step after it, by momentum, is that of a worker whose rounds don't fail."""

    def train_both(*, fails: bool) -> list[Odd]:
        models = [Odd(seed=rank) for rank in range(2)]
        with psstore.LocalStore(workers=2) as local:
            stores = [local.connect(rank=0, wait_s=0.01 if fails else 60.0), local.connect(rank=1)]
            optimizers = [
                averaging(
                    model,
                    store,
                    SGD(model.parameters(), lr=0.1, momentum=0.5),
                    every=2,
                    compression=compression,
                    max_norm=0.1,
                )
                for model, store in zip(models, stores, strict=True)
            ]

            def step(rank: int, *, seed: int) -> None:
                optimizers[rank].zero_grad()
                backward(models[rank], next(batches(1, seed=seed)))
                optimizers[rank].step()

            step(0, seed=1)
            step(1, seed=2)
            last_of_0: Callable[[], object] = partial(step, 0, seed=3)
            if fails:
                with pytest.raises(DeadlineExceeded):
                    last_of_0()
                last_of_0 = partial(_until_it_steps, optimizers[0].step)
            in_threads([partial(step, 1, seed=4), last_of_0])
            step(0, seed=5)
        return models

    for disturbed, undisturbed in zip(train_both(fails=True), train_both(fails=False), strict=True):
        assert_same_bits(disturbed, undisturbed)


def _until_it_steps(step: Callable[[], object]) -> None:
    while True:
        try:
            step()
            return
        except DeadlineExceeded:
            pass


# ---- what is refused ----


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_rounds_that_are_each_workers_own_are_refused_by_name(mode: str) -> None:
    with (
        psstore.LocalStore(workers=2, mode=mode) as local,
        local.connect(rank=0) as store,
        pytest.raises(UsageError, match=rf"in mode '{mode}', .* --quorum and --grace-s, .* psstore\.torch\.DiLoCo"),
    ):
        averaging(Odd(), store)


def test_a_worker_that_averages_otherwise_than_the_others_is_refused() -> None:
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as store, local.connect(rank=1) as other:
        averaging(Odd(), store, compression=UNCODED)
        with pytest.raises(RuleMismatch, match="compression is for all workers or for none"):
            averaging(Odd(), other)
        with pytest.raises(UsageError, match="every=5 here and 3 there"):
            averaging(Odd(), other, every=5, compression=UNCODED)
        averaging(Odd(), other, compression=UNCODED)


def test_a_worker_that_compresses_where_the_others_do_not_is_refused() -> None:
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as store, local.connect(rank=1) as other:
        averaging(Odd(), store)
        with pytest.raises(RuleMismatch, match="compression is for all workers or for none"):
            averaging(Odd(), other, compression=UNCODED)


def test_what_can_not_be_averaged_by_differences_is_refused(patient: psstore.LocalStore) -> None:
    model = Odd()
    model.scale.requires_grad_(False)
    store = patient.connect(rank=0)
    with pytest.raises(UsageError, match="every is 0"):
        averaging(model, store, every=0)
    with pytest.raises(UsageError, match="average=False"):
        averaging(model, store, average=False)
    groups: list[dict[str, Any]] = [{"params": [model.bias], "reduction": "median"}, {"params": [model.first]}]
    with pytest.raises(UsageError, match="other reductions than the first, 'median'"):
        averaging(model, store, SGD(groups, lr=0.1))
    with pytest.raises(UsageError, match="float64"):
        averaging(Odd(dtype=torch.float64), store, compression=CODED)
    optimizer = averaging(model, store)
    model.scale.requires_grad_(True)
    with pytest.raises(UsageError, match=r"'scale' came to be trained after .*: make the optimizer anew"):
        train(model, optimizer, 1)


def test_a_training_that_was_stopped_averages_no_more() -> None:
    """And does not wait for a round that counts."""
    with psstore.LocalStore(workers=1) as local, local.connect(rank=0) as store:
        model = Odd()
        optimizer = averaging(model, store, compression=UNCODED)
        train(model, optimizer, EVERY)
        store.stop()
        in_threads([optimizer.synchronize])
        train(model, optimizer, 1)
        in_threads([optimizer.synchronize])
        assert store.stopped
