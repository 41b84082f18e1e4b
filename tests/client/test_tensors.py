"""Creating, pushing, committing and pulling, over every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.errors import (
    BadArgument,
    BadHyper,
    DTypeMismatch,
    RuleMismatch,
    ShapeMismatch,
    TensorExists,
    UnknownTensor,
)
from psstore.types import TensorSpec
from tests.support.cluster import Cluster

F32 = np.float32


def pulled(store: Store, name: str, **how: Any) -> np.ndarray[Any, Any]:
    value = store.pull(name, **how)
    assert isinstance(value, np.ndarray)
    return value


# ---- creating -------------------------------------------------------------------------------------


def test_create_with_value_keeps_shape_dtype_and_bytes(store: Store) -> None:
    value = np.arange(6, dtype=np.float64).reshape(2, 3)
    store.create("a", value)
    back = pulled(store, "a")
    assert back.dtype == np.float64
    assert_array_equal(back, value)


def test_create_with_shape_is_zero(store: Store) -> None:
    store.create("a", shape=(2, 2))
    assert_array_equal(pulled(store, "a"), np.zeros((2, 2), F32))


def test_create_of_many_slices_is_spread_and_comes_back(store: Store) -> None:
    value = np.random.default_rng(0).standard_normal(1_000_003).astype(F32)
    store.create("big", value)
    assert len(set(store.describe("big").shards)) == 2
    assert_array_equal(pulled(store, "big"), value)


def test_create_match_keeps_the_first_value(store: Store) -> None:
    store.create("a", [1.0, 2.0])
    store.create("a", [3.0, 4.0])
    assert_array_equal(pulled(store, "a"), np.array([1, 2], F32))


def test_create_error_raises_if_it_exists(store: Store) -> None:
    store.create("a", shape=(1,))
    with pytest.raises(TensorExists, match="'a' exists already"):
        store.create("a", shape=(1,), exist="error")


def test_create_overwrite_replaces_shape_and_value(store: Store) -> None:
    store.create("a", [1.0, 2.0])
    store.create("a", [5.0, 6.0, 7.0], exist="overwrite")
    assert_array_equal(pulled(store, "a"), np.array([5, 6, 7], F32))


@pytest.mark.parametrize(
    ("again", "error"),
    [
        ({"shape": (3,)}, ShapeMismatch),
        ({"shape": (2,), "dtype": "float64"}, DTypeMismatch),
        ({"shape": (2,), "rule": "sgd"}, RuleMismatch),
    ],
)
def test_create_match_of_something_else_is_refused(store: Store, again: dict[str, Any], error: type) -> None:
    store.create("a", shape=(2,))
    with pytest.raises(error, match="tensor 'a'"):
        store.create("a", **again)


def test_create_many_is_all_or_nothing(store: Store) -> None:
    store.create("b", shape=(1,))
    specs = [TensorSpec(name="a", shape=(1,)), TensorSpec(name="b", shape=(2,))]
    with pytest.raises(ShapeMismatch):
        store.create_many(specs)
    assert store.keys() == ["b"]


def test_create_many_without_offer_waits_for_somebody_elses_value(cluster: Cluster, store: Store) -> None:
    specs = [TensorSpec(name="a", shape=(2,), zeros=False)]
    store.create_many(specs, offer=False)
    with cluster.connect(role="client") as other:
        other.create_many(specs, [np.array([3, 4], F32)])
    assert_array_equal(pulled(store, "a"), np.array([3, 4], F32))


def test_names_of_dropped_tensors_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.protocol.definitions.MAX_DROPPED_NAMES", 3)
    with psstore.connect("local://") as store:
        for step in range(10):
            store.create(f"dropped {step}", shape=(1,))
            store.drop(f"dropped {step}")
            store.create("overwritten", [float(step)], exist="overwrite")
        names = store._operations.client.tensors.names.values()
        assert list(names) == ["overwritten", "overwritten", "dropped 9", "overwritten"]


def test_nothing_is_kept_of_tensors_that_are_gone() -> None:
    with psstore.connect("local://") as store:
        context, reading = store._operations.context, store._operations.reading
        for step in range(10):
            store.create(f"dropped {step}", [float(step)], rule="sgd")
            store.create("overwritten", [float(step)], rule="sgd", exist="overwrite")
            store.push_many({f"dropped {step}": [1.0], "overwritten": [1.0]})
            store.commit({"lr": 0.1})
            store.pull(f"dropped {step}")
            store.pull("overwritten")
            store.drop(f"dropped {step}")
        gone = set(range(1, store.describe("overwritten").id))
        assert [layout for layout in context.layouts._known.values() if layout.ids & gone] == []
        assert (context.first_values._there & gone, list(reading._pulled)) == (set(), ["overwritten"])
        assert (store.version_of("dropped 9"), store.version_of("overwritten")) == (0, 10)


def test_describe_keys_and_drop(store: Store) -> None:
    store.create("a", shape=(2, 3), rule="adam", group=4)
    spec = store.describe("a").spec
    assert (spec.shape, spec.dtype, spec.rule, spec.group) == ((2, 3), "float32", "adam", 4)
    assert store.keys() == ["a"]
    store.drop("a")
    assert store.keys() == []
    with pytest.raises(UnknownTensor, match="'a'"):
        store.pull("a")


# ---- plain tensors --------------------------------------------------------------------------------


def test_push_to_assign_tensor_sets_it(store: Store) -> None:
    store.create("a", shape=(2,))
    store.push("a", [1.0, 2.0])
    store.push("a", np.array([3, 4], F32))
    assert_array_equal(pulled(store, "a"), np.array([3, 4], F32))


def test_push_to_add_tensor_adds_once_each(store: Store) -> None:
    store.create("a", shape=(2,), rule="add")
    for _ in range(10):
        store.push("a", [1.0, 2.0])
    assert_array_equal(pulled(store, "a"), np.array([10, 20], F32))


def test_push_with_op_add_adds_to_assign_tensor(store: Store) -> None:
    store.create("a", [1.0, 1.0])
    store.push("a", [2.0, 3.0], op="add")
    assert_array_equal(pulled(store, "a"), np.array([3, 4], F32))


# ---- training -------------------------------------------------------------------------------------


def test_commit_applies_the_pushed_gradient(store: Store) -> None:
    store.create("w", [1.0, 2.0], rule="sgd")
    store.push("w", [1.0, 10.0])
    done = store.commit({"lr": 0.5})
    assert (done.round, done.decision, done.late) == (store.round - 1, store.version, False)
    assert_array_equal(pulled(store, "w"), np.array([0.5, -3.0], F32))


def test_pushing_again_before_commit_replaces(store: Store) -> None:
    store.create("w", shape=(1,), rule="sgd")
    store.push("w", [100.0])
    store.push("w", [1.0])
    store.commit({"lr": 1.0})
    assert_array_equal(pulled(store, "w"), np.array([-1], F32))


def test_tensor_that_was_not_pushed_is_left_alone(store: Store) -> None:
    store.create("w", shape=(1,), rule="sgd")
    store.create("forgotten", [7.0], rule="sgd")
    store.push("w", [1.0])
    store.commit({"lr": 1.0})
    assert_array_equal(pulled(store, "forgotten"), np.array([7], F32))


def test_absent_name_is_left_alone_although_pushed(store: Store) -> None:
    store.create("w", [7.0], rule="sgd")
    store.push("w", [1.0])
    store.commit({"lr": 1.0}, present=[])
    assert_array_equal(pulled(store, "w"), np.array([7], F32))


def test_non_finite_commit_skips_the_step(store: Store) -> None:
    store.create("w", [7.0], rule="sgd")
    store.push("w", [np.inf])
    version = store.commit({"lr": 1.0}, non_finite=True).decision
    assert_array_equal(pulled(store, "w"), np.array([7], F32))
    assert store.version == version


def test_hypers_are_given_by_group_and_remembered(store: Store) -> None:
    store.create("a", shape=(1,), rule="sgd", group=0)
    store.create("b", shape=(1,), rule="sgd", group=1)
    for hypers in ({0: {"lr": 1.0}, 1: {"lr": 10.0}}, None):
        store.push_many({"a": [1.0], "b": [1.0]})
        store.commit(hypers)
    assert_array_equal(pulled(store, "a"), np.array([-2], F32))
    assert_array_equal(pulled(store, "b"), np.array([-20], F32))


def test_unknown_hyper_is_refused_and_the_round_stays_open(store: Store) -> None:
    store.create("w", shape=(1,), rule="sgd")
    store.push("w", [1.0])
    before = store.round
    with pytest.raises(BadHyper, match="'learning_rate'"):
        store.commit({"learning_rate": 1.0})
    assert store.round == before
    store.commit({"lr": 1.0})
    assert_array_equal(pulled(store, "w"), np.array([-1], F32))


def test_another_clients_new_tensor_does_not_disturb_a_commit(cluster: Cluster, store: Store) -> None:
    store.create("w", shape=(1,), rule="sgd")
    store.push("w", [1.0])
    with cluster.connect(role="client") as other:
        other.create("unheard of", [1.0], rule="sgd")
        store.commit({"lr": 1.0})
        assert_array_equal(pulled(store, "w"), np.array([-1], F32))
        assert_array_equal(pulled(other, "unheard of"), np.array([1], F32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_contribution_in_half_precision_is_widened(store: Store, dtype: Any) -> None:
    store.create("w", shape=(3,), rule="sgd")
    store.push("w", np.array([1, 2, 0.5], dtype))
    store.commit({"lr": 1.0})
    assert_array_equal(pulled(store, "w"), np.array([-1, -2, -0.5], F32))


def test_contribution_in_bfloat16_comes_from_torch(store: Store) -> None:
    store.create("w", shape=(3,), rule="sgd")
    store.push("w", torch.tensor([1, 2, 0.5], dtype=torch.bfloat16))
    store.commit({"lr": 1.0})
    assert_array_equal(pulled(store, "w"), np.array([-1, -2, -0.5], F32))


# ---- shapes that are easy to get wrong --------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize("rule", ["assign", "add", "sgd"])
def test_scalars_and_empty_tensors_work(store: Store, shape: tuple[int, ...], rule: str) -> None:
    store.create("a", np.full(shape, 3, F32), rule=rule)
    store.push("a", np.full(shape, 2, F32))
    if rule == "sgd":
        store.commit({"lr": 1.0})
    expected = {"assign": 2, "add": 5, "sgd": 1}[rule]
    assert_array_equal(pulled(store, "a"), np.full(shape, expected, F32))


def test_non_contiguous_and_foreign_endian_arrays_are_sent_as_they_read(store: Store) -> None:
    value = np.arange(12, dtype=F32).reshape(3, 4)
    store.create("a", shape=(4, 3))
    store.push("a", value.T)
    assert_array_equal(pulled(store, "a"), value.T)
    store.push("a", value.T.astype(">f4"))
    assert_array_equal(pulled(store, "a"), value.T)
    store.push("a", torch.from_numpy(value).T * 2)
    assert_array_equal(pulled(store, "a"), value.T * 2)


# ---- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.zeros(3, F32), ShapeMismatch, r"expected shape \(2,\), got \(3,\)"),
        (np.zeros((2, 1), F32), ShapeMismatch, r"expected shape \(2,\), got \(2, 1\)"),
        (np.zeros(2, np.float64), DTypeMismatch, "expected dtype float32 or bfloat16 or float16, got float64"),
        (np.zeros(2, np.int64), DTypeMismatch, "dtype int64"),
        (torch.zeros(2, dtype=torch.int32), DTypeMismatch, "dtype int32"),
        (torch.zeros(3), ShapeMismatch, r"got \(3,\)"),
    ],
)
def test_push_of_what_does_not_fit_is_refused_before_it_is_sent(
    store: Store, value: Any, error: type, words: str
) -> None:
    store.create("w", shape=(2,))
    before = store.bytes_pushed
    with pytest.raises(error, match=words):
        store.push("w", value)
    assert store.bytes_pushed == before


def test_push_to_unknown_tensor_names_it(store: Store) -> None:
    with pytest.raises(UnknownTensor, match="'nowhere'"):
        store.push("nowhere", [1.0])


def test_op_that_the_rule_does_not_take_is_refused(store: Store) -> None:
    store.create("w", shape=(1,), rule="sgd")
    store.create("sum", shape=(1,), rule="add")
    with pytest.raises(RuleMismatch, match="takes gradients"):
        store.push("w", [1.0], op="add")
    with pytest.raises(RuleMismatch, match="can't be assigned"):
        store.push("sum", [1.0], op="assign")
    with pytest.raises(BadArgument, match="expected 'assign' or 'add'"):
        store.push("sum", [1.0], op="max")


def test_tensor_overwritten_by_another_client_is_learned_anew(cluster: Cluster, store: Store) -> None:
    store.create("a", [1.0])
    with cluster.connect(role="client") as other:
        other.create("a", [1.0, 2.0], exist="overwrite")
    with pytest.raises(Exception, match="dropped or overwritten"):
        store.pull("a")
    assert_array_equal(pulled(store, "a"), np.array([1, 2], F32))


def test_counters_and_repr_say_what_happened(store: Store) -> None:
    store.create("w", shape=(256,), rule="sgd")
    pushed, got = store.bytes_pushed, store.bytes_pulled
    store.push("w", np.ones(256, F32))
    store.commit()
    store.pull("w")
    assert (store.bytes_pushed - pushed, store.bytes_pulled - got) == (1024, 1024)
    assert "rank 0 of 1, 2 shards" in repr(store)
    assert {counters["shard"] for counters in store.stats()} == {0, 1}
