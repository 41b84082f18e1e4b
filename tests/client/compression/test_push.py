"""Pushes in a codec: what arrives, and what is kept back of it, once a round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psstore
from psstore.codec.codecs import parse
from psstore.errors import BadArgument, DeadlineExceeded, DTypeMismatch, ShapeMismatch
from tests.client.compression.codec_support import SLICE_ELEMS, Floats, N, said
from tests.client.compression.codec_support import values as gradient

LOSSY = ("bf16", "fp16", "int8", "sign", "topk:0.1")


@pytest.fixture
def store() -> Iterator[psstore.Store]:
    with psstore.connect("local://?shards=2") as store:
        yield store


def reduced(store: psstore.Store, **commit: Any) -> Floats:
    """Ends the round; what its contributions reduced to."""
    store.commit(**commit)
    value: Floats = store.pull("g")
    return value


def kept(store: psstore.Store) -> Floats:
    return store.residuals(["g"])["g"]


@pytest.mark.parametrize("codec", LOSSY)
def test_push_in_a_codec_sends_its_bytes_and_keeps_what_it_lost(store: psstore.Store, codec: str) -> None:
    store.create("g", shape=(N,), rule="reduce")
    first, second = gradient(1), gradient(2)
    store.push("g", first, codec=codec)
    chosen = parse(codec)
    assert chosen is not None
    assert store.bytes_pushed == chosen.num_bytes(SLICE_ELEMS) + chosen.num_bytes(300)
    np.testing.assert_array_equal(reduced(store), said(codec, first))
    np.testing.assert_array_equal(kept(store), first - said(codec, first))
    wanted = second + kept(store)
    store.push("g", second, codec=codec)
    np.testing.assert_array_equal(reduced(store), said(codec, wanted))
    np.testing.assert_array_equal(kept(store), wanted - said(codec, wanted))


@pytest.mark.parametrize("codec", LOSSY)
def test_error_feedback_loses_nothing_over_rounds(store: psstore.Store, codec: str) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    arrived = np.zeros(5000)
    pushed = np.zeros(5000)
    for seed in range(8):
        pushed += gradient(seed, 5000)
        store.push("g", gradient(seed, 5000), codec=codec)
        arrived += reduced(store)
    np.testing.assert_allclose(arrived + kept(store), pushed, atol=2e-5)  # float32 sums of 8 terms below 10


def test_pushing_again_in_a_round_begins_with_the_residual_of_before(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    store.push("g", gradient(1, 5000), codec="sign")
    reduced(store)
    before = kept(store)
    store.push("g", gradient(2, 5000), codec="sign")
    store.push("g", gradient(3, 5000), codec="sign")
    np.testing.assert_array_equal(kept(store), before)
    wanted = gradient(3, 5000) + before
    np.testing.assert_array_equal(reduced(store), said("sign", wanted))
    np.testing.assert_array_equal(kept(store), wanted - said("sign", wanted))


def test_what_is_pushed_again_as_it_is_lacks_nothing(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    store.push("g", gradient(1, 5000), codec="sign")
    reduced(store)
    before = kept(store)
    for again in (None, {"other": "int8"}):
        store.push("g", gradient(2, 5000), codec="sign")
        store.push_many({"g": gradient(3, 5000)}, codec=again)
        np.testing.assert_array_equal(reduced(store), gradient(3, 5000))
        np.testing.assert_array_equal(kept(store), before)


@pytest.mark.parametrize("outcome", ["skipped", "not named"])
def test_a_round_that_does_not_count_leaves_the_residual_as_it_was(store: psstore.Store, outcome: str) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    store.push("g", gradient(1, 5000), codec="int8")
    reduced(store)
    before = kept(store)
    store.push("g", gradient(2, 5000), codec="int8")
    if outcome == "skipped":
        assert store.commit(non_finite=True).skipped
    else:
        store.commit(present=[])
    np.testing.assert_array_equal(kept(store), before)
    wanted = gradient(3, 5000) + before
    store.push("g", gradient(3, 5000), codec="int8")
    np.testing.assert_array_equal(reduced(store), said("int8", wanted))


def test_a_late_worker_keeps_its_residual_of_before() -> None:
    with (
        psstore.LocalStore(workers=2, mode="backup") as server,
        server.connect(rank=0) as fast,
        server.connect(rank=1) as slow,
    ):
        for store in (fast, slow):
            store.create("g", shape=(5000,), rule="reduce")
        slow.push("g", gradient(1, 5000), codec="sign")
        fast.push("g", gradient(2, 5000), codec="sign")
        fast.commit()
        assert slow.commit().late
        assert slow.residuals(["g"]) == {}
        np.testing.assert_array_equal(kept(fast), gradient(2, 5000) - said("sign", gradient(2, 5000)))


def test_a_push_that_is_refused_after_a_commit_leaves_what_that_round_keeps_back() -> None:
    with psstore.LocalStore(workers=2) as server, server.connect(rank=0) as one, server.connect(rank=1) as two:
        for store in (one, two):
            store.create("g", shape=(5000,), rule="reduce")
        one.push("g", gradient(1, 5000), codec="sign")
        with pytest.raises(DeadlineExceeded):
            one.commit(wait_s=0.05)
        for codec in (None, "sign"):
            with pytest.raises(BadArgument, match="was committed"):
                one.push("g", gradient(2, 5000), codec=codec)
        two.commit()
        assert one.commit().counts
        np.testing.assert_array_equal(kept(one), gradient(1, 5000) - said("sign", gradient(1, 5000)))


@pytest.mark.parametrize(("value", "counts"), [(1.0, True), (np.inf, False)])
def test_a_clipped_round_counts_if_its_norm_is_finite(store: psstore.Store, value: float, counts: bool) -> None:
    store.create("g", shape=(5000,), rule="sgd")
    pushed = gradient(1, 5000)
    pushed[0] = value
    store.push("g", pushed, codec="int8")
    store.commit({"lr": 1.0}, max_norm=1.0)
    assert store.residuals(["g"]) == {}
    assert np.isfinite(store.global_norm()) == counts
    assert (store.residuals(["g"]) != {}) == counts


def test_a_push_after_a_clipped_commit_settles_that_round_first(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="sgd")
    store.push("g", gradient(1, 5000), codec="int8")
    store.commit({"lr": 1.0}, max_norm=1.0)
    store.push("g", gradient(2, 5000), codec="int8")
    np.testing.assert_array_equal(kept(store), gradient(1, 5000) - said("int8", gradient(1, 5000)))


def test_an_early_round_counts_when_it_is_finished(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="sgd")
    store.commit({"lr": 1.0}, present=["g"], early=True)
    store.push("g", gradient(1, 5000), codec="sign")
    assert store.residuals(["g"]) == {}
    store.finish()
    np.testing.assert_array_equal(kept(store), gradient(1, 5000) - said("sign", gradient(1, 5000)))


def test_a_residual_follows_the_loss_scale(store: psstore.Store) -> None:
    """All powers of two, so that the bits are those without a scale."""
    store.create("g", shape=(5000,), rule="reduce")
    with psstore.connect("local://") as plain:
        plain.create("g", shape=(5000,), rule="reduce")
        for seed, scale in enumerate((1024.0, 1024.0, 512.0, 2048.0)):
            store.push("g", gradient(seed, 5000) * np.float32(scale), codec="sign", loss_scale=scale)
            plain.push("g", gradient(seed, 5000), codec="sign")
            np.testing.assert_array_equal(reduced(store, loss_scale=scale), reduced(plain))
            np.testing.assert_array_equal(kept(store), kept(plain))


def test_residuals_taken_over_go_on_where_they_were(store: psstore.Store) -> None:
    store.create("g", shape=(50, 100), rule="reduce")
    store.push("g", gradient(1, 5000).reshape(50, 100), codec="sign")
    store.commit()
    with psstore.connect("local://") as other:
        other.create("g", shape=(50, 100), rule="reduce")
        other.set_residuals(store.residuals(["g"]))
        for one in (store, other):
            one.push("g", gradient(2, 5000).reshape(50, 100), codec="sign")
        np.testing.assert_array_equal(reduced(store), reduced(other))
        other.set_residuals({"g": None})
        assert other.residuals(["g"]) == {}
        with pytest.raises(ShapeMismatch):
            other.set_residuals({"g": gradient(1, 5000)})


def test_tensors_in_and_without_codecs_travel_together(store: psstore.Store) -> None:
    names = ["g", "small", "other"]
    for name, num_elems in zip(names, (N, 3, 301), strict=True):
        store.create(name, shape=(num_elems,), rule="reduce")
    values = {name: gradient(7, num_elems) for name, num_elems in zip(names, (N, 3, 301), strict=True)}
    store.push_many(values, codec={"g": "sign", "other": "int8"})
    store.commit()
    found = dict(zip(names, store.pull_many(names), strict=True))
    np.testing.assert_array_equal(found["g"], said("sign", values["g"]))
    np.testing.assert_array_equal(found["small"], values["small"])
    np.testing.assert_array_equal(found["other"], said("int8", values["other"]))
    assert store.residuals(names).keys() == {"g", "other"}


def test_workers_in_different_codecs_are_reduced_together() -> None:
    with psstore.LocalStore(workers=2) as server, server.connect(rank=0) as one, server.connect(rank=1) as two:
        for store in (one, two):
            store.create("g", shape=(5000,), rule="reduce")
        one.push("g", gradient(1, 5000), codec="sign")
        two.push("g", gradient(2, 5000), codec="topk:0.1")
        committed = one.start_commit()
        two.commit()
        committed.result()
        expected = (said("sign", gradient(1, 5000)) + said("topk:0.1", gradient(2, 5000))) / np.float32(2)
        np.testing.assert_array_equal(one.pull("g"), expected)


def test_what_is_added_in_a_codec_counts_at_once(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="add")
    store.push("g", gradient(1, 5000), codec="int8")
    np.testing.assert_array_equal(store.pull("g"), said("int8", gradient(1, 5000)))
    np.testing.assert_array_equal(kept(store), gradient(1, 5000) - said("int8", gradient(1, 5000)))


def test_half_precision_gradients_are_encoded_too(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    half = gradient(1, 5000).astype(np.float16)
    store.push("g", half, codec="int8")
    np.testing.assert_array_equal(reduced(store), said("int8", half.astype(np.float32)))


def test_a_dropped_tensor_takes_its_residual_along(store: psstore.Store) -> None:
    store.create("g", shape=(5000,), rule="reduce")
    store.push("g", gradient(1, 5000), codec="sign")
    store.commit()
    store.drop("g")
    store.create("g", shape=(4000,), rule="reduce")
    assert store.residuals(["g"]) == {}


def test_nothing_is_kept_of_a_tensor_that_was_overwritten(store: psstore.Store) -> None:
    num_elems = 1_000_000
    used = []
    for _ in range(8):
        store.create("g", np.zeros(num_elems, np.float32), rule="sgd", exist="overwrite")
        store.push("g", np.ones(num_elems, np.float32), codec="int8")
        store.commit({"lr": 1.0})
        store.pull("g", codec="int8")
        used.append(psutil.Process().memory_info().rss)
    assert used[-1] - used[2] < 4 * num_elems, "two of 4 bytes an element were left by each"


def test_what_can_not_be_in_a_codec_is_refused(store: psstore.Store) -> None:
    store.create("plain", shape=(5000,))
    store.create("double", shape=(5000,), dtype="float64", rule="sgd")
    with pytest.raises(BadArgument, match="assigned"):
        store.push("plain", gradient(1, 5000), codec="int8")
    with pytest.raises(DTypeMismatch, match="float32"):
        store.push("double", gradient(1, 5000).astype(np.float64), codec="int8")
    with pytest.raises(BadArgument, match="int4"):
        store.push("plain", gradient(1, 5000), codec="int4")
    store.create("sum", shape=(5000,), rule="add")
    with pytest.raises(BadArgument, match="comes twice"):
        store.push_many([("sum", gradient(1, 5000)), ("sum", gradient(2, 5000))], codec="int8")


def test_a_tensor_without_a_codec_may_come_twice_beside_one_with(store: psstore.Store) -> None:
    for name in ("sum", "coded"):
        store.create(name, shape=(5000,), rule="add")
    ones = np.ones(5000, np.float32)
    store.push_many([("sum", ones), ("coded", ones), ("sum", ones)], codec={"coded": "int8"})
    assert (store.pull("sum") == 2.0).all()


def test_the_example_of_the_page_runs(repository: Path) -> None:
    example = re.findall(r"^```python\n(.*?)^```$", (repository / "docs/compression.md").read_text(), re.M | re.S)[-1]
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["saved"].keys() == {"w"}
