"""Rule state read from a store and written to it, over every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.rule_state import Restored, RuleState
from psstore.client.store import Store
from psstore.errors import BadArgument, RuleMismatch, ShapeMismatch
from tests.support.cluster import Cluster

pytestmark = pytest.mark.one_loop

F32 = np.float32
ELEMS = 600_000
"""Several slices, so that both shards have some."""

HYPER = {"lr": 0.1}


def gradient(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(ELEMS, dtype=F32)


def train(store: Store, name: str, seeds: range) -> None:
    for seed in seeds:
        store.push(name, gradient(seed))
        store.commit(HYPER)
        store.pull(name)


def restored(store: Store, name: str) -> Restored:
    """All that the store holds of the tensor now."""
    return Restored(value=store.pull(name), state=store.pull_state([name])[0])


@pytest.mark.parametrize("rule", ["adam", "adamw", "adagrad", "rmsprop"])
def test_a_tensor_restored_elsewhere_goes_on_bit_for_bit(store: Store, rule: str) -> None:
    first = np.ones(ELEMS, F32)
    store.create("trained", first, rule=rule)
    train(store, "trained", range(3))
    checkpoint = restored(store, "trained")
    assert checkpoint.state is not None
    assert checkpoint.state.steps == 3

    store.create("other", np.zeros(ELEMS, F32), rule=rule)
    store.restore({"other": checkpoint})
    assert_array_equal(store.pull("other"), checkpoint.value)
    train(store, "trained", range(3, 5))
    train(store, "other", range(3, 5))
    assert_array_equal(store.pull("other"), store.pull("trained"))
    assert store.pull_state(["other"])[0].steps == 5


def test_a_momentum_buffer_is_there_once_the_rule_has_made_it(store: Store) -> None:
    store.create("w", np.ones(ELEMS, F32), rule="sgd")
    assert store.pull_state(["w"]) == [RuleState(0, {})]
    store.push("w", gradient(1))
    store.commit({"lr": 0.1, "momentum": 0.9})
    (state,) = store.pull_state(["w"])
    assert_array_equal(state.buffers["momentum_buffer"], gradient(1))


def test_state_that_is_not_restored_is_as_if_it_had_never_been_made(store: Store) -> None:
    for name in ("fresh", "reset"):
        store.create(name, np.ones(ELEMS, F32), rule="adam")
    train(store, "reset", range(3))
    store.restore({"reset": Restored(value=np.ones(ELEMS, F32), state=RuleState())})
    assert store.pull_state(["reset"]) == [RuleState(0, {})]
    train(store, "fresh", range(7, 9))
    train(store, "reset", range(7, 9))
    assert_array_equal(store.pull("reset"), store.pull("fresh"))


def test_a_restored_value_is_news_to_who_has_pulled_before(store: Store) -> None:
    store.create("w", np.ones(4, F32), rule="sgd")
    store.push("w", np.ones(4, F32))
    version = store.commit(HYPER).decision
    store.pull("w")
    assert store.pull("w", if_newer_than=version) is None
    store.restore({"w": Restored(value=np.full(4, 7, F32))})
    assert_array_equal(store.pull("w", if_newer_than=version), np.full(4, 7, F32))


def test_a_restored_value_keeps_the_state_and_a_restored_state_the_value(store: Store) -> None:
    store.create("w", np.ones(ELEMS, F32), rule="adam")
    train(store, "w", range(2))
    value, (state,) = store.pull("w"), store.pull_state(["w"])
    store.restore({"w": Restored(value=np.zeros(ELEMS, F32))})
    (kept,) = store.pull_state(["w"])
    assert kept.steps == 2
    assert_array_equal(kept.buffers["exp_avg"], state.buffers["exp_avg"])
    store.restore({"w": Restored(value=value)})
    store.restore({"w": Restored(state=RuleState())})
    assert_array_equal(store.pull("w"), value)


def test_restoring_is_refused_before_anything_changes(store: Store) -> None:
    store.create("w", np.ones(4, F32), rule="sgd")
    store.create("plain", np.ones(4, F32))
    with pytest.raises(RuleMismatch, match="'assign'; it is not trained, so push sets it"):
        store.restore({"w": Restored(value=np.zeros(4, F32)), "plain": Restored(value=np.zeros(4, F32))})
    with pytest.raises(ShapeMismatch, match=r"expected shape \(4,\), got \(3,\)"):
        store.restore({"w": Restored(value=np.zeros(3, F32))})
    with pytest.raises(BadArgument, match="rule 'sgd' has no state 'exp_avg'; it has momentum_buffer"):
        store.restore({"w": Restored(state=RuleState(1, {"exp_avg": np.zeros(4, F32)}))})
    assert_array_equal(store.pull("w"), np.ones(4, F32))


def test_a_client_that_is_no_worker_restores_too(cluster: Cluster, store: Store) -> None:
    store.create("w", np.ones(4, F32), rule="sgd")
    with cluster.connect(role="client") as client:
        client.restore({"w": Restored(value=np.full(4, 3, F32))})
    assert_array_equal(store.pull("w"), np.full(4, 3, F32))
