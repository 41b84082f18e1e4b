"""A store that reconnects leaves nothing of its old client behind, in memory or of descriptors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import psstore
from psstore.client.store import Backend, Store
from psstore.config import Transport
from psstore.errors import RolledBack
from tests.support.cluster import PACE_S, PATIENCE_S, TO_SHARDS, clusters
from tests.support.fork_server import ServedPopen
from tests.support.server_process import StoreProcess, eventually, reshard_command

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32
NUM_ELEMS = 300_000
"""Slices on both shards."""
ONES = np.ones(NUM_ELEMS, F32)

Call = Callable[[Store], object]

CALLS: dict[str, Call] = {
    "a pull": lambda store: store.pull("w"),
    "a started pull": lambda store: store.start_pull_many(["w"]).result(),
    "a push": lambda store: store.push("w", ONES),
    "a started push": lambda store: store.start_push_many({"w": ONES}).result(),
    "a question": lambda store: store.stats(),
}
"""Each asks both shards."""


by_each_transport = pytest.mark.parametrize("transport", TO_SHARDS)


@pytest.fixture(autouse=True)
def _collects_by_itself() -> Iterator[None]:
    """Nothing is collected but where the client does it: a program that only trains hardly collects anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors() -> Counter[str]:
    """This process's, by kind."""
    kinds = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":")[-1].rstrip("0123456789[]")] += 1
        except FileNotFoundError:  # the one that lists
            continue
    return kinds


def train(store: Store) -> None:
    """A round, by blocking calls and started ones."""
    store.push("w", ONES)
    store.start_push_many({"w": ONES}).result()
    store.commit({"lr": 1.0})
    store.pull("w")
    store.start_pull_many(["w"]).result()


def trains_until_it_goes_back(store: Store) -> None:
    with suppress(RolledBack):
        while True:
            train(store)
            time.sleep(PACE_S)


def fails_as_it_goes_back(store: Store, process: StoreProcess, call: Call) -> None:
    """The call is under way when a shard dies, whose store begins again from a checkpoint."""
    thread = store._backend.thread
    victim = process.shard_pids()[1]
    os.kill(victim, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, store)
        assert eventually(lambda: bool(thread._callers) or thread.calls.busy)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RolledBack):
            waiting.result(PATIENCE_S)


@by_each_transport
def test_a_client_that_went_back_leaves_nothing_behind(transport: Transport, tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", str(len(CALLS)))
    old, after = dict[str, weakref.ref[Backend]](), list[Counter[str]]()
    with clusters("unix" if transport == "unix" else "tcp") as start:
        cluster = start(*flags, shards=2)
        process = cluster.process
        assert process is not None
        store = psstore.connect(cluster.url, transport=transport, wait_s=PATIENCE_S)
        store.create("w", np.zeros(NUM_ELEMS, F32), rule="sgd")
        for what, call in CALLS.items():
            for _ in range(3):  # so that calls go the short way
                train(store)
            store.checkpoint()
            old[what] = weakref.ref(store._backend)
            fails_as_it_goes_back(store, process, call)
            store.reconnect()
            assert store.version == 3 * len(old)
            after.append(descriptors())
        store.close()
    assert [what for what, one in old.items() if one() is not None] == []
    assert after[1] == after[-1]


@by_each_transport
def test_a_client_of_a_store_that_has_other_numbers_of_shards_leaves_nothing_behind(transport: Transport) -> None:
    old, after = list[weakref.ref[Backend]](), list[Counter[str]]()
    with clusters("unix" if transport == "unix" else "tcp") as start:
        cluster = start(shards=2)
        store = psstore.connect(cluster.url, transport=transport, wait_s=PATIENCE_S)
        store.create("w", np.zeros(NUM_ELEMS, F32), rule="sgd")
        for num_shards in (3, 2) * 2:
            old.append(weakref.ref(store._backend))
            with ServedPopen(reshard_command(cluster.url, num_shards), stdout=subprocess.DEVNULL) as asked:
                trains_until_it_goes_back(store)
                store.reconnect()
                assert asked.wait(PATIENCE_S) == 0
            train(store)
            assert store.num_shards == num_shards
            after.append(descriptors())
        store.close()
    assert [one() for one in old] == [None] * len(old)
    assert after[1] == after[-1]
