"""Readers that follow a store which goes back to a checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.errors import RolledBack, StoreClosed, StoreUnreachable
from psstore.server.other_member import refuses
from tests.server.test_checkpoints import SHAPES, served, step, training
from tests.support.cluster import PATIENCE_S
from tests.support.free_ports import consecutive_ports
from tests.support.server_process import END_S, StoreProcess, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


def test_a_reader_of_a_store_that_goes_back_reads_it_whole_and_says_so(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"))
    port = consecutive_ports(2)
    with ExitStack() as ends, served(*flags, shards=2, port=port) as first, training(first) as worker:
        reader = ends.enter_context(psstore.follow(first.url, list(SHAPES), timeout_s=PATIENCE_S))
        step(worker, 1)
        worker.checkpoint()
        before = reader.next()
        step(worker, 2)
        assert (reader.next().number, before.number, before.restored) == (2, 1, False)
        orphans = first.shards()
        first.signal(signal.SIGKILL)
        places = [f"ps://127.0.0.1:{port + shard}" for shard in range(2)]
        assert eventually(lambda: all(map(refuses, places)))  # they listen until they have seen that it is gone
        ends.callback(psutil.wait_procs, orphans, timeout=END_S)
        with served(*flags, "--restore", "auto", shards=2, port=port) as second:
            version = None
            until = time.monotonic() + PATIENCE_S
            while version is None and time.monotonic() < until:
                try:
                    version = reader.next()
                except StoreUnreachable:  # it may be found to be out of reach first
                    continue
            assert version is not None
            assert (version.number, version.restored) == (1, True)
            assert version.changed == {name for name in SHAPES if version.values[name].size > 0}
            with training(second) as again:
                for name in SHAPES:
                    assert_array_equal(version.values[name], np.asarray(again.pull(name)))
                step(again, 2)
                later = reader.next()
                assert (later.number, later.restored) == (2, False)
                reader.verify()


def test_a_reader_goes_on_with_a_store_that_is_started_anew_once_it_was_told_so() -> None:
    """As a relay, which has nothing when it begins."""
    port = consecutive_ports(1)

    def serve(ends: ExitStack, number: float) -> str:
        store = ends.enter_context(StoreProcess("--host", "127.0.0.1", port=port))
        ends.enter_context(psstore.connect(store.url, rank=0)).publish({"a": np.full(4, number, np.float32)})
        return store.url

    with ExitStack() as ends:
        with ExitStack() as first:
            reader = ends.enter_context(psstore.follow(serve(first, 1), timeout_s=PATIENCE_S))
            assert not reader.next().restored
        serve(ends, 2)
        with pytest.raises(StoreUnreachable):
            reader.next()
        assert_array_equal(reader.values["a"], np.full(4, 1, np.float32))
        version = reader.next()
        assert version.restored
        assert_array_equal(version.values["a"], np.full(4, 2, np.float32))
        reader.close()
        with pytest.raises(StoreClosed):
            reader.next()


def test_who_follows_over_a_connection_made_anew_has_nothing_of_the_life_before(tmp_path: Path) -> None:
    """Whose versions had the same numbers."""

    def full(number: float) -> np.ndarray[Any, Any]:
        return np.full(4, number, np.float32)

    async def follow(url: str, pid: int) -> None:
        with psstore.connect(url, rank=0) as worker, psstore.connect(url, role="client") as reader:
            async with await psstore.connect_async(url, role="client") as awaited:
                worker.publish({"a": full(1), "b": full(1)})
                worker.checkpoint()
                worker.publish({"b": full(2)})
                versions, awaited_versions = reader.follow(["a", "b"]), awaited.follow(["a", "b"])
                assert next(versions).number == (await anext(awaited_versions)).number == 2
                os.kill(pid, signal.SIGKILL)
                for blocking in (worker, reader):
                    with pytest.raises(RolledBack):
                        blocking.pull("a")
                    blocking.reconnect()
                with pytest.raises(RolledBack):
                    await awaited.pull("a")
                await awaited.reconnect()
                worker.publish({"b": full(7)})
                worker.publish({"a": full(5)})
                for version in (next(versions), await anext(awaited_versions)):
                    assert (version.number, version.restored) == (3, True)
                    assert_array_equal(version.values["a"], full(5))
                    assert_array_equal(version.values["b"], full(7))

    with StoreProcess("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", "1") as served:
        asyncio.run(follow(served.url, served.shard_pids()[0]))
