"""Several workers: the first one's values count, synchronous rounds are exact, and no gradient is no hang."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.optim import SGD

import psstore
from psstore.errors import UsageError, WorkerLost
from tests.torch.support import (
    JOIN_S,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    distributed,
    in_threads,
    on_each_worker,
)

STEPS = 12

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def one_process(num_workers: int, *, average: bool = True) -> Odd:
    """Each round: the micro-batches of all ranks, in rank order, summed and divided."""
    model = Odd(seed=0)
    optimizer = MOMENTUM(model.parameters())
    streams = [batches(STEPS, seed=100 + rank) for rank in range(num_workers)]
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank, stream in enumerate(streams):
            backward(model, next(stream), use_all=uses_all(number, rank))
        for parameter in model.parameters():
            if parameter.grad is not None and average:
                parameter.grad /= num_workers
        optimizer.step()
    return model


def uses_all(number: int, rank: int) -> bool:
    """In some rounds one worker has no gradient for one parameter, in some rounds no worker has."""
    return number % 4 != 3 and (number + rank) % 3 != 0


def test_step_that_is_taken_again_waits_for_a_lost_workers_replacement() -> None:
    models = [Odd(seed=0) for _ in range(3)]
    inputs = next(batches(1, seed=1))

    def prepared(store: psstore.Store, life: int) -> psstore.torch.DistributedOptimizer:
        optimizer = distributed(models[life], store, MOMENTUM)
        backward(models[life], inputs)
        return optimizer

    def fail(store: psstore.Store) -> None:
        with store:
            prepared(store, 1)
            raise ZeroDivisionError

    with psstore.LocalStore(workers=2) as server, ThreadPoolExecutor(2) as pool:
        survivor = pool.submit(prepared, server.connect(rank=0), 0)
        with pytest.raises(ZeroDivisionError):
            pool.submit(fail, server.connect(rank=1)).result(JOIN_S)
        optimizer = survivor.result(JOIN_S)
        with pytest.raises(WorkerLost, match="rank 1"):
            optimizer.step()
        again = pool.submit(optimizer.step)
        with server.connect(rank=1) as heir:
            prepared(heir, 2).step()
        again.result(JOIN_S)
    assert_same_bits(models[0], models[2])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_synchronous_workers_equal_one_process_bit_for_bit(num_workers: int, shards: int) -> None:
    models = [Odd(seed=rank) for rank in range(num_workers)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        for number, inputs in enumerate(batches(STEPS, seed=100 + rank)):
            optimizer.zero_grad()
            backward(models[rank], inputs, use_all=uses_all(number, rank))
            optimizer.step()

    on_each_worker(num_workers, work, shards=shards)
    expected = one_process(num_workers)
    for model in models:
        assert_same_bits(model, expected)


def test_average_can_be_left_out() -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = psstore.torch.DistributedOptimizer(
            MOMENTUM(models[rank].parameters()),
            store,
            named_parameters=models[rank].named_parameters(),
            average=False,
        )
        for number, inputs in enumerate(batches(STEPS, seed=100 + rank)):
            optimizer.zero_grad()
            backward(models[rank], inputs, use_all=uses_all(number, rank))
            optimizer.step()

    on_each_worker(2, work)
    assert_same_bits(models[1], one_process(2, average=False))


def test_every_worker_starts_with_the_values_of_rank_0() -> None:
    models = [Odd(seed=rank) for rank in range(3)]

    def work(store: psstore.Store, rank: int) -> None:
        distributed(models[rank], store, MOMENTUM)

    on_each_worker(3, work, shards=2)
    for model in models:
        assert_same_bits(model, Odd(seed=0))


def test_a_late_backup_worker_only_catches_up() -> None:
    """Its gradients, though pushed, change nothing; it then has what the others have."""
    models = [Odd(seed=0) for _ in range(3)]
    with psstore.LocalStore(shards=2, workers=3, mode="backup") as local:
        stores = [local.connect(rank=rank) for rank in range(3)]
        optimizers = [distributed(model, store, MOMENTUM) for model, store in zip(models, stores, strict=True)]
        inputs = next(batches(1))
        late = models[2]
        for model in models:
            backward(model, inputs * (1e3 if model is late else 1.0))
        in_threads([optimizers[0].step, optimizers[1].step])
        optimizers[2].step()
        assert stores[2].round == stores[0].round == 2
        for store in stores:
            store.close()
    assert_same_bits(models[0], late)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_asynchronous_workers_train(mode: str) -> None:
    losses: list[list[float]] = [[], []]

    def work(store: psstore.Store, rank: int) -> None:
        model = Odd(seed=rank)
        optimizer = distributed(model, store, partial(SGD, lr=0.05))
        inputs = next(batches(1))
        for _ in range(40):
            optimizer.zero_grad()
            losses[rank].append(backward(model, inputs))
            optimizer.step()

    on_each_worker(2, work, mode=mode)
    untrained = max(seen[0] for seen in losses)  # whoever comes later begins with what the other has trained
    for seen in losses:
        assert seen[-1] < 0.7 * untrained, "40 steps without the other's come to 0.6"


@pytest.mark.parametrize(
    ("rule", "mode"),
    [(MOMENTUM, "sync"), (MOMENTUM, "ssp"), (partial(torch.optim.NAdam, lr=0.1), "sync")],
    ids=["sync", "ssp", "applied in the worker"],
)
def test_a_parameter_that_is_frozen_on_one_worker_only_is_told_of_there(rule: OptimizerFactory, mode: str) -> None:
    stepped = threading.Event()

    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        model.bias.requires_grad_(rank == 0)
        optimizer = distributed(model, store, rule)
        store.barrier()  # what was trained before would prove nothing
        if mode != "sync" and rank == 1:
            assert stepped.wait(JOIN_S)
        backward(model, next(batches(1)))
        if rank == 0:
            optimizer.step()
            stepped.set()
            return
        told = r"'bias' is frozen on this worker \(rank 1\).*alike on every worker"
        with pytest.raises(UsageError, match=told) if mode == "sync" else pytest.warns(UserWarning, match=told):
            optimizer.step()

    on_each_worker(2, work, mode=mode)


def train(model: Odd, store: psstore.Store) -> None:
    optimizer = distributed(model, store, MOMENTUM)
    for inputs in batches(3):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:the store has trained")
def test_what_every_worker_has_frozen_may_have_been_trained_before() -> None:
    def work(store: psstore.Store, rank: int) -> None:
        train(Odd(), store)
        gc.collect()  # nobody here trains the bias any more
        model = Odd()
        model.bias.requires_grad_(False)
        train(model, store)

    on_each_worker(2, work)


def test_parameters_that_join_later_are_trained_by_all_with_rank_0s_values() -> None:
    """One is unfrozen in round 3, two come with a new group."""
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        model.bias.requires_grad_(False)
        inner = MOMENTUM([model.first, model.bias])
        optimizer = psstore.torch.DistributedOptimizer(inner, store, model.named_parameters())
        for number, inputs in enumerate(batches(6, seed=100 + rank)):
            if number == 3:
                model.bias.requires_grad_(True)
                optimizer.add_param_group({"params": [model.transposed, model.scale], "lr": 0.01})
            optimizer.zero_grad()
            backward(model, inputs)
            optimizer.step()

    on_each_worker(2, work, shards=2)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other) == (name != "sometimes"), name
        assert name == "sometimes" or one.numel() == 0 or not torch.equal(one, Odd(seed=0).get_parameter(name))
