"""Rows in fewer bytes: what a codec loses comes later, and nothing else of a table changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import psstore
from psstore.client.compression import rows as row_residuals
from psstore.client.store import Store
from psstore.errors import BadArgument, DTypeMismatch, ShapeMismatch
from tests.support.cluster import TRANSPORTS, StartCluster, at_once, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 300
"""Of which int8 makes two blocks."""

ROW_BYTES = {"bf16": 2 * DIM, "fp16": 2 * DIM, "int8": DIM + 2 * 4}
QUANTUM = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 254}
"""Largest loss of an element, in parts of the largest one of its row."""


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as starts:
        yield starts


def drawn(seed: int, rows: int) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, DIM)).astype(F32)


def sent_bytes(store: Store) -> int:
    return sum(int(one["sent_bytes"]) for one in store.stats())


def received_bytes(store: Store) -> int:
    return sum(int(one["received_bytes"]) for one in store.stats())


@pytest.mark.parametrize("codec", ROW_BYTES)
def test_what_a_push_lost_comes_with_the_next(start: StartCluster, codec: str) -> None:
    store = start(shards=3).connect()
    store.create_table("t", dim=DIM, rule="sgd")
    ids, gradients = np.arange(40), drawn(1, 40)
    before = received_bytes(store)
    for _ in range(9):
        store.push_rows("t", ids, gradients, codec=codec)
        store.commit({"lr": 1.0})
    assert received_bytes(store) - before == 9 * 40 * (8 + ROW_BYTES[codec])
    lost = np.abs(store.pull_rows("t", ids) + 9 * gradients)
    assert 0 < lost.max() < 1.1 * QUANTUM[codec] + 1e-5  # of one push, not of nine


def test_a_row_does_not_depend_on_shards_or_on_what_is_pushed_beside_it() -> None:
    gradients = drawn(2, 500)
    found = []
    for shards, ids in ((1, range(500)), (3, range(0, 500, 7)), (2, [490, 7, 14])):
        with psstore.connect(f"local://?shards={shards}", rank=0, num_workers=1) as store:
            store.create_table("t", dim=DIM, rule="adagrad")
            for _ in range(3):
                store.push_rows("t", list(ids), gradients[list(ids)], codec="int8")
                store.commit({"lr": 0.1})
            found.append(store.pull_rows("t", [7, 14, 490]))
    assert_array_equal(found[0], found[1])
    assert_array_equal(found[0], found[2])


def test_gradients_of_an_id_that_comes_twice_are_summed_before_they_are_encoded() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        one, other = drawn(3, 2)
        store.push_rows("t", [5, 5], np.stack([one, other]), codec="int8")
        store.push_rows("t", [5, 6], np.stack([one + other, one]), codec="int8")  # replaces the first
        store.commit({"lr": 1.0})
        assert_allclose(store.pull_rows("t", [5])[0], -(one + other), atol=2 * QUANTUM["int8"])


@pytest.mark.parametrize("undone", ["a round that is skipped", "a push that is replaced"])
def test_a_push_that_does_not_count_leaves_no_trace(undone: str) -> None:
    found = []
    for tries in (True, False):
        with psstore.connect("local://", rank=0, num_workers=1) as store:
            store.create_table("t", dim=DIM, rule="sgd")
            store.push_rows("t", [1, 2], drawn(4, 2), codec="int8")
            store.commit({"lr": 1.0})
            if tries:
                store.push_rows("t", [1, 3], drawn(5, 2), codec="int8")
                if undone == "a round that is skipped":
                    store.commit({"lr": 1.0}, non_finite=True)
            store.push_rows("t", [1, 2], drawn(6, 2), codec="int8")
            store.commit({"lr": 1.0})
            store.push_rows("t", [1, 3], np.zeros((2, DIM), F32), codec="bf16")  # what is kept back
            store.commit({"lr": 1.0})
            found.append(store.pull_rows("t", [1, 2, 3]))
    assert_array_equal(*found)


def test_what_is_kept_back_follows_the_loss_scale() -> None:
    found = []
    for scales in ([1.0, 1.0, 1.0], [8.0, 2.0, 32.0]):
        with psstore.connect("local://", rank=0, num_workers=1) as store:
            store.create_table("t", dim=DIM, rule="sgd")
            for step, scale in enumerate(scales):
                gradients = drawn(step, 2) * F32(scale)
                store.push_rows("t", [1, 2], gradients, codec="int8", loss_scale=scale)
                store.commit({"lr": 1.0}, loss_scale=scale)
            found.append(store.pull_rows("t", [1, 2]))
    assert_array_equal(*found)


def test_what_has_no_room_is_forgotten_and_the_rows_pushed_last_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_residuals, "MAX_RESIDUAL_BYTES", 8 * (4 * DIM + row_residuals.BESIDE_A_ROW_BYTES))
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        for ids in (range(8), range(8, 16)):
            store.push_rows("t", list(ids), drawn(7, 8), codec="int8")
            store.commit({"lr": 1.0})
        before = store.pull_rows("t", range(16))
        store.push_rows("t", range(16), np.zeros((16, DIM), F32), codec="fp16")  # what is kept back
        store.commit({"lr": 1.0})
        moved = (store.pull_rows("t", range(16)) != before).any(axis=1)
    assert moved.tolist() == [False] * 8 + [True] * 8


def test_what_is_kept_back_is_taken_over_by_another_worker() -> None:
    with (
        psstore.connect("local://", rank=0, num_workers=1) as store,
        psstore.connect("local://?shards=2", rank=0, num_workers=1) as other,
    ):
        for one in (store, other):
            one.create_table("t", dim=DIM, rule="sgd")
            assert one.row_residuals("t") is None
        for seed, ids in enumerate(([1, 2**64 - 1], [2])):
            store.push_rows("t", np.array(ids, np.uint64), drawn(seed, len(ids)), codec="int8")
            store.commit({"lr": 1.0})
        kept = store.row_residuals("t")
        assert kept is not None
        assert dict(zip(kept.ids.tolist(), kept.ages.tolist(), strict=True)) == {1: 1, 2**64 - 1: 1, 2: 0}
        other.assign_rows("t", kept.ids, store.pull_rows("t", kept.ids))
        other.set_row_residuals("t", kept)
        for one in (store, other):
            one.push_rows("t", kept.ids, drawn(7, 3), codec="int8")
            one.commit({"lr": 1.0})
        assert_array_equal(store.pull_rows("t", kept.ids), other.pull_rows("t", kept.ids))
        other.set_row_residuals("t", None)
        assert other.row_residuals("t") is None


def test_residuals_that_are_none_of_the_table_s_are_refused_and_nothing_changes() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        store.push_rows("t", [1, 2], drawn(1, 2), codec="int8")
        store.commit({"lr": 1.0})
        kept = store.row_residuals("t")
        assert kept is not None
        for wrong, error in (
            (kept._replace(residuals=kept.residuals[:, :-1]), ShapeMismatch),
            (kept._replace(residuals=kept.residuals.astype("f8")), DTypeMismatch),
            (kept._replace(ages=kept.ages[:1]), ShapeMismatch),
            (kept._replace(ages=kept.ages.astype("i8")), DTypeMismatch),
            (kept._replace(ids=kept.ids[[0, 0]]), BadArgument),
        ):
            with pytest.raises(error, match="residuals"):
                store.set_row_residuals("t", wrong)
        again = store.row_residuals("t")
        assert again is not None
        assert_array_equal(again.residuals, kept.residuals)


def test_workers_may_push_in_codecs_of_their_own(start: StartCluster) -> None:
    cluster = start(shards=2, workers=2)
    given = {0: drawn(8, 3), 1: drawn(9, 3)}

    def train(rank: int) -> Any:
        worker = cluster.connect(rank=rank)
        worker.create_table("t", dim=DIM, rule="sgd")
        worker.push_rows("t", [1, 2, 3], given[rank], codec=("int8", None)[rank])
        worker.commit({"lr": 1.0})
        return worker.pull_rows("t", [1, 2, 3])

    one, other = at_once(lambda: train(0), lambda: train(1))
    assert_array_equal(one, other)
    assert_allclose(one, -(given[0] + given[1]) / 2, atol=QUANTUM["int8"])


@pytest.mark.parametrize("codec", ROW_BYTES)
def test_rows_are_read_in_a_codec_each_rounded_by_itself(start: StartCluster, codec: str) -> None:
    store = start(shards=3).connect()
    store.create_table("t", dim=DIM, rule="sgd", init="normal(0, 1)")
    ids = np.arange(200).reshape(100, 2)
    exact = store.pull_rows("t", ids)
    before = sent_bytes(store)
    found = store.pull_rows("t", ids, codec=codec)
    assert sent_bytes(store) - before == ids.size * ROW_BYTES[codec]
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    assert 0 < (np.abs(found - exact) / largest).max() < 1.01 * QUANTUM[codec]
    out = np.empty((2, DIM), F32)
    assert store.pull_rows("t", [77, 77], out=out, codec=codec) is out
    assert_array_equal(out, found.reshape(-1, DIM)[[77, 77]])


@pytest.mark.parametrize("codec", ROW_BYTES)
def test_rows_are_assigned_and_read_of_a_snapshot_in_a_codec(start: StartCluster, codec: str) -> None:
    store = start(shards=3).connect()
    store.create_table("t", dim=DIM, rule="sgd")
    ids, rows = np.arange(40), drawn(1, 40)
    before = received_bytes(store)
    store.assign_rows("t", ids, rows, codec=codec)
    assert received_bytes(store) - before == 40 * (8 + ROW_BYTES[codec])
    found = store.pull_rows("t", ids)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    assert 0 < (np.abs(found - rows) / largest).max() < 1.01 * QUANTUM[codec]
    with store.snapshot() as view:
        store.push_rows("t", ids, rows)
        store.commit({"lr": 1.0})
        before = sent_bytes(store)
        of_then = view.pull_rows("t", ids, codec=codec)
        assert sent_bytes(store) - before == 40 * ROW_BYTES[codec]
    assert (np.abs(of_then - found) / largest).max() < 1.01 * QUANTUM[codec]


@pytest.mark.parametrize("codec", ["sign", "topk:0.1", "int4", "float32"])
def test_a_codec_that_rows_have_not_is_refused_before_anything_is_sent(codec: str) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="sgd")
        with pytest.raises(BadArgument, match=r"push_rows 't': codec is .* rows travel in none, bf16, fp16, int8"):
            store.push_rows("t", [1], drawn(1, 1), codec=codec)
        with pytest.raises(BadArgument, match=r"pull_rows 't': codec is"):
            store.pull_rows("t", [1], codec=codec)
        with pytest.raises(BadArgument, match=r"assign_rows 't': codec is"):
            store.assign_rows("t", [1], drawn(1, 1), codec=codec)
