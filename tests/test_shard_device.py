"""A shard on a device is the shard that it is on the host: its replies come later, its bytes are the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from shard_frames import decision, define, floats, key_of, pull, push, value
from sim.checks import run_and_check
from sim.plan import plan_of

import psstore
from psstore import _core
from psstore.errors import BadArgument, DeviceFailed, OutOfMemory
from psstore.types import place_shards

SIMULATED_SEEDS = range(4)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard that is made has a device of its own."""
    made = _core.Shard
    seeds = iter(range(1000))

    def shard_on_device(*, index: int) -> _core.Shard:
        return made(index=index, device=f"fake:0?seed={next(seeds)}")

    monkeypatch.setattr(_core, "Shard", shard_on_device)


@pytest.mark.parametrize("seed", SIMULATED_SEEDS)
def test_simulated_store_keeps_its_promises_on_devices(seed: int, on_device: None) -> None:
    run_and_check(plan_of(seed, None))


def test_shard_takes_steps_on_its_device() -> None:
    shard = _core.Shard(index=0, device="fake:0?seed=1")
    define(shard, 1, [3, 20_000])
    for rank in (0, 1):
        push(shard, {key_of(1, 0): floats(1, 2, 3), key_of(1, 1): floats(*[1] * 20_000)}, rank=rank, round=1)
    shard.advance(decision(1, [(0, 1, 1, 1.0), (1, 1, 1, 1.0)]))
    assert value(shard, key_of(1, 0)) == [-2, -4, -6]
    assert set(value(shard, key_of(1, 1))) == {-2.0}
    assert shard.device == "fake:0?seed=1"


def test_shard_on_a_device_answers_a_follower_with_values() -> None:
    shard = _core.Shard(index=0, device="fake:0")
    define(shard, 1, 512)
    pulled = pull(shard, [key_of(1)], dtype="int8")
    assert pulled.dtypes == [_core.DTYPES["float32"]]


def test_local_store_trains_on_devices() -> None:
    with psstore.connect("local://?shards=2&device=fake:0,fake:1") as store:
        store.create("w", np.zeros(70_000, np.float32), rule="sgd")
        for _ in range(3):
            store.push("w", np.ones(70_000, np.float32))
            store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), np.full(70_000, -3, np.float32))


def test_tensor_that_does_not_fit_is_refused_and_the_others_go_on() -> None:
    shard = _core.Shard(index=0, device="fake:0?bytes=1048576")
    define(shard, 1, 1000)
    with pytest.raises(OutOfMemory, match="more shards on more devices"):
        define(shard, 2, 1 << 20)
    assert value(shard, key_of(1)) == [0.0] * 1000


def test_memory_to_push_through_counts_with_the_slots_while_it_is_there() -> None:
    shard = _core.Shard(index=0, device="fake:0?bytes=4194304")
    arena, _ = shard.make_push_arena(2 << 20)
    with pytest.raises(OutOfMemory, match="rule state or pushes do not fit"):
        define(shard, 1, (2 << 20) // 4)
    del arena
    define(shard, 1, (2 << 20) // 4)


def test_shard_whose_device_failed_says_so_at_every_call() -> None:
    shard = _core.Shard(index=0, device="fake:1?fail_after=0")
    define(shard, 1, 1)
    for _ in range(2):
        with pytest.raises(DeviceFailed, match="device fake:1"):
            shard.state(key_of(1))


def test_devices_are_given_to_shards_in_turn() -> None:
    assert place_shards("cuda:0,cuda:1", 3) == ("cuda:0", "cuda:1", "cuda:0")
    with pytest.raises(BadArgument, match="expected cpu, cuda:0"):
        place_shards("gpu0", 1)
