"""A shard on a device is the shard that it is on the host: its replies come later, its bytes are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.errors import BadArgument, DeviceFailed, OutOfMemory
from psstore.types import TensorSpec, place_shards
from tests.shard.frames import decision, define, floats, key_of, push, value
from tests.sim.checks import run_and_check
from tests.sim.plan import plan_of

SIMULATED_SEEDS = range(4)


@pytest.mark.parametrize("seed", SIMULATED_SEEDS)
def test_simulated_store_keeps_its_promises_on_devices(seed: int, on_device: None) -> None:
    run_and_check(replace(plan_of(seed, None), compensates=False))


def test_shard_takes_steps_on_its_device() -> None:
    shard = _core.Shard(index=0, device="fake:0?seed=1")
    define(shard, 1, [3, 20_000])
    for rank in (0, 1):
        push(shard, {key_of(1, 0): floats(1, 2, 3), key_of(1, 1): floats(*[1] * 20_000)}, rank=rank, round=1)
    shard.advance(decision(1, [(0, 1, 1, 1.0), (1, 1, 1, 1.0)]))
    assert value(shard, key_of(1, 0)) == [-2, -4, -6]
    assert set(value(shard, key_of(1, 1))) == {-2.0}
    assert shard.device == "fake:0?seed=1"


def test_local_store_trains_on_devices() -> None:
    with psstore.connect("local://?shards=2&device=fake:0,fake:1") as store:
        store.create("w", np.zeros(70_000, np.float32), rule="sgd")
        for _ in range(3):
            store.push("w", np.ones(70_000, np.float32))
            store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), np.full(70_000, -3, np.float32))


@pytest.mark.parametrize("codec", ["int8", "sign"])
def test_who_follows_shards_on_devices_is_told_what_shards_in_main_memory_tell(codec: str) -> None:
    """Also where a change is not finite, which is seen when it has come."""

    def followed(options: str) -> tuple[list[np.ndarray], list[int]]:
        random = np.random.default_rng(1)
        values, num_bytes = [], []
        with psstore.connect(f"local://?shards=2{options}") as store:
            store.create_many(
                [TensorSpec(name=name, shape=(size,), rule="sgd") for name, size in (("w", 70_000), ("b", 7))]
            )
            for round_ in range(5):
                gradient = random.standard_normal(70_000).astype(np.float32)
                gradient[69_999] = np.inf if round_ == 3 else 1.0
                store.push_many({"w": gradient, "b": np.ones(7, np.float32)})
                store.commit({"lr": 0.1})
                before = store.bytes_pulled
                values += list(store.pull_many(["w", "b"], codec=codec))
                num_bytes.append(store.bytes_pulled - before)
        return values, num_bytes

    here, bytes_here = followed("")
    there, bytes_there = followed("&device=fake:0,fake:1?seed=2")
    for wanted, came in zip(here, there, strict=True):
        assert_array_equal(came, wanted)
    assert bytes_there[:3] == bytes_here[:3]
    assert bytes_there[1] * 3 < bytes_there[0]
    assert max(bytes_there) == bytes_there[0]


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
