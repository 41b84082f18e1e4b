"""The same contributions give the same bytes, whatever came first and however the shard is laid out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from psstore import _core
from psstore.types import complete_hyper
from tests.shard.frames import Array, decision, define, key_of, pull, push
from tests.support.fake_shards import in_main_memory

NUM_WORKERS = 3
NUM_ROUNDS = 4
SIZES = (1000, 17, 1, 20000)
KEYS = [key_of(1, index) for index in range(len(SIZES))]
WEIGHTS = (1.0, 0.5, 2.0)

HYPERS: Mapping[str, Mapping[str, float]] = {
    "sgd": complete_hyper("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": complete_hyper("adam", {"amsgrad": 1.0}),
    "adamw": complete_hyper("adamw", {}),
    "adagrad": complete_hyper("adagrad", {}),
    "rmsprop": complete_hyper("rmsprop", {"momentum": 0.5, "centered": 1.0}),
    "reduce": complete_hyper("reduce", {}),
    "delayed_nesterov": complete_hyper("delayed_nesterov", {"every": 3.0, "activation": 0.1}),
}

States = list[dict[str, bytes]]


def gradient(rank: int, round_: int, key: int) -> Array:
    """Magnitudes from 1e-4 to 1e4, so that the order of additions shows in the last bits."""
    generator = np.random.default_rng((rank, round_, key))
    size = SIZES[KEYS.index(key)]
    scale = 10.0 ** generator.uniform(-4, 4, size)
    return (generator.standard_normal(size) * scale).astype(np.float32)


def step_of(round_: int, rule: str, *, early: bool = False, needs_scale: bool = False) -> _core.Decision:
    members = [(rank, 1, round_, WEIGHTS[rank]) for rank in range(NUM_WORKERS)]
    hypers = {0: HYPERS[rule]}
    return decision(round_, members, divisor=sum(WEIGHTS), hypers=hypers, early=early, needs_scale=needs_scale)


def train(rule: str, arrival: Sequence[int], *, num_stripes: int = 64, seed: int | None = None) -> States:
    """Final states after some rounds. `seed`: slices arrive and settle in a random order too."""
    shuffle = random.Random(seed).shuffle if seed is not None else lambda _: None
    shard = _core.Shard(index=0, num_stripes=num_stripes)
    define(shard, 1, SIZES, rule=rule)
    for round_ in range(1, NUM_ROUNDS + 1):
        pushes = [(rank, key) for rank in arrival for key in KEYS]
        shuffle(pushes)
        for rank, key in pushes:
            push(shard, {key: gradient(rank, round_, key)}, rank=rank, round=round_)
        shard.advance(step_of(round_, rule))
        touched = list(KEYS)
        shuffle(touched)
        pull(shard, touched[:2])
        shard.settle(1)
    return [shard.state(key) for key in KEYS]


@pytest.mark.parametrize("rule", HYPERS)
def test_arrival_order_does_not_show_in_a_single_byte(rule: str) -> None:
    expected = train(rule, range(NUM_WORKERS))
    for arrival in itertools.permutations(range(NUM_WORKERS)):
        assert train(rule, arrival) == expected


@pytest.mark.parametrize("num_stripes", [1, 2, 3, 64])
def test_stripes_and_the_order_of_slices_do_not_show_either(num_stripes: int) -> None:
    expected = train("adam", range(NUM_WORKERS))
    for seed in range(3):
        assert train("adam", range(NUM_WORKERS), num_stripes=num_stripes, seed=seed) == expected


@in_main_memory
def test_readers_do_not_show_either() -> None:
    """Updates out of place give the bytes that updates in place give."""
    results: list[States] = []
    for reading in (False, True):
        shard = _core.Shard(index=0)
        define(shard, 1, SIZES)
        held = []
        for round_ in range(1, NUM_ROUNDS + 1):
            if reading:
                held.append(pull(shard, KEYS))
            push(shard, {key: gradient(0, round_, key) for key in KEYS}, round=round_)
            shard.advance(decision(round_, [(0, 1, round_, 1.0)], hypers={0: HYPERS["sgd"]}))
            shard.settle()
        assert (shard.stats()["applied_out_of_place"] > 0) is reading
        results.append([shard.state(key) for key in KEYS])
    assert results[0] == results[1]


@pytest.mark.parametrize("rule", HYPERS)
def test_whether_contributions_come_before_or_after_an_early_decision_does_not_show(rule: str) -> None:
    """Each slice's contributions in a random order, the decision somewhere between them."""
    expected = train(rule, range(NUM_WORKERS))
    for seed in range(5):
        random_of = random.Random(seed)
        shard = _core.Shard(index=0)
        define(shard, 1, SIZES, rule=rule)
        for round_ in range(1, NUM_ROUNDS + 1):
            pushes = [(rank, key) for rank in range(NUM_WORKERS) for key in KEYS]
            random_of.shuffle(pushes)
            known = random_of.randrange(len(pushes) + 1)
            for position, (rank, key) in enumerate(pushes):
                if position == known:
                    shard.advance(step_of(round_, rule, early=True))
                push(shard, {key: gradient(rank, round_, key)}, rank=rank, round=round_)
                if random_of.random() < 0.3:
                    pull(shard, KEYS)
                    shard.settle(1)
            shard.advance(step_of(round_, rule, early=True))
        assert [shard.state(key) for key in KEYS] == expected


@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_scale_gives_the_bytes_of_a_gradient_that_was_multiplied(rule: str, factor: float) -> None:
    """By a power of two, which rounds nothing: what is multiplied before the reduction may as well be after it."""
    results: list[States] = []
    for scaled_late in (False, True):
        shard = _core.Shard(index=0)
        define(shard, 1, SIZES, rule=rule)
        for round_ in range(1, NUM_ROUNDS + 1):
            for rank, key in itertools.product(range(NUM_WORKERS), KEYS):
                data = gradient(rank, round_, key)
                push(shard, {key: data if scaled_late else data * np.float32(factor)}, rank=rank, round=round_)
            shard.advance(step_of(round_, rule, needs_scale=scaled_late))
            pull(shard, KEYS[:2])
            shard.set_scale(round_, factor)
        results.append([shard.state(key) for key in KEYS])
    assert results[0] == results[1]


def test_a_shard_takes_the_step_that_the_kernel_takes() -> None:
    gradients = [gradient(rank, 1, KEYS[0]) for rank in range(NUM_WORKERS)]
    expected = bytearray(4 * SIZES[0])
    _core.reduce_update(
        _core.RULES["sgd"],
        complete_hyper("sgd", {"lr": 0.1}),
        step=1,
        value=expected,
        state={},
        contributions=[(data.tobytes(), _core.DTYPES["float32"], 1.0) for data in gradients],
        divisor=3.0,
        dtype=_core.DTYPES["float32"],
    )
    shard = _core.Shard(index=0)
    define(shard, 1, SIZES[0])
    for rank, data in enumerate(gradients):
        push(shard, {KEYS[0]: data}, rank=rank)
    members = [(rank, 1, 1, 1.0) for rank in range(NUM_WORKERS)]
    shard.advance(decision(1, members, divisor=3.0, hypers={0: complete_hyper("sgd", {"lr": 0.1})}))
    assert shard.state(KEYS[0])["value"] == bytes(expected)
