"""Readers that follow by what changed: whole versions, the same bits as a whole pull of that version, over every
transport and whatever they miss."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import FollowingReader, LocalStore, _core
from psstore.client.changes import Copies, Version
from psstore.client.layout import OneVersion
from psstore.client.rule_state import Restored
from psstore.client.store import Store
from psstore.errors import (
    BadArgument,
    BadHeader,
    DeadlineExceeded,
    InternalError,
    RolledBack,
    RuleMismatch,
    UnknownTensor,
)
from psstore.types import ITEM_BYTES, TensorSpec
from tests.support.cluster import TRANSPORTS, Cluster, clusters

F32 = np.float32
NAMES = ("a", "b", "c")
ELEMS = 150_000
"""Three slices."""

pytestmark = pytest.mark.one_loop


class Following:
    """A store of one worker, and readers of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.worker = cluster.connect(rank=0)
        self.random = np.random.default_rng(1)

    def create(self, elems: int = ELEMS) -> None:
        values = [self.random.standard_normal(elems, F32) for _ in NAMES]
        specs = [TensorSpec(name=name, shape=(elems,), rule="sgd", zeros=False) for name in NAMES]
        self.worker.create_many(specs, values)

    def step(self, share: float = 0.02, names: Sequence[str] = NAMES) -> None:
        """Changes about that share of the elements."""
        gradients = {}
        for name in names:
            elems = self.worker.describe(name).spec.num_elems
            chosen = self.random.random(elems) < share
            gradients[name] = np.where(chosen, self.random.standard_normal(elems), 0).astype(F32)
        self.worker.push_many(gradients)
        self.worker.commit({"lr": 1.0})

    def reader(self, names: Sequence[str] | None = NAMES, dtype: str | None = None) -> FollowingReader:
        return FollowingReader(self.cluster.connect(role="client"), names, dtype)


@pytest.fixture(params=[*TRANSPORTS, pytest.param("shm", marks=pytest.mark.sockets)])
def store(request: pytest.FixtureRequest) -> Iterator[Following]:
    with clusters(request.param) as start:
        yield Following(start(shards=3))


def bits_of(store: Store, name: str, dtype: str) -> np.ndarray[Any, Any]:
    """What a whole pull brings, in that dtype."""
    whole = store.pull(name)
    if dtype != "bfloat16":
        return whole.astype(dtype)
    halves = np.empty(whole.size, np.int16)
    _core.convert(whole, _core.DTYPES["float32"], halves, _core.DTYPES[dtype])
    return halves.reshape(whole.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_reader_has_the_bits_of_a_whole_pull_and_is_sent_what_changed(store: Following, dtype: str) -> None:
    store.create()
    with store.reader(dtype=dtype) as reader:
        first = reader.next()
        whole_bytes = 3 * ELEMS * ITEM_BYTES[dtype]
        assert (first.number, first.num_whole, first.num_bytes) == (0, 9, whole_bytes)
        for number in (1, 2, 3):
            store.step()
            version = reader.next()
            assert (version.number, version.num_whole, version.skipped) == (number, 0, 0)
            assert version.changed == set(NAMES)
            num_changed = 0.03 * 3 * ELEMS
            assert 0 < version.num_bytes < num_changed * (ITEM_BYTES[dtype] + 2)
            for name in NAMES:
                assert_array_equal(version.values[name], bits_of(store.worker, name, dtype))
        assert reader.verify().changed == frozenset()
        assert reader.version == 3


def test_a_slice_that_changes_altogether_comes_whole_and_says_so(store: Following) -> None:
    store.create()
    with store.reader() as reader:
        reader.next()
        store.step(share=2.0, names=["b"])
        version = reader.next()
        assert (version.num_whole, version.num_bytes) == (3, 4 * ELEMS)
        assert version.changed == {"b"}
        assert_array_equal(version.values["b"], store.worker.pull("b"))


def test_what_a_reader_missed_is_merged(store: Following) -> None:
    store.create()
    with store.reader() as slow, store.reader() as quick:
        slow.next()
        quick.next()
        for _ in range(4):
            store.step()
            quick.next()
        version = slow.next()
        assert (version.number, version.skipped, version.num_whole) == (4, 3, 0)
        assert slow.sha256() == quick.sha256()
        assert version.num_bytes < 0.12 * 3 * ELEMS * 6


def test_a_reader_waits_for_a_newer_version(store: Following) -> None:
    store.create()
    with store.reader() as reader:
        reader.next()
        with pytest.raises(DeadlineExceeded):
            reader.next(timeout_s=0.05)
        assert reader.version == 0
        waits = threading.Thread(target=reader.next)
        waits.start()
        store.step()
        waits.join()
        assert reader.version == 1


def test_readers_in_different_dtypes_share_a_shard(store: Following) -> None:
    store.create()
    with store.reader(dtype="bfloat16") as halves, store.reader() as wholes:
        for _ in range(3):
            for reader, dtype in ((halves, "bfloat16"), (wholes, "float32")):
                version = reader.next()
                assert_array_equal(version.values["c"], bits_of(store.worker, "c", dtype))
            store.step()


def test_a_reader_of_everything_sees_tensors_come_and_go_and_come_anew(store: Following) -> None:
    store.create(1000)
    store.worker.create("note", np.arange(5, dtype=np.float64))
    with store.reader(names=None, dtype="bfloat16") as reader:
        assert reader.next().values.keys() == {*NAMES, "note"}
        assert_array_equal(reader.values["note"], np.arange(5.0))
        store.worker.drop("a")
        store.worker.create("d", np.ones(7, F32), rule="sgd")
        store.worker.push_many({"b": np.ones(1000, F32)})
        store.worker.commit({"lr": 1.0})
        assert reader.next().values.keys() == {"b", "c", "d", "note"}
        store.worker.drop("b")
        store.worker.create("b", np.full((2, 3), 4, F32), rule="sgd")
        store.step(names=["c"])
        version = reader.next()
        assert_array_equal(version.values["b"], bits_of(store.worker, "b", "bfloat16"))
        assert "b" in version.changed
        assert version.values["b"].shape == (2, 3)


def test_a_named_tensor_that_is_gone_is_said_to_be(store: Following) -> None:
    store.create(10)
    with store.reader() as reader:
        reader.next()
        store.worker.drop("b")
        store.step(names=["a"])
        with pytest.raises(UnknownTensor, match="'b'"):
            reader.next()
        assert reader.values.keys() == set(NAMES)


def test_restored_values_come_as_changes(store: Following) -> None:
    store.create()
    with store.reader() as reader:
        reader.next()
        store.step()
        reader.next()
        with store.worker.snapshot() as view:
            then = view.pull("a")
        store.step(names=["a"])
        store.worker.restore({"a": Restored(value=then)})
        reader.next()
        reader.verify()
        assert_array_equal(reader.values["a"], then)


def test_nothing_is_kept_when_nobody_follows(store: Following) -> None:
    store.create()
    store.step()
    assert sum(cast(int, counters["published_bytes"]) for counters in store.worker.stats()) == 0
    with store.reader() as reader:
        reader.next()
        kept = sum(cast(int, counters["published_bytes"]) for counters in store.worker.stats())
        assert 3 * 4 * ELEMS <= kept <= 2 * 3 * 4 * ELEMS


def test_what_has_no_room_is_sent_whole() -> None:
    with clusters("tcp") as start:
        store = Following(start("--snapshot-memory", "1MiB", shards=1))
        store.create()
        with store.reader() as reader:
            reader.next()
            store.step()
            version = reader.next()
            assert 0 < version.num_whole < 9
            reader.verify()


def test_a_copy_that_is_not_what_the_store_has_is_found() -> None:
    with LocalStore() as local:
        worker = local.connect(rank=0)
        worker.create("w", np.ones(8, F32), rule="sgd")
        with FollowingReader(local.connect(role="client"), ["w"], None) as reader:
            reader.next()
            reader.values["w"][3] = 2
            with pytest.raises(InternalError, match="'w'"):
                reader.verify()


def test_a_version_is_taken_as_a_whole_or_not_at_all() -> None:
    with clusters("local") as start:
        store = Following(start(shards=2))
        store.create()
        with store.reader() as reader:
            reader.next()
            before = reader.sha256()
            store.step()
            with (
                mock.patch.object(_core, "are_changes", side_effect=[True, True, False] * 9),
                pytest.raises(BadHeader),
            ):
                reader.next()
            assert (reader.version, reader.sha256()) == (0, before)
            assert reader.next().number == 1
            reader.verify()


def test_frames_of_several_versions_are_read_again_as_of_one() -> None:
    with clusters("local") as start:
        store = Following(start(shards=2))
        store.create()
        with store.reader() as reader, mock.patch.object(OneVersion, "__bool__", return_value=False):
            assert reader.next().number == 0
            store.step()
            version = reader.next()
            assert (version.number, version.num_whole) == (1, 0)
            assert_array_equal(version.values["b"], store.worker.pull("b"))
            assert all(counters["holds"] == 0 for counters in store.worker.stats())


def test_tensors_without_decisions_come_once_for_each_wherever_they_lie() -> None:
    """Nobody tells the other shard of the decision."""
    with LocalStore(2) as local:
        trainer = local.connect(rank=0)
        for name in ("first", "second", "trained"):
            trainer.create(name, np.zeros(3, F32), rule="sgd" if name == "trained" else "assign")
        assert [trainer.describe(name).shards for name in trainer.keys()] == [(0,), (1,), (0,)]
        readers = [FollowingReader(local.connect(role="client"), [name], None) for name in ("first", "second")]
        for reader in readers:
            assert reader.next().number == 0
        trainer.push("trained", np.ones(3, F32))
        trainer.commit({"lr": 1.0})
        for reader in readers:
            assert reader.next().number == 1
            with pytest.raises(DeadlineExceeded):
                reader.next(timeout_s=0.0)


def test_a_store_that_goes_back_is_taken_up_as_often_as_it_does_and_what_was_read_stays_till_then() -> None:
    with LocalStore() as local:
        local.connect(rank=0).publish({"a": np.ones(3, F32), "b": np.ones((), F32)})
        store = local.connect(role="client")
        with FollowingReader(store, None, None) as reader:
            before = reader.next()
            ends = iter([RolledBack("once"), RolledBack("twice"), DeadlineExceeded("not yet")])

            def run(work: Coroutine[Any, Any, Version]) -> Version:
                work.close()
                raise next(ends)

            with mock.patch.object(store, "_run", run), mock.patch.object(store, "reconnect") as reconnect:
                with pytest.raises(DeadlineExceeded, match="not yet"):
                    reader.next()
                assert reconnect.call_count == 2
            assert reader.version is None
            assert_array_equal(reader.values["a"], np.ones(3, F32))
            version = reader.next()
            assert (version.number, version.restored, version.skipped) == (before.number, True, 0)
            assert version.changed == before.changed


def test_what_cannot_be_followed_is_refused() -> None:
    with LocalStore() as local:
        worker = local.connect(rank=0)
        worker.create_table("t", dim=4, rule="sgd")
        with pytest.raises(BadArgument, match="names"):
            Copies("w", None)
        with pytest.raises(BadArgument, match="dtype is 'int8'"):
            psstore.follow("local://", ["w"], dtype="int8")
        with FollowingReader(local.connect(role="client"), ["t"], None) as reader, pytest.raises(RuleMismatch):
            reader.next()


def test_psstore_follow_connects_by_itself() -> None:
    with clusters("tcp") as start:
        store = Following(start(shards=2))
        store.create(100)
        with psstore.follow(store.cluster.url, dtype="float16") as reader:
            for version in reader:
                assert version.values["a"].dtype == np.float16
                break
            assert "at version 0" in repr(reader)


def test_nothing_is_kept_of_tensors_that_others_drop() -> None:
    with LocalStore(2) as local:
        worker, reading = local.connect(), local.connect(role="client")
        with FollowingReader(reading, None, None) as reader:
            for step in range(6):
                worker.create(f"step {step}", np.ones(10, F32), rule="sgd")
                worker.push(f"step {step}", np.ones(10, F32))
                worker.commit({"lr": 1.0})
                assert list(reader.next().values) == [f"step {step}"]
                worker.drop(f"step {step}")
            operations = reading._operations
            kept = {*operations.reading._pulled, *operations.context.schema._tensors}
            assert kept == {"step 5"}, "of which it has not heard yet that it is gone"


@pytest.mark.parametrize("max_memory", ["8100K", "9000K", "9500K"])
def test_who_trains_has_the_memory_that_is_kept_for_readers(max_memory: str) -> None:
    """Value, two states and a push take 8 MB, and what has changed in float16 up to 2 MB more."""
    num_elems = 500_000
    with LocalStore(max_memory=max_memory) as local, local.connect(rank=0) as trainer:
        trainer.create("a", np.zeros(num_elems, F32), rule="adam")
        with FollowingReader(local.connect(role="client"), ["a"], "float16") as reader:
            for step in range(8):
                trainer.push("a", np.full(num_elems, step, F32))
                trainer.commit({"lr": 0.1})
                assert_array_equal(reader.next().values["a"], trainer.pull("a").astype(np.float16))
