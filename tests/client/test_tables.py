"""Tables of rows: what is read before anybody trains, what a round does, and that neither shards nor order matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.client.tables import first_values
from psstore.errors import (
    BadArgument,
    DTypeMismatch,
    NonFinite,
    PsstoreError,
    RuleMismatch,
    ShapeMismatch,
    TensorExists,
    UnknownTensor,
)
from tests.support.cluster import TRANSPORTS, StartCluster, at_once, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 5


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as starts:
        yield starts


@pytest.fixture
def store(start: StartCluster) -> Store:
    return start(shards=3).connect()


def ids_and_gradients(seed: int, count: int = 2000, most: int = 700) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, most, count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 >> 13)
    return ids, generator.standard_normal((count, DIM), dtype=F32)


def summed(ids: Any, gradients: Any) -> dict[int, Any]:
    """Gradients by id; those of one that comes several times in order."""
    sums: dict[int, Any] = {}
    for number, gradient in zip(ids.tolist(), gradients, strict=True):
        sums[number] = sums[number] + gradient if number in sums else gradient
    return sums


# ---- reading --------------------------------------------------------------------------------------------


def test_first_values_are_the_tables_and_the_ids_alone(start: StartCluster) -> None:
    ids, _ = ids_and_gradients(1)
    found = []
    for shards in (1, 4):
        with start(shards=shards).connect() as store:
            for name, seed in (("a", 1), ("a2", 1), ("a3", 2)):
                store.create_table(name, dim=DIM, rule="sgd", init="normal(1, 0.5)", seed=seed)
            found.append([store.pull_rows(name, ids) for name in ("a", "a2", "a3")])
            assert sum(int(one["rows"]) for one in store.stats()) == 0  # reading makes none
    for one, other in zip(*found, strict=True):
        assert_array_equal(one, other)
    assert not np.array_equal(found[0][0], found[0][1])
    assert_allclose(found[0][0].mean(), 1.0, atol=0.05)


def test_a_pull_has_the_ids_shape_and_goes_where_it_is_to(store: Store) -> None:
    store.create_table("t", dim=DIM, rule="sgd", init="uniform(-1, 1)")
    ids = np.arange(12).reshape(3, 4) % 5
    rows = store.pull_rows("t", ids)
    assert rows.shape == (3, 4, DIM)
    assert_array_equal(rows[0, 0], rows[1, 1])  # both of id 0
    out = np.empty((3, 4, DIM), F32)
    assert store.pull_rows("t", ids, out=out) is out
    assert_array_equal(out, rows)
    aside = np.empty((DIM, 12), F32).T.reshape(12, DIM)[:, ::-1]
    store.pull_rows("t", ids.reshape(-1), out=aside)
    assert_array_equal(aside, rows.reshape(12, DIM))
    assert store.pull_rows("t", []).shape == (0, DIM)


def test_the_largest_id_is_one_as_any_other(store: Store) -> None:
    store.create_table("t", dim=1, rule="sgd")
    ids = np.array([2**64 - 1, 0], np.uint64)
    store.push_rows("t", ids, np.array([[1.0], [2.0]], F32))
    store.commit({"lr": 1.0})
    assert_array_equal(store.pull_rows("t", ids), [[-1], [-2]])
    assert_array_equal(store.pull_rows("t", ids.tolist()), [[-1], [-2]])


def test_rows_of_many_frames_come_and_go(start: StartCluster) -> None:
    store = start(shards=2).connect()
    store.create_table("t", dim=256, rule="sgd", init="normal(0, 1)")
    ids = np.arange(20_000)
    before = store.pull_rows("t", ids)
    store.push_rows("t", ids, before)
    store.commit({"lr": 1.0})
    assert_array_equal(store.pull_rows("t", ids), np.zeros_like(before))


# ---- rounds ---------------------------------------------------------------------------------------------


def test_a_round_steps_each_row_once_with_the_sum_of_its_gradients(store: Store) -> None:
    store.create_table("t", dim=DIM, rule="sgd", init="constant(1)")
    ids, gradients = ids_and_gradients(2)
    store.push_rows("t", ids, gradients)
    assert_array_equal(store.pull_rows("t", ids), np.ones_like(gradients))  # it waits for the commit
    store.commit({"lr": 1.0})
    sums = summed(ids, gradients)
    unique = np.array(list(sums), np.uint64)
    assert_array_equal(store.pull_rows("t", unique), F32(1) - np.array(list(sums.values())))
    assert sum(int(one["rows"]) for one in store.stats()) == len(unique)


def test_a_push_replaces_all_of_the_one_before_it_in_the_round(store: Store) -> None:
    store.create_table("t", dim=1, rule="sgd")
    store.push_rows("t", np.arange(1000), np.full((1000, 1), 7, F32))
    store.push_rows("t", [3], np.ones((1, 1), F32))
    store.commit({"lr": 1.0})
    assert_array_equal(store.pull_rows("t", [3, 4]), [[-1], [0]])
    assert sum(int(one["rows"]) for one in store.stats()) == 1


def test_what_no_commit_names_changes_nothing(store: Store) -> None:
    store.create_table("t", dim=1, rule="sgd")
    store.create("w", np.zeros(1, F32), rule="sgd", group=1)
    store.push("w", np.ones(1, F32))
    store.push_rows("t", [3], np.ones((1, 1), F32))
    store.commit({"lr": 1.0}, present=["w"])
    assert_array_equal(store.pull_rows("t", [3]), [[0]])
    store.push_rows("t", [3], np.ones((1, 1), F32))
    store.commit({"lr": 1.0}, non_finite=True)
    assert_array_equal(store.pull_rows("t", [3]), [[0]])


def test_shards_and_arrival_do_not_change_a_byte(start: StartCluster) -> None:
    def train(shards: int, order: list[int]) -> Any:
        cluster = start(shards=shards, workers=3)
        workers = cluster.workers()
        for one in workers:
            one.create_table("t", dim=DIM, rule="adagrad", init="normal(0, 1)", seed=3)
        for step in range(3):
            for rank in order:
                workers[rank].push_rows("t", *ids_and_gradients(10 * step + rank))
            at_once(*[lambda one=one: one.commit({"lr": 0.1}, weight=1.5) for one in workers])
        rows = workers[0].pull_rows("t", ids_and_gradients(0)[0])
        cluster.close()
        return rows

    one = train(1, [0, 1, 2])
    assert_array_equal(one, train(4, [2, 0, 1]))


def test_the_mean_of_workers_counts_rows_that_one_has_not_as_zero(start: StartCluster) -> None:
    workers = start(shards=2, workers=2).workers()
    for one in workers:
        one.create_table("t", dim=1, rule="sgd")
    workers[0].push_rows("t", [1, 2], np.array([[2], [4]], F32))
    workers[1].push_rows("t", [2, 3], np.array([[6], [8]], F32))
    at_once(*[lambda one=one: one.commit({"lr": 1.0}) for one in workers])
    for one in workers:
        assert_array_equal(one.pull_rows("t", [1, 2, 3, 4]), [[-1], [-5], [-4], [0]])


def test_asynchronous_workers_each_take_a_step_of_their_own(start: StartCluster) -> None:
    workers = start(shards=2, workers=2, mode="async").workers()
    for one in workers:
        one.create_table("t", dim=1, rule="sgd")
    for one in workers:
        one.push_rows("t", [1], np.ones((1, 1), F32))
        one.commit({"lr": 1.0})
    assert_array_equal(workers[0].pull_rows("t", [1]), [[-2]])


def test_the_norm_that_clips_includes_rows(store: Store) -> None:
    store.create("w", np.zeros(2, F32), rule="sgd")
    store.create_table("t", dim=2, rule="sgd", group=1)
    store.push("w", np.array([3, 0], F32))
    store.push_rows("t", [5, 9], np.array([[0, 4], [0, 0]], F32))
    store.commit({"lr": 1.0}, max_norm=1.0)
    assert store.global_norm() == 5.0
    factor = F32(1.0 / (5.0 + 1e-6))
    assert_array_equal(store.pull_rows("t", [5]), [[0, -4 * factor]])
    assert_array_equal(store.pull("w"), [-3 * factor, 0])


def test_an_early_round_waits_for_the_rows_that_it_promised(start: StartCluster) -> None:
    workers = start(shards=2, workers=2).workers()
    for one in workers:
        one.create_table("t", dim=1, rule="sgd")

    def step(one: Store) -> Any:
        one.commit({"lr": 1.0}, present=["t"], early=True)
        one.push_rows("t", [1, 7], np.ones((2, 1), F32))
        one.finish()
        return one.pull_rows("t", [1, 7, 8])

    for rows in at_once(*[lambda one=one: step(one) for one in workers]):
        assert_array_equal(rows, [[-1], [-1], [0]])


def test_a_step_of_rows_that_many_read_is_seen_whole_by_each(start: StartCluster) -> None:
    cluster = start(shards=2)
    worker, reader = cluster.connect(), cluster.connect(role="client")
    worker.create_table("t", dim=DIM, rule="sgd")
    ids = np.arange(500)
    for step in range(1, 6):
        worker.push_rows("t", ids, np.full((500, DIM), -1, F32))
        worker.commit({"lr": 1.0})
        assert_array_equal(reader.pull_rows("t", ids), np.full((500, DIM), step, F32))


def test_a_snapshot_has_the_rows_of_its_version_while_others_train(start: StartCluster) -> None:
    cluster = start(shards=2)
    worker, reader = cluster.connect(), cluster.connect(role="client")
    worker.create_table("t", dim=DIM, rule="adagrad", init="normal(0, 1)")
    ids, gradients = ids_and_gradients(4)
    worker.push_rows("t", ids[:1000], gradients[:1000])
    worker.commit({"lr": 0.1})
    then = worker.pull_rows("t", ids)
    with reader.snapshot() as view:
        for _ in range(3):
            worker.push_rows("t", ids, gradients)  # some of them are new rows
            worker.commit({"lr": 0.1})
            assert view.version == 1
            assert_array_equal(view.pull_rows("t", ids), then)
    assert not np.array_equal(reader.pull_rows("t", ids), then)


# ---- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1.0], DTypeMismatch),
        ([-1], BadArgument),
        ([2**64], DTypeMismatch),
        (np.array([True]), DTypeMismatch),
        (["a"], DTypeMismatch),
    ],
    ids=str,
)
def test_ids_that_are_none_are_refused_before_anything_is_sent(ids: Any, error: type[PsstoreError]) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=1, rule="sgd")
        with pytest.raises(error, match=r"\[0, 2\^64\)"):
            store.pull_rows("t", ids)
        with pytest.raises(error, match=r"\[0, 2\^64\)"):
            store.push_rows("t", ids, np.zeros((1, 1), F32))


def test_rows_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule="sgd")
        with pytest.raises(ShapeMismatch, match=r"expected shape \(2, 3\)"):
            store.push_rows("t", [1, 2], np.zeros((2, 4), F32))
        with pytest.raises(DTypeMismatch, match="float32"):
            store.push_rows("t", [1], np.zeros((1, 3), np.float64))
        with pytest.raises(ShapeMismatch, match=r"expected shape \(1, 3\)"):
            store.pull_rows("t", [1], out=np.zeros((3,), F32))
        with pytest.raises(UnknownTensor):
            store.pull_rows("nowhere", [1])


@pytest.mark.parametrize("codec", [None, "int8"])
def test_rows_that_are_not_finite_are_refused_if_asked_for_and_nothing_of_their_push_counts(codec: str | None) -> None:
    with psstore.LocalStore(shards=2, refuse_non_finite=True) as server, server.connect() as store:
        store.create_table("t", dim=2, rule="sgd")
        rows = np.ones((40, 2), F32)
        rows[7, 1] = np.nan
        with pytest.raises(NonFinite, match="'t'"):
            store.push_rows("t", range(40), rows, codec=codec)
        store.commit({"lr": 1.0})
        assert store.keys("t").size == 0
        with pytest.raises(NonFinite, match="'t'"):
            store.assign_rows("t", [7], rows[7:8], codec=codec)
        assert store.keys("t").size == 0


def test_tables_and_tensors_do_not_stand_in_for_one_another() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule="sgd")
        store.create("w", np.zeros((64, 3), F32), rule="sgd", group=1)
        with pytest.raises(RuleMismatch, match="pull_rows"):
            store.pull("t")
        with pytest.raises(RuleMismatch, match="push_rows"):
            store.push("t", np.zeros((64, 3), F32))
        with pytest.raises(RuleMismatch, match="no table"):
            store.push_rows("w", [1], np.zeros((1, 3), F32))
        with pytest.raises(RuleMismatch):
            store.create("x", np.zeros(3, F32), rule="sgd")  # group 0 has a rule of rows
        with pytest.raises(BadArgument):
            store.create("y", np.zeros(3, F32), rule="sparse_sgd", group=2)


def test_a_shard_on_a_device_has_no_tables_and_says_so() -> None:
    with psstore.LocalStore(shards=2, device="cpu,fake:0") as server, server.connect() as store:
        with pytest.raises(BadArgument, match="--device cpu"):
            store.create_table("t", dim=3, rule="sgd")
        assert store.keys() == []


def test_a_table_is_matched_by_all_that_it_is() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule="sgd", init="normal(0, 1)", seed=1)
        store.create_table("t", dim=3, rule="sgd", init="normal(0, 1)", seed=1)
        with pytest.raises(TensorExists):
            store.create_table("t", dim=3, rule="sgd", init="normal(0, 1)", seed=1, exist="error")
        with pytest.raises(ShapeMismatch):
            store.create_table("t", dim=4, rule="sgd", init="normal(0, 1)", seed=1)
        with pytest.raises(BadArgument, match="in the store"):
            store.create_table("t", dim=3, rule="sgd", init="normal(0, 1)", seed=2)
        store.push_rows("t", [1], np.ones((1, 3), F32))
        store.commit({"lr": 1.0})
        store.drop("t")
        with pytest.raises(UnknownTensor):
            store.pull_rows("t", [1])
        store.create_table("t", dim=3, rule="sgd", init="zeros")
        assert_array_equal(store.pull_rows("t", [1]), [[0, 0, 0]])


@pytest.mark.parametrize(
    "options",
    [{"dim": 0}, {"dim": 4097}, {"rule": "adamw"}, {"init": "normal(0)"}, {"init": "uniform(1, 0)"}, {"dim": 1.5}],
    ids=str,
)
def test_a_table_that_can_not_be_is_refused(options: dict[str, Any]) -> None:
    with (
        psstore.connect("local://", rank=0, num_workers=1) as store,
        pytest.raises(BadArgument),
    ):
        store.create_table("t", **{"dim": 1, "rule": "sgd", **options})


def test_an_init_is_read_with_its_numbers() -> None:
    assert first_values("zeros") == ("constant", 0.0, 0.0)
    assert first_values(" normal( 0 , 1e-2 ) ") == ("normal", 0.0, 0.01)
    assert first_values("uniform(-1,1)") == ("uniform", -1.0, 1.0)
    for wrong in ("", "normal", "normal(0, x)", "zeros(1)", "normal(0, -1)", "constant(1, 2)"):
        with pytest.raises(BadArgument, match="normal\\(mean, std\\)"):
            first_values(wrong)
