"""A shard's memory: what it takes is reserved before anything changes, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from psstore import _core
from psstore.errors import OutOfMemory
from psstore.types import complete_hyper
from tests.shard.frames import Restored, decision, define, floats, initialise, key_of, pull, push, restore, value, write

MIB = 1 << 20
ELEMS = MIB // 4
"""Of a value of 1 MiB."""


def shard_of(max_mib: int) -> _core.Shard:
    return _core.Shard(index=0, max_memory_bytes=max_mib * MIB)


def taken(shard: _core.Shard) -> int:
    return shard.stats()["memory_bytes"]


def ones(num: float = 1.0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(ELEMS, num, np.float32)


# ---- zeros ----


def test_zeros_take_no_memory_until_they_are_used() -> None:
    shard = shard_of(64)
    define(shard, 1, [ELEMS] * 16)
    assert shard.stats()["pool_bytes"] == 0
    assert taken(shard) == 16 * MIB
    assert b"".join(pull(shard, [key_of(1)]).pieces) == bytes(MIB)
    assert shard.stats()["pool_bytes"] == MIB
    assert taken(shard) == 16 * MIB


def test_zeros_are_added_to_and_stepped_from() -> None:
    shard = shard_of(64)
    define(shard, 1, 2)
    define(shard, 2, 2, rule="add")
    push(shard, {key_of(1): floats(1, 2)})
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    write(shard, "ADD", {key_of(2): floats(3, 4)}, sequence=1)
    assert value(shard, key_of(1)) == [-1, -2]
    assert value(shard, key_of(2)) == [3, 4]


def test_dump_of_zeros_has_them() -> None:
    shard = shard_of(64)
    define(shard, 1, 2)
    assert shard.state(key_of(1))["value"] == bytes(8)


# ---- room ----


def test_tensor_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    shard = shard_of(4)
    define(shard, 1, [ELEMS] * 3)
    with pytest.raises(OutOfMemory, match=r"2 MiB .* do not fit: this shard may use 4 MiB .*raise --max-memory"):
        define(shard, 2, [ELEMS] * 2)
    assert shard.stats()["slots"] == 3
    define(shard, 2, ELEMS)
    assert taken(shard) == 4 * MIB == shard.stats()["max_memory_bytes"]


def test_rule_state_is_reserved_with_the_tensor() -> None:
    shard = shard_of(4)
    define(shard, 1, ELEMS, rule="adam")
    with pytest.raises(OutOfMemory):
        define(shard, 2, ELEMS, rule="adam")
    assert taken(shard) == 3 * MIB


def test_push_that_does_not_fit_is_refused_and_the_next_one_is_not() -> None:
    shard = shard_of(4)
    define(shard, 1, ELEMS)
    for rank in range(3):
        push(shard, {key_of(1): ones()}, rank=rank)
    with pytest.raises(OutOfMemory):
        push(shard, {key_of(1): ones()}, rank=3)
    shard.advance(decision(1, [(rank, 1, 1, 1.0) for rank in range(3)]))
    assert value(shard, key_of(1))[0] == -3
    push(shard, {key_of(1): ones()}, rank=3)
    assert taken(shard) == 2 * MIB


def test_pushes_leave_what_is_reserved_for_a_step() -> None:
    shard = shard_of(4)
    define(shard, 1, ELEMS, rule="adam")
    push(shard, {key_of(1): ones()})
    with pytest.raises(OutOfMemory):
        push(shard, {key_of(1): ones()}, rank=1)
    adam = {0: complete_hyper("adam", {"lr": 1.0})}
    shard.advance(decision(1, [(0, 1, 1, 1.0)], hypers=adam))
    shard.settle()
    assert shard.stats()["state_bytes"] == 2 * MIB
    assert taken(shard) == 3 * MIB


def test_decision_that_asks_for_more_state_than_fits_changes_nothing() -> None:
    shard = shard_of(3)
    define(shard, 1, ELEMS)
    define(shard, 2, ELEMS)
    push(shard, {key_of(1): ones()})
    momentum = {0: complete_hyper("sgd", {"lr": 1.0, "momentum": 0.9})}
    everywhere = {0: [(1, 1)]}
    with pytest.raises(OutOfMemory):
        shard.advance(decision(1, [(0, 1, 1, 1.0)], hypers=momentum, present=everywhere))
    assert shard.version == 0
    shard.drop(2)
    shard.advance(decision(1, [(0, 1, 1, 1.0)], hypers=momentum, present=everywhere))
    shard.settle()
    assert taken(shard) == 2 * MIB


def test_values_that_a_reader_holds_count() -> None:
    shard = shard_of(4)
    define(shard, 1, ELEMS, rule="assign")
    write(shard, "ASSIGN", {key_of(1): ones()}, sequence=1)
    held = pull(shard, [key_of(1)]).pieces
    write(shard, "ASSIGN", {key_of(1): ones(2)}, sequence=2)
    assert taken(shard) == 2 * MIB
    assert np.frombuffer(held[0], np.float32)[0] == 1
    del held
    assert taken(shard) == MIB


def test_write_that_does_not_fit_can_be_sent_again() -> None:
    """What has no room for its change has not used its number."""
    shard = shard_of(3)
    define(shard, 1, ELEMS, rule="add")
    held = [pull(shard, [key_of(1)])]
    write(shard, "ADD", {key_of(1): ones()}, sequence=1)
    held.append(pull(shard, [key_of(1)]))
    with pytest.raises(OutOfMemory):
        write(shard, "ADD", {key_of(1): ones()}, sequence=2)
    assert shard.last_sequence("client") == 1
    held.clear()
    write(shard, "ADD", {key_of(1): ones()}, sequence=2)
    assert value(shard, key_of(1))[0] == 2


@pytest.mark.parametrize("op", ["ADD", "ASSIGN"])
def test_write_of_two_slices_that_readers_hold_is_taken_whole_or_not_at_all(op: str) -> None:
    shard = shard_of(5)
    keys = [key_of(1), key_of(2)]
    for tensor_id in (1, 2):
        define(shard, tensor_id, ELEMS, rule=op.lower())
    half = np.ones(ELEMS, np.float16).view(np.uint8)  # is not kept as it comes
    write(shard, op, dict.fromkeys(keys, half), sequence=1, dtype="float16")
    held = [pull(shard, keys)]
    define(shard, 3, [ELEMS])
    with pytest.raises(OutOfMemory):  # 1 MiB is for the payload, 1 MiB is left
        write(shard, op, dict.fromkeys(keys, half), sequence=2, dtype="float16")
    held.clear()
    assert [value(shard, key)[0] for key in keys] == [1, 1]
    assert shard.last_sequence("client") == 1
    assert taken(shard) == 3 * MIB
    write(shard, op, dict.fromkeys(keys, half), sequence=2, dtype="float16")
    assert [value(shard, key)[0] for key in keys] == [2 if op == "ADD" else 1] * 2


def test_step_that_has_no_room_beside_a_reader_comes_when_it_has_read() -> None:
    shard = shard_of(2)
    define(shard, 1, ELEMS)
    push(shard, {key_of(1): ones()})
    held = pull(shard, [key_of(1)])
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    with pytest.raises(OutOfMemory):
        shard.settle()
    del held
    assert shard.settle()
    assert value(shard, key_of(1))[0] == -1


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_all_is_given_back_when_its_tensor_is_dropped(rule: str) -> None:
    shard = shard_of(16)
    for tensor_id in range(1, 4):
        define(shard, tensor_id, [ELEMS, 100], rule=rule, zeros=tensor_id == 1)
        if tensor_id > 1:
            initialise(shard, {key_of(tensor_id): ones(), key_of(tensor_id, 1): floats(*[1.0] * 100)})
        keys = {key_of(tensor_id): ones(), key_of(tensor_id, 1): floats(*[1.0] * 100)}
        push(shard, keys, round=tensor_id)
        hypers = {0: complete_hyper(rule, {"lr": 1.0})}
        present = {0: [(tensor_id, tensor_id)]}
        shard.advance(decision(tensor_id, [(0, 1, tensor_id, 1.0)], hypers=hypers, present=present))
        shard.settle()
        shard.drop(tensor_id)
        assert taken(shard) == 0


def test_restored_state_counts_once() -> None:
    shard = shard_of(4)
    define(shard, 1, ELEMS, rule="adam", zeros=False)
    for sequence, part in enumerate(range(3), start=1):
        restore(shard, [Restored(key_of(1), part, ones(), 1)], sequence=sequence)
    assert taken(shard) == 3 * MIB
