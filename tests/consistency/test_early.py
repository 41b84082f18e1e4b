"""Early commits, clipping and torn rounds over every transport: the same bytes, or an error that says who is gone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from psstore import errors
from psstore.client.store import Store
from psstore.types import TensorSpec
from tests.support.cluster import PATIENCE_S, TRANSPORTS, StartCluster, at_once, clusters

pytestmark = pytest.mark.one_loop

F32 = np.float32
SHAPES = {"embedding": (700, 512), "weight": (64, 33), "scale": ()}
NAMES = list(SHAPES)
NUM_WORKERS, NUM_ROUNDS = 3, 4
HYPERS = {"lr": 0.5, "momentum": 0.9}
MAX_NORM = 20.0


@pytest.fixture(params=TRANSPORTS)
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as starting:
        yield starting


def draw(seed: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    chance = np.random.default_rng(seed)
    return {name: chance.standard_normal(shape).astype(F32) for name, shape in SHAPES.items()}


def create(store: Store) -> None:
    specs = [TensorSpec(name=name, shape=shape, rule="sgd", zeros=False) for name, shape in SHAPES.items()]
    store.create_many(specs, list(draw(0).values()) if store.rank == 0 else None, offer=store.rank == 0)
    store.pull_many(NAMES)


def gradients(store: Store, round_: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    assert store.rank is not None
    return draw(100 * round_ + store.rank)


def commit_last(store: Store) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    for round_ in range(1, NUM_ROUNDS + 1):
        store.push_many(gradients(store, round_))
        store.commit(HYPERS)
        values = store.pull_many(NAMES)
    return values


def commit_first(store: Store) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Each tensor is asked for before it is pushed, as late layers are while early ones are still being computed."""
    for round_ in range(1, NUM_ROUNDS + 1):
        store.commit(HYPERS, early=True, present=NAMES)
        reading = [store.start_pull_many([name]) for name in NAMES]
        for name, gradient in reversed(gradients(store, round_).items()):
            store.push(name, gradient)
        store.finish()
        assert store.round == round_ + 1
        values = [one for future in reading for one in future.result(PATIENCE_S)]
    return values


def trained(start: StartCluster, how: object) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    cluster = start(shards=2, workers=NUM_WORKERS)

    def train(store: Store) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        create(store)
        assert callable(how)
        return list(how(store))

    results = at_once(*(lambda store=store: train(store) for store in cluster.workers()))
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert_array_equal(one, same)
    return results[0]


def test_early_commit_gives_the_bytes_of_a_late_one(start: StartCluster) -> None:
    for early, late in zip(trained(start, commit_first), trained(start, commit_last), strict=True):
        assert_array_equal(early, late)


def test_worker_that_leaves_an_early_round_tears_it_for_all(start: StartCluster) -> None:
    cluster = start(shards=2, workers=NUM_WORKERS)
    stores = cluster.workers()
    at_once(*(lambda store=store: create(store) for store in stores))
    at_once(*(lambda store=store: store.commit(HYPERS, early=True, present=NAMES) for store in stores))
    first, second, gone = stores
    reading = first.start_pull_many(NAMES)
    first.push_many(gradients(first, 1))
    finishing = first.start_finish()
    gone.leave()
    for future in (finishing, reading):
        with pytest.raises(errors.TornRound, match="round 1 is torn: rank 2 left after its early commit") as caught:
            future.result(PATIENCE_S)
        assert (caught.value.details["rank"], caught.value.details["round"]) == (2, 1)
    with pytest.raises(errors.TornRound):
        second.finish()
    with pytest.raises(errors.TornRound):
        second.pull_many(NAMES)  # what is not there by now will never be
    assert "rank 2 left" in str(first.stats()[0]["torn"])


def test_clipping_is_that_of_one_process(start: StartCluster) -> None:
    cluster = start(shards=2, workers=NUM_WORKERS)

    def train(store: Store) -> tuple[list[float], list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
        create(store)
        norms = []
        for round_ in range(1, NUM_ROUNDS + 1):
            store.push_many(gradients(store, round_))
            store.commit(HYPERS, max_norm=MAX_NORM)
            norms.append(store.global_norm())
            values = store.pull_many(NAMES)
        return norms, values

    results = at_once(*(lambda store=store: train(store) for store in cluster.workers()))
    assert results[0][0] == results[1][0] == results[2][0]
    expected_norms, expected = one_process()
    # Sums of 360 thousand squares, there of float32 and here of float64.
    np.testing.assert_allclose(results[0][0], expected_norms, rtol=1e-5)
    for found, value in zip(results[0][1], expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def one_process() -> tuple[list[float], list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    parameters = [torch.nn.Parameter(torch.from_numpy(np.asarray(value))) for value in draw(0).values()]
    optimizer = torch.optim.SGD(parameters, lr=HYPERS["lr"], momentum=HYPERS["momentum"])
    norms = []
    for round_ in range(1, NUM_ROUNDS + 1):
        drawn = [draw(100 * round_ + rank) for rank in range(NUM_WORKERS)]
        for name, parameter in zip(NAMES, parameters, strict=True):
            total = sum((one[name] for one in drawn), F32(0)) / F32(NUM_WORKERS)
            parameter.grad = torch.from_numpy(np.asarray(total))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)))
        optimizer.step()
    return norms, [parameter.detach().numpy() for parameter in parameters]


def test_round_whose_norm_is_not_finite_changes_nothing(start: StartCluster) -> None:
    cluster = start(shards=2, workers=1)
    (store,) = cluster.workers()
    create(store)
    before = store.pull_many(NAMES)
    drawn = gradients(store, 1)
    drawn["weight"][0, 0] = np.inf
    store.push_many(drawn)
    store.commit(HYPERS, max_norm=MAX_NORM)
    assert not np.isfinite(store.global_norm())
    for value, same in zip(store.pull_many(NAMES), before, strict=True):
        assert_array_equal(value, same)


def test_push_of_the_next_round_settles_the_norm_that_nobody_asked_for(start: StartCluster) -> None:
    asking, forgetful = (start(workers=1).connect() for _ in range(2))
    values = []
    for store in (asking, forgetful):
        create(store)
        store.push_many(gradients(store, 1))
        store.commit(HYPERS, max_norm=MAX_NORM)
        if store is asking:
            store.global_norm()
        store.push_many(gradients(store, 2))
        assert store.commit(HYPERS).decision == 2
        values.append(store.pull_many(NAMES))
    for one, same in zip(*values, strict=True):
        assert_array_equal(one, same)


def test_next_life_finds_the_scale_that_the_dead_did_not_tell(start: StartCluster) -> None:
    cluster = start(shards=2, workers=1)
    (store,) = cluster.workers()
    create(store)
    store.push_many(gradients(store, 1))
    store.commit(HYPERS, max_norm=MAX_NORM)
    store.close()
    reborn = cluster.connect(rank=0)
    assert reborn.global_norm() > MAX_NORM
    assert reborn.round == 2
    values = reborn.pull_many(NAMES)
    assert any(not np.array_equal(value, first) for value, first in zip(values, draw(0).values(), strict=True))


def test_early_round_is_finished_before_the_next_one_begins(start: StartCluster) -> None:
    (store,) = start(workers=1).workers()
    create(store)
    with pytest.raises(errors.BadArgument, match="round 1 was not committed early"):
        store.finish()
    store.commit(HYPERS, early=True, present=NAMES)
    with pytest.raises(errors.BadArgument, match="round 1 was committed early; push what it promised, then finish"):
        store.commit(HYPERS)
    store.push_many(gradients(store, 1))
    store.finish()
    store.push_many(gradients(store, 2))
    assert store.commit(HYPERS).round == 2
