"""Who writes a shard's part of a checkpoint: the real one, and what stands in for it in simulations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from psstore import _core
from psstore.errors import StorageFailed, VersionGone
from psstore.protocol.saving import Saver
from psstore.server.shard_saver import ShardSaver
from psstore.types import Tensor
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, sgd, tensor_of
from tests.sim.archive import Archive, SimulatedSaver

READER = 7


def real(shard: _core.Shard) -> Saver:
    return ShardSaver(shard, index=0, num_shards=1)


def simulated(shard: _core.Shard) -> Saver:
    return SimulatedSaver(Archive(lambda _: {}), shard, 0)


def written(saver: Saver, fact: m.SaveFact, *tensors: Tensor) -> bytes:
    for _ in range(1000):
        if (record := saver.save(fact, {tensor.id: tensor for tensor in tensors})) is not None:
            return record
        time.sleep(0.01)
    raise AssertionError("it is never written")


def test_an_attempt_waits_for_one_that_came_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error, which shards log: whoever leads the new one asks fifty times a second."""
    ended = threading.Event()
    saver = ShardSaver(_core.Shard(index=0), index=0, num_shards=1)
    monkeypatch.setattr(saver, "write", lambda fact, _: ended.wait() and fact.attempt.encode())

    def attempt(name: str) -> m.SaveFact:
        return m.SaveFact(url=str(tmp_path), version=0, attempt=name, reader=READER, tensors=())

    assert saver.save(attempt("1"), {}) is None
    assert saver.save(attempt("2"), {}) is None
    ended.set()
    assert written(saver, attempt("2")) == b"2"


def test_an_attempt_that_gets_no_thread_fails_and_the_next_one_is_another(tmp_path: Path) -> None:
    saver = ShardSaver(_core.Shard(index=0), index=0, num_shards=1)

    def attempt(name: str) -> m.SaveFact:
        return m.SaveFact(url=str(tmp_path), version=0, attempt=name, reader=READER, tensors=())

    no_room = RuntimeError("can't start new thread")
    with (
        mock.patch.object(threading.Thread, "start", side_effect=no_room),
        pytest.raises(StorageFailed, match="ulimit -u"),
    ):
        saver.save(attempt("1"), {})
    with pytest.raises(VersionGone):
        written(saver, attempt("2"))


@pytest.mark.parametrize("make", [real, simulated])
def test_an_attempt_that_failed_fails_for_good(make: Callable[[_core.Shard], Saver], tmp_path: Path) -> None:
    """Who leads it and lost the connection has not heard of the failure, and asks again."""
    store = FakeStore(num_workers=1)
    peer = store.worker()
    tensor = tensor_of(peer.create(sgd("w")).tensors[0])
    saver = make(store.shards[0])

    def attempt(name: str) -> m.SaveFact:
        ids = ((tensor.id, tensor.id),)
        return m.SaveFact(url=str(tmp_path), version=0, attempt=name, reader=READER, tensors=ids)

    with pytest.raises(VersionGone):
        written(saver, attempt("1"), tensor)  # nobody holds that version
    peer.ask("HOLD", round=1, sequence=READER)
    with pytest.raises(VersionGone):
        written(saver, attempt("1"), tensor)
    assert written(saver, attempt("2"), tensor)
