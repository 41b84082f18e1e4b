"""Pulls in int8 and sign: deltas of what was published, the same for everybody, and the whole for who has none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from psstore import _core, errors
from psstore.types import complete_hyper
from tests.shard.frames import Pulled, Restored, decision, define, floats, key_of, pull, push, restore, value
from tests.support.codec_reference import Floats, decoded, encode

A = key_of(1)
N = 3000
WHOLE = _core.DTYPES["float32"]


@pytest.fixture(autouse=True, params=["cpu", "device"])
def place(request: pytest.FixtureRequest) -> None:
    if request.param == "device":
        request.getfixturevalue("on_device")


@dataclass
class Follower:
    """A client that has what was published, slice A of a shard."""

    shard: _core.Shard
    encoding: str
    num_elems: int = N
    value: Floats = field(init=False)
    version: int | None = None

    def pull(self) -> Pulled:
        asked = 0 if self.version is None else self.version + 1
        return pull(self.shard, [A], versions=[asked], dtype=self.encoding)

    def catch_up(self) -> int:
        """Takes what comes; returns the number of its dtype."""
        pulled = self.pull()
        payload = np.frombuffer(b"".join(pulled.pieces), np.uint8)
        if pulled.dtypes == [WHOLE]:
            self.value = payload.view(np.float32).copy()
        else:
            self.value = self.value + decoded(self.encoding, payload, self.num_elems)
        self.version = pulled.answers[0].version
        return pulled.dtypes[0]


def step(shard: _core.Shard, number: int, gradient: Floats) -> None:
    """Decision `number`: subtracts the gradient from the value."""
    push(shard, {A: gradient}, round=number)
    shard.advance(decision(number, [(0, 1, number, 1.0)]))


def training_shard(num_elems: int = N, rule: str = "sgd") -> _core.Shard:
    shard = _core.Shard(index=0)
    define(shard, 1, num_elems, rule=rule)
    return shard


def random_floats(seed: int, num_elems: int = N) -> Floats:
    return np.random.default_rng(seed).standard_normal(num_elems).astype(np.float32)


def exact(shard: _core.Shard) -> Floats:
    return np.array(value(shard, A), np.float32)


@pytest.mark.parametrize("num_elems", [0, 1, 300, 1 << 16])
@pytest.mark.parametrize("encoding", ["int8", "sign"])
def test_followers_have_the_same_bits_whenever_they_ask(encoding: str, num_elems: int) -> None:
    shard = training_shard(num_elems)
    followers = [Follower(shard, encoding, num_elems) for _ in range(2)]
    for number in range(1, 5):
        step(shard, number, random_floats(number, num_elems))
        came = [follower.catch_up() for follower in followers]
        assert came == [WHOLE if number == 1 else _core.DTYPES[encoding]] * 2
        np.testing.assert_array_equal(followers[0].value, followers[1].value)


def test_a_delta_has_what_the_ones_before_it_lost() -> None:
    """It is the encoded difference of the value to what was published."""
    shard = training_shard()
    follower = Follower(shard, "sign")
    follower.catch_up()
    for number in range(1, 4):
        before = follower.value
        step(shard, number, random_floats(number))
        expected = before + decoded("sign", encode("sign", exact(shard) - before), N)
        assert follower.catch_up() == _core.DTYPES["sign"]
        np.testing.assert_array_equal(follower.value, expected)


def test_what_is_published_comes_to_a_value_that_stands_still() -> None:
    shard = training_shard()
    follower = Follower(shard, "int8")
    follower.catch_up()
    step(shard, 1, random_floats(0))
    for number in range(2, 6):
        step(shard, number, np.zeros(N, np.float32))
        follower.catch_up()
    np.testing.assert_allclose(follower.value, exact(shard), atol=1e-6)


def test_who_asks_again_gets_the_same_bytes() -> None:
    shard = training_shard()
    follower = Follower(shard, "int8")
    follower.catch_up()
    step(shard, 1, random_floats(1))
    first, again = follower.pull(), follower.pull()
    assert first.dtypes == again.dtypes == [_core.DTYPES["int8"]]
    assert b"".join(first.pieces) == b"".join(again.pieces)


def test_steps_that_nobody_asked_about_come_in_one_delta() -> None:
    shard = training_shard()
    follower = Follower(shard, "int8")
    follower.catch_up()
    before = follower.value
    for number in (1, 2, 3):
        step(shard, number, random_floats(number))
    assert follower.catch_up() == _core.DTYPES["int8"]
    np.testing.assert_array_equal(follower.value, before + decoded("int8", encode("int8", exact(shard) - before), N))


def test_nothing_new_carries_no_bytes() -> None:
    shard = training_shard()
    follower = Follower(shard, "sign")
    follower.catch_up()
    pulled = follower.pull()
    assert pulled.answers[0].status == errors.NOT_MODIFIED
    assert pulled.payload_bytes == 0


def test_who_missed_a_delta_gets_the_whole_of_what_the_others_have() -> None:
    shard = training_shard()
    quick, slow = Follower(shard, "int8"), Follower(shard, "int8")
    quick.catch_up()
    slow.catch_up()
    for number in (1, 2):
        step(shard, number, random_floats(number))
        quick.catch_up()
    assert slow.catch_up() == WHOLE
    np.testing.assert_array_equal(slow.value, quick.value)
    assert not np.array_equal(slow.value, exact(shard))


def test_who_decodes_something_else_than_the_first_to_ask_gets_the_whole() -> None:
    shard = training_shard()
    first, second = Follower(shard, "int8"), Follower(shard, "sign")
    first.catch_up()
    second.catch_up()
    step(shard, 1, random_floats(1))
    assert first.catch_up() == _core.DTYPES["int8"]
    assert second.catch_up() == WHOLE
    np.testing.assert_array_equal(first.value, second.value)


def test_a_restored_value_comes_whole_and_exact() -> None:
    shard = training_shard()
    follower = Follower(shard, "sign")
    follower.catch_up()
    step(shard, 1, random_floats(1))
    follower.catch_up()
    restore(shard, [Restored(A, 0, random_floats(7))], sequence=1)
    assert follower.catch_up() == WHOLE
    np.testing.assert_array_equal(follower.value, random_floats(7))


def test_a_change_that_is_not_finite_comes_whole() -> None:
    shard = training_shard()
    follower = Follower(shard, "int8")
    follower.catch_up()
    gradient = random_floats(1)
    gradient[5] = np.inf
    step(shard, 1, gradient)
    assert follower.catch_up() == WHOLE
    np.testing.assert_array_equal(follower.value, exact(shard))


def test_pieces_keep_their_bytes_while_later_deltas_are_made() -> None:
    shard = training_shard(1 << 16)
    follower = Follower(shard, "int8", 1 << 16)
    held = follower.pull()
    before = b"".join(held.pieces)
    follower.catch_up()
    for number in (1, 2):
        step(shard, number, random_floats(number, 1 << 16))
        follower.catch_up()
    assert b"".join(held.pieces) == before


def test_following_leaves_the_value_and_its_state_as_they_are() -> None:
    def states(*, followed: bool) -> dict[str, bytes]:
        shard = training_shard(rule="adam")
        follower = Follower(shard, "sign")
        for number in range(1, 4):
            if followed:
                follower.catch_up()
            push(shard, {A: random_floats(number)}, round=number)
            shard.advance(decision(number, [(0, 1, number, 1.0)], hypers={0: complete_hyper("adam", {"lr": 0.1})}))
        return shard.state(A)

    assert states(followed=True) == states(followed=False)


def test_what_followers_cost_is_counted() -> None:
    shard = training_shard()
    assert shard.stats()["published_bytes"] == 0
    follower = Follower(shard, "int8")
    follower.catch_up()
    step(shard, 1, random_floats(1))
    follower.catch_up()
    assert shard.stats()["published_bytes"] == 4 * N + _core.encoded_bytes(_core.DTYPES["int8"], N)


def test_only_float32_tensors_in_training_are_followed() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 1, dtype="float64")
    define(shard, 2, 1, rule="add")
    define(shard, 3, 1, zeros=False)
    define(shard, 4, 1)
    asked = [
        *pull(shard, [key_of(1), key_of(2), key_of(3)], dtype="int8").answers,
        *pull(shard, [key_of(4)], dtype="topk").answers,
        *pull(shard, [key_of(4)], dtype="int8", parts=[1]).answers,
    ]
    assert [answer.status for answer in asked] == [
        errors.DTypeMismatch.code,
        errors.RuleMismatch.code,
        errors.NotInitialised.code,
        errors.DTypeMismatch.code,
        errors.DTypeMismatch.code,
    ]


def test_a_slice_that_waits_for_contributions_is_not_read() -> None:
    shard = training_shard(1)
    follower = Follower(shard, "int8", 1)
    follower.catch_up()
    shard.advance(decision(1, [(0, 1, 1, 1.0)], early=True))
    assert follower.pull().answers[0].status == errors.NOT_APPLIED
    push(shard, {A: floats(1.0)})
    assert follower.catch_up() == _core.DTYPES["int8"]
