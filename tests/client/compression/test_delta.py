"""Pulls of deltas: all who follow have the same bits, near the store's own, for few bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import psstore
from psstore.client.rule_state import Restored
from psstore.codec.codecs import parse
from psstore.errors import BadArgument, DTypeMismatch, RuleMismatch
from tests.client.compression.codec_support import SLICE_ELEMS, N, said, values

DELTAS = ("int8", "sign")


@pytest.fixture
def server() -> Iterator[psstore.LocalStore]:
    with psstore.LocalStore(2) as server:
        yield server


@pytest.fixture
def store(server: psstore.LocalStore) -> Iterator[psstore.Store]:
    with server.connect() as store:
        store.create("w", values(0), rule="sgd")
        yield store


def step(store: psstore.Store, seed: int, name: str = "w") -> None:
    store.push(name, values(seed))
    store.commit({"lr": 0.01})


def pulled_bytes(store: psstore.Store, codec: str) -> int:
    before = store.bytes_pulled
    store.pull("w", codec=codec)
    return store.bytes_pulled - before


@pytest.mark.parametrize("codec", DELTAS)
def test_the_first_pull_brings_all_and_the_next_what_is_new(store: psstore.Store, codec: str) -> None:
    np.testing.assert_array_equal(store.pull("w", codec=codec), values(0))
    published = values(0)
    chosen = parse(codec)
    assert chosen is not None
    for seed in (1, 2):
        step(store, seed)
        published = published + said(codec, store.pull("w") - published)
        before = store.bytes_pulled
        np.testing.assert_array_equal(store.pull("w", codec=codec), published)
        assert store.bytes_pulled - before == chosen.num_bytes(SLICE_ELEMS) + chosen.num_bytes(300)
        assert pulled_bytes(store, codec) == 0


@pytest.mark.parametrize("codec", DELTAS)
def test_whoever_comes_later_has_the_same_bits(server: psstore.LocalStore, store: psstore.Store, codec: str) -> None:
    with server.connect(role="client") as steady, server.connect(role="client") as late:
        for client in (store, steady):
            client.pull("w", codec=codec)
        for seed in (1, 2, 3):
            step(store, seed)
            np.testing.assert_array_equal(store.pull("w", codec=codec), steady.pull("w", codec=codec))
        assert pulled_bytes(late, codec) == 4 * N
        step(store, 4)
        same = store.pull("w", codec=codec)
        assert 0 < pulled_bytes(late, codec) < 4 * N / 3
        np.testing.assert_array_equal(late.pull("w", codec=codec), same)


def test_who_missed_a_version_is_sent_the_whole(server: psstore.LocalStore, store: psstore.Store) -> None:
    with server.connect(role="client") as idle:
        idle.pull("w", codec="int8")
        for seed in (1, 2):
            step(store, seed)
            store.pull("w", codec="int8")
        assert pulled_bytes(idle, "int8") == 4 * N
        np.testing.assert_array_equal(idle.pull("w", codec="int8"), store.pull("w", codec="int8"))


def test_pulls_that_overlap_add_a_delta_once(store: psstore.Store) -> None:
    store.pull("w", codec="sign")
    step(store, 1)
    futures = [store.start_pull_many(["w"], codec="sign") for _ in range(3)]
    for future in futures:
        np.testing.assert_array_equal(future.result()[0], store.pull("w", codec="sign"))


def test_a_pull_of_deltas_is_conditional(store: psstore.Store) -> None:
    store.pull("w", codec="int8")
    step(store, 1)
    version = store.version
    assert store.pull("w", codec="int8", if_newer_than=version - 1) is not None
    assert store.version_of("w") == version
    assert store.pull("w", codec="int8", if_newer_than=version) is None
    assert store.pull("w", codec="int8", if_newer_than=version - 1) is not None


def test_a_restored_value_is_sent_whole(store: psstore.Store) -> None:
    store.pull("w", codec="sign")
    step(store, 1)
    store.pull("w", codec="sign")
    store.restore({"w": Restored(values(5))})
    np.testing.assert_array_equal(store.pull("w", codec="sign"), values(5))


def test_deltas_and_whole_values_come_together(store: psstore.Store) -> None:
    names = ["half", "w", "plain", "double"]
    store.create("half", values(1, 700), rule="sgd")
    store.create("plain", values(2, 10))
    store.create("double", values(3, 9).astype(np.float64))
    for codecs in ({"w": "int8", "half": "bf16"}, {"w": "int8", "half": "bf16", "plain": "none"}):
        half, w, plain, double = store.pull_many(names, codec=codecs)
        np.testing.assert_array_equal(w, store.pull("w", codec="int8"))
        np.testing.assert_allclose(half, values(1, 700), rtol=2**-8)
        assert half.dtype == np.float32
        np.testing.assert_array_equal(plain, values(2, 10))
        np.testing.assert_array_equal(double, values(3, 9).astype(np.float64))
        step(store, 4)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_coded_pull_writes_where_it_is_told(store: psstore.Store, codec: str) -> None:
    expected = store.pull("w", codec=codec)
    for out in (np.empty(N, np.float32), np.empty(2 * N, np.float32)[::2]):
        assert store.pull("w", out=out, codec=codec) is out
        np.testing.assert_array_equal(out, expected)
    half = np.empty(N, np.float16)
    store.pull("w", out=half, codec="int8")
    np.testing.assert_array_equal(half, values(0).astype(np.float16))


def test_a_dropped_tensor_is_followed_anew(store: psstore.Store) -> None:
    store.pull("w", codec="int8")
    store.drop("w")
    store.create("w", values(7), rule="sgd")
    np.testing.assert_array_equal(store.pull("w", codec="int8"), values(7))


def test_what_can_not_be_pulled_in_a_codec_is_refused(store: psstore.Store) -> None:
    store.create("plain", values(2, 10))
    store.create("double", values(3, 9).astype(np.float64), rule="sgd")
    with pytest.raises(RuleMismatch, match="deltas"):
        store.pull("plain", codec="int8")
    with pytest.raises(DTypeMismatch, match="float32"):
        store.pull("double", codec="int8")
    with pytest.raises(BadArgument, match="pushes"):
        store.pull("w", codec="topk")
