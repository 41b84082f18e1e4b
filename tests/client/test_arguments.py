"""Arguments of the wrong kind: an error that names them, and a store that goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import psstore
from psstore.errors import BadArgument, BadHyper

VALUE = np.ones(4, np.float32)


@pytest.fixture
def store() -> Iterator[Any]:
    """As callers without a type checker see it."""
    with psstore.connect("local://") as store:
        store.create("w", VALUE, rule="sgd")
        store.push("w", VALUE)
        yield store
        store.commit({"lr": 1.0})
        assert store.pull("w").tolist() == [0.0] * 4


NO_NAMES = (3, None, b"w", ("w",), 1.5)

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "create": lambda store, name: store.create(name, VALUE),
    "push": lambda store, name: store.push(name, VALUE),
    "push_many": lambda store, name: store.push_many({name: VALUE}),
    "pull": lambda store, name: store.pull(name),
    "pull_many": lambda store, name: store.pull_many([name]),
    "start_pull_many": lambda store, name: store.start_pull_many([name]).result(),
    "describe": lambda store, name: store.describe(name),
    "drop": lambda store, name: store.drop(name),
}


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_name_that_is_no_string_is_refused(store: Any, call: str, name: object) -> None:
    with pytest.raises(BadArgument, match=r"tensor name .*: expected a string, got "):
        CALLS[call](store, name)


@pytest.mark.parametrize("call", ["push", "pull", "describe", "drop"])
def test_several_names_where_one_is_expected_are_refused_with_what_takes_them(store: Any, call: str) -> None:
    with pytest.raises(BadArgument, match=r"tensor name \['w'\]: expected a string, got list; push_many and pull_many"):
        CALLS[call](store, ["w"])


def test_name_that_no_message_can_say_is_refused(store: Any) -> None:
    for call in CALLS.values():
        with pytest.raises(BadArgument, match=r"tensor name '\\ud800': expected text that UTF-8 can say"):
            call(store, "\ud800")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: store.barrier(3), "name is 3; expected a string"),
        (lambda store: store.barrier([]), r"name is \[\]"),
        (lambda store: store.barrier("\ud800"), r"name is '\\ud800'; expected text that UTF-8 can say"),
        (lambda store: store.barrier("x" * 1025), "the name has 1025 characters, expected 1024 at most"),
        (lambda store: store.version_of(["w"]), "expected a string, got list"),
        (lambda store: store.pull("w", if_newer_than="x"), "if_newer_than is 'x'; expected an integer"),
        (lambda store: store.pull("w", if_newer_than=1.5), r"if_newer_than is 1\.5; expected an integer"),
        (lambda store: store.pull_many(["w"], if_newer_than="x"), "if_newer_than is 'x'; expected an integer"),
        (
            lambda store: store.pull("w", if_newer_than=-1),
            "if_newer_than is -1; expected a version, as version_of",
        ),
        (lambda store: store.pull("w", if_newer_than=2**70), "if_newer_than is 1180591620717411303424; expected"),
        (lambda store: store.create("q", VALUE, group=2**70), "group is 1180591620717411303424; expected"),
        (lambda store: store.barrier(wait_s="long"), "wait_s is 'long'; expected a number"),
        (lambda store: store.pull("w", wait_s=True), "wait_s is True; expected a number"),
        (lambda store: store.create("q", VALUE, group=True), "group is True; expected an integer"),
        (lambda store: store.pull_many("w"), "names is 'w'; expected several names, as in a list"),
        (lambda store: store.pull_many(None), "names is None; expected several"),
        (lambda store: store.pull_state(5), "names is 5; expected several"),
        (lambda store: store.residuals("w"), "names is 'w'; expected several"),
        (lambda store: store.commit(present="w"), "present is 'w'; expected several"),
        (lambda store: store.push_many(5), "a int is given; expected tensors by name: a dict, or"),
        (lambda store: store.push_many(["w"]), "a list is given; expected tensors by name"),
        (lambda store: store.publish(None), "a NoneType is given; expected tensors by name"),
        (lambda store: store.push("w", VALUE, codec=5), "codec is 5; expected a codec's name"),
        (lambda store: store.push("w", VALUE, codec="int8", loss_scale=0), "loss_scale is 0; expected a finite number"),
        (
            lambda store: store.push("w", VALUE, loss_scale=math.nan),
            "loss_scale is nan; expected a finite",
        ),
        (lambda store: store.push_many({"w": VALUE}, loss_scale="a"), "loss_scale is 'a'; expected a number"),
        (lambda store: store.commit(weight="a"), "weight is 'a'; expected a number"),
        (lambda store: store.commit(weight="1"), "weight is '1'; expected a number"),
        (lambda store: store.commit(weight=10**400), "weight is 10+; expected a number"),
        (lambda store: store.commit(max_norm="x"), "max_norm is 'x'"),
        (lambda store: store.commit("lr"), "hypers: expected"),
        (lambda store: store.create("q", VALUE, group="x"), "group is 'x'; expected an integer"),
        (lambda store: store.create("q", VALUE, group=1.0), r"group is 1\.0; expected an integer"),
        (lambda store: store.create("q", VALUE, exist="foo"), "exist is 'foo'; expected 'match', 'error', 'overwrite'"),
        (lambda store: store.create("__metadata__", VALUE), "'__metadata__': files of safetensors have it for"),
        (lambda store: store.create("q", shape="abc"), "shape is 'abc'; expected integers"),
        (lambda store: store.create("q", shape=4), "shape is 4; expected integers"),
        (lambda store: store.create("q", shape=(7 / 2, 4)), r"shape is \(3\.5, 4\); expected integers"),
        (lambda store: store.create("q", shape="34"), "shape is '34'; expected integers"),
        (lambda store: store.create_many(["q"]), "expected psstore.types.TensorSpec, got 'q'"),
        (lambda store: store.create_many(5), "specs is 5; expected several psstore.types.TensorSpec, as in a list"),
        (lambda store: store.create_many([], 5), "values is 5; expected several arrays"),
        (lambda store: store.restore({"w": VALUE}), r"expected psstore\.client\.rule_state\.Restored\(.*, got ndarray"),
        (lambda store: store.restore([]), "restore: expected a dict, by name, got list"),
        (lambda store: store.set_residuals([VALUE]), "set_residuals: expected a dict, by name, got list"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_the_store_would_take_for_a_broken_client_is_refused_before(
    store: Any, call: Callable[[Any], object], words: str
) -> None:
    with pytest.raises(BadArgument, match=words):
        call(store)


def test_ids_of_several_lengths_are_refused(store: Any) -> None:
    store.create_table("rows", dim=2, rule="sgd", group=1)
    with pytest.raises(BadArgument, match="pull_rows 'rows': ids are lists of several lengths"):
        store.pull_rows("rows", [[1, 2], [3]])


@pytest.mark.parametrize(
    "call",
    [
        lambda store, masked: store.create("q", masked),
        lambda store, masked: store.push("w", masked),
        lambda store, masked: store.push_many({"w": masked}),
        lambda store, masked: store.pull("w", out=masked),
        lambda store, masked: store.publish({"q": masked}),
        lambda store, masked: store.pull_rows("rows", np.ma.masked_array([1, 2], mask=[True, False])),
    ],
)
def test_what_is_masked_is_refused(store: Any, call: Callable[[Any, Any], object]) -> None:
    """What lies under the mask is nothing that anybody wants to have trained with."""
    store.create_table("rows", dim=2, rule="sgd", group=1)
    with pytest.raises(BadArgument, match="masked"):
        call(store, np.ma.masked_array(VALUE, mask=[True, False, False, False]))
    store.push("w", np.ma.masked_array(VALUE))


def test_names_may_come_from_an_iterator(store: Any) -> None:
    assert len(store.pull_state(iter(["w"]))) == 1


def test_hyper_parameter_that_no_message_can_say_is_refused(store: Any) -> None:
    with pytest.raises(BadHyper, match=r"'\\ud800': expected text that UTF-8 can say"):
        store.commit({"\ud800": 1.0})


def test_hyper_parameter_that_no_float_holds_is_refused(store: Any) -> None:
    with pytest.raises(BadHyper, match=r"'lr' is 10+; expected a number"):
        store.commit({"lr": 10**400})


def test_numbers_may_be_of_any_kind(store: Any) -> None:
    store.create("q", shape=[np.int64(2)], group=np.int64(0))
    committed = store.commit(
        {"lr": np.float32(0.0)},
        weight=np.float32(2),
        loss_scale=np.float64(1),
        non_finite=np.False_,
        average=np.True_,
        wait_s=np.float32(3),
    )
    assert committed.decision == 1
    assert store.pull("w", wait_s=np.float32(3)).tolist() == [1.0] * 4
    store.push("w", VALUE)


@pytest.mark.parametrize("argument", ["rank", "num_workers", "timeout_s", "wait_s", "connect_timeout_s"])
def test_connect_says_which_argument_is_no_number(argument: str) -> None:
    connect: Any = psstore.connect
    with pytest.raises(BadArgument, match=f"{argument} is 'x'; expected"):
        connect("local://", **{argument: "x"})


@pytest.mark.parametrize("argument", ["rank", "num_workers"])
@pytest.mark.parametrize("value", [2**70, -(2**70)])
def test_connect_says_which_argument_no_message_can_say(argument: str, value: int) -> None:
    connect: Any = psstore.connect
    with pytest.raises(BadArgument, match=f"{argument} is {value}; expected an integer of 64 bits"):
        connect("local://", **{argument: value})


@pytest.mark.parametrize("token", ["secret \ud800", 5], ids=["surrogate", "number"])
def test_connect_does_not_show_a_token_that_no_message_can_say(token: Any) -> None:
    with pytest.raises(BadArgument, match=r"^token: expected bytes, or text that UTF-8 can say$"):
        psstore.connect("local://", token=token)


def test_connect_says_what_is_no_url() -> None:
    connect: Any = psstore.connect
    with pytest.raises(BadArgument, match="url is 3; expected a string"):
        connect(3)
