"""Synchronous training equals one process, bit for bit: whatever the shards, the arrivals and the transport.

One process sums the micro-batches' gradients in rank order, divides by their number, and steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, TRANSPORTS, at_once, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
Values = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (700, 512),  # two slices
    "weight": (64, 33),
    "bias": (33,),
    "scale": (),
    "empty": (0, 4),
}
NUM_WORKERS = 3
NUM_ROUNDS = 5


def draw(seed: int) -> Values:
    chance = np.random.default_rng(seed)
    return {name: chance.standard_normal(shape).astype(F32) for name, shape in SHAPES.items()}


def gradients(rank: int, round_: int) -> Values:
    """Worker 1 has none for the bias in odd rounds, nobody has any in round 3."""
    drawn = draw(1000 + 10 * round_ + rank)
    if round_ == 3 or (rank == 1 and round_ % 2):
        del drawn["bias"]
    return drawn


def train(store: Store, turn: Callable[[int, int], None], hypers: dict[str, float], rule: str) -> Values:
    """One worker's whole life. `turn(rank, round)` waits until it may push."""
    assert store.rank is not None
    rank = store.rank
    specs = [TensorSpec(name=name, shape=shape, rule=rule, zeros=False) for name, shape in SHAPES.items()]
    store.create_many(specs, list(draw(0).values()) if rank == 0 else None, offer=rank == 0)
    store.pull_many(list(SHAPES))  # waits until rank 0 has sent the values: before that no gradient is taken
    store.pull_many(list(SHAPES))  # the others wait for the first values here
    for round_ in range(1, NUM_ROUNDS + 1):
        assert store.round == round_
        turn(rank, round_)
        store.push_many(gradients(rank, round_))
        done = store.commit(hypers)
        assert (done.round, done.decision, done.late) == (round_, round_, False)
        values = store.pull_many(list(SHAPES))
    return dict(zip(SHAPES, values, strict=True))


class Turns:
    """Lets the workers of each round go in a given order, each after the one before has pushed."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._orders = orders
        self._gone: dict[int, int] = {}
        self._changed = threading.Condition()

    def __call__(self, rank: int, round_: int) -> None:
        order = self._orders[(round_ - 1) % len(self._orders)]
        with self._changed:
            assert self._changed.wait_for(lambda: order[self._gone.get(round_, 0)] == rank, PATIENCE_S)
            self._gone[round_] = self._gone.get(round_, 0) + 1
            self._changed.notify_all()


Step = Callable[[Values], None]


def averages(step: Step) -> None:
    """What one process steps with, round by round: the micro-batches' sum in rank order, divided by their number."""
    for round_ in range(1, NUM_ROUNDS + 1):
        by_rank = [gradients(rank, round_) for rank in range(NUM_WORKERS)]
        total: Values = {}
        for drawn in by_rank:
            for name, gradient in drawn.items():
                total[name] = total[name] + gradient if name in total else gradient
        step({name: gradient / F32(NUM_WORKERS) for name, gradient in total.items()})


def torch_sgd() -> Values:
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in draw(0).items()}
    optimizer = torch.optim.SGD(
        parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=False
    )

    def step(gradient: Values) -> None:
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(np.asarray(gradient[name])) if name in gradient else None
        optimizer.step()

    averages(step)
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def single_worker_adamw() -> Values:
    """psstore's own step with the finished average; how near that is to torch's is in docs/update_rules.md."""
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        specs = [TensorSpec(name=name, shape=shape, rule="adamw", zeros=False) for name, shape in SHAPES.items()]
        store.create_many(specs, list(draw(0).values()))

        def step(gradient: Values) -> None:
            store.push_many(gradient)
            store.commit(RULES["adamw"][0])

        averages(step)
        return dict(zip(SHAPES, store.pull_many(list(SHAPES)), strict=True))


RULES: dict[str, tuple[dict[str, float], Callable[[], Values]]] = {
    "sgd": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": 1.0}, torch_sgd),
    "adamw": ({"lr": 0.01}, single_worker_adamw),
}


def assert_same_bytes(values: Values, expected: Values) -> None:
    for name in SHAPES:
        assert_array_equal(values[name], expected[name], err_msg=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sync_equals_one_process_bit_for_bit(transport: str, rule: str) -> None:
    hypers, one_process = RULES[rule]
    with clusters(transport) as start:
        stores = start(shards=2, workers=NUM_WORKERS).workers()
        results = at_once(*[lambda s=s: train(s, lambda *_: None, hypers, rule) for s in stores])
        expected = one_process()
        for result in results:
            assert_same_bytes(result, expected)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_sync_is_the_same_for_any_shards_and_arrivals(shards: int) -> None:
    orders = list(itertools.permutations(range(NUM_WORKERS)))
    hypers, one_process = RULES["sgd"]
    with clusters("local") as start:
        stores = start(shards=shards, workers=NUM_WORKERS).workers()
        turns = Turns(orders[shards:] + orders[:shards])
        results = at_once(*[lambda s=s: train(s, turns, hypers, "sgd") for s in stores])
        assert_same_bytes(results[0], one_process())


@pytest.mark.sockets
@pytest.mark.parametrize("shards", [3, 5])
def test_sync_is_the_same_for_any_shards_over_sockets(shards: int) -> None:
    hypers, one_process = RULES["sgd"]
    with clusters("unix") as start:
        stores = start(shards=shards, workers=NUM_WORKERS).workers()
        turns = Turns([(2, 0, 1), (1, 2, 0)])
        results = at_once(*[lambda s=s: train(s, turns, hypers, "sgd") for s in stores])
        assert_same_bytes(results[2], one_process())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_count_by_their_share(transport: str) -> None:
    with clusters(transport) as start:
        stores = start(shards=2, workers=2).workers()
        stores[0].create("w", [0.0], rule="sgd")

        def step(store: Store, gradient: float, weight: float) -> None:
            store.push("w", [gradient])
            store.commit({"lr": 1.0}, weight=weight)
            assert_array_equal(store.pull("w"), np.array([-(2 * 3 + 8 * 1) / 4], F32))

        at_once(lambda: step(stores[0], 2.0, 3.0), lambda: step(stores[1], 8.0, 1.0))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_barrier_holds_until_the_last_is_there(transport: str) -> None:
    with clusters(transport) as start:
        stores = start(workers=2).workers()
        passed = threading.Event()

        def wait() -> None:
            stores[0].barrier("ready")
            passed.set()

        thread = threading.Thread(target=wait)
        thread.start()
        stores[1].stats()  # rank 0 has had the time of a round trip, and more
        assert not passed.is_set()
        stores[1].barrier("ready")
        assert passed.wait(PATIENCE_S)
        thread.join()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_leaves_is_no_longer_waited_for(transport: str) -> None:
    with clusters(transport) as start:
        first, second = start(workers=2).workers()
        first.create("w", [0.0], rule="sgd")
        first.push("w", [1.0])
        results = at_once(lambda: first.commit({"lr": 1.0}), second.leave)
        assert results[0].decision == 1  # type: ignore[union-attr]
        assert_array_equal(first.pull("w"), np.array([-1], F32))
