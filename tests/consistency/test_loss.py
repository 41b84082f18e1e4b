"""Workers that die: the others are told who, within the deadline, and never hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from psstore.client.store import Store
from psstore.errors import BadArgument, BadHyper, DeadlineExceeded, WorkerLost
from psstore.protocol.membership import Liveness
from tests.support.cluster import PATIENCE_S, TRANSPORTS, Cluster, clusters

F32 = np.float32

WORKER = """
import sys, numpy, psstore
store = psstore.connect(sys.argv[1], rank=1)
store.push("w", numpy.ones(2, numpy.float32))
print("pushed", flush=True)
HOW
"""


class Victim:
    """A worker process of rank 1 that has pushed, and not committed. It ends with the block, if not before."""

    def __init__(self, url: str, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER.replace("HOW", how), url], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "pushed\n"

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def open_round(cluster: Cluster) -> Store:
    """Rank 0, in a round that rank 1 is needed for."""
    store = cluster.connect(rank=0)
    store.create("w", shape=(2,), rule="sgd")
    return store


@pytest.mark.sockets
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_killed_worker_is_named_to_the_one_who_waits_and_can_be_replaced(transport: str) -> None:
    with clusters(transport) as start:
        cluster = start(shards=2, workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, "sys.stdin.read(); import time; time.sleep(3600)") as victim:
            killer = threading.Timer(0.2, victim.kill)
            store.push("w", [1.0, 1.0])
            killer.start()
            started = time.monotonic()
            with pytest.raises(WorkerLost, match="rank 1") as caught:
                store.commit({"lr": 1.0})
            killer.join()
        assert caught.value.details["rank"] == 1
        assert caught.value.details["round"] == 1
        assert time.monotonic() - started < Liveness().detached_s + PATIENCE_S / 2

        with cluster.connect(rank=1) as heir:
            heir.push("w", [3.0, 3.0])
            assert heir.commit({"lr": 1.0}).decision == 1
            assert store.commit({"lr": 1.0}).decision == 1, "the commit stood, and waits on"
            for each in (heir, store):
                assert_array_equal(each.pull("w"), np.array([-2, -2], F32))


@pytest.mark.sockets
def test_nobody_hears_of_a_killed_worker_that_is_replaced_in_time() -> None:
    with clusters("unix") as start:
        cluster = start("--rejoin-s", "60", workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, "import time; time.sleep(3600)"):
            store.push("w", [1.0, 1.0])
        with ThreadPoolExecutor(1) as pool:
            committed = pool.submit(store.commit, {"lr": 1.0})
            time.sleep(Liveness().detached_s + 1.0)  # longer than it takes to be lost: what is tested is that time
            assert not committed.done()
            with cluster.connect(rank=1) as heir:
                heir.push("w", [3.0, 3.0])
                heir.commit({"lr": 1.0})
            assert committed.result().decision == 1


@pytest.mark.sockets
@pytest.mark.parametrize("rank", [1, None])
def test_who_is_started_again_waits_until_its_silent_last_life_is_lost(rank: int | None) -> None:
    """A host that crashes closes no connection, and may be back before anybody has noticed."""
    with clusters("unix") as start:
        cluster = start("--heartbeat-s", "0.2", "--silence-s", "1", "--rejoin-s", "60", workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, "import time; time.sleep(3600)") as victim, ThreadPoolExecutor(1) as pool:
            victim.process.send_signal(signal.SIGSTOP)
            store.push("w", [1.0, 1.0])
            committed = pool.submit(store.commit, {"lr": 1.0})
            with cluster.connect(rank=rank) as heir:
                assert heir.rank == 1
                heir.push("w", [3.0, 3.0])
                heir.commit({"lr": 1.0})
                assert committed.result().decision == 1


@pytest.mark.sockets
def test_killed_worker_that_nobody_replaces_in_time_is_named() -> None:
    with clusters("unix") as start:
        cluster = start("--rejoin-s", "1", workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, "import time; time.sleep(3600)"):
            store.push("w", [1.0, 1.0])
        with pytest.raises(WorkerLost, match="rank 1"):
            store.commit({"lr": 1.0})


@pytest.mark.sockets
def test_killed_worker_is_named_at_a_barrier() -> None:
    with clusters("unix") as start:
        cluster = start(workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, "import time; time.sleep(3600)"):
            pass
        with pytest.raises(WorkerLost, match="rank 1"):
            store.barrier()


@pytest.mark.sockets
def test_worker_busy_in_one_long_call_is_not_lost() -> None:
    """It holds the GIL for longer than silence is allowed to last; the native thread's heartbeat speaks for it."""
    hold_gil = "import ctypes; ctypes.PyDLL(None).sleep(3); store.commit({'lr': 1.0})"
    with clusters("unix") as start:
        cluster = start("--heartbeat-s", "0.2", "--silence-s", "1", workers=2)
        store = open_round(cluster)
        with Victim(cluster.url, hold_gil) as victim:
            store.push("w", [1.0, 1.0])
            assert store.commit({"lr": 1.0}).decision == 1
            victim.process.wait(PATIENCE_S)


@pytest.mark.sockets
def test_workers_are_not_lost_by_a_coordinator_that_stood_still() -> None:
    """What they said meanwhile lies in its sockets, and is heard before anybody is called silent."""
    with clusters("unix") as start:
        cluster = start("--heartbeat-s", "0.1", "--silence-s", "1", workers=2)
        store = open_round(cluster)
        other = cluster.connect(rank=1)
        store.push("w", [1.0, 1.0])
        with ThreadPoolExecutor(1) as pool:
            committed = pool.submit(store.commit, {"lr": 1.0})
            assert cluster.process is not None
            with cluster.process.stopped():
                time.sleep(1.5)  # longer than silence may last: what is tested is the passing of time itself
            other.push("w", [3.0, 3.0])
            other.commit({"lr": 1.0})
            assert committed.result().decision == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_fails_in_its_with_block_is_named(transport: str) -> None:
    with clusters(transport) as start:
        cluster = start(workers=2)
        store = open_round(cluster)
        with pytest.raises(ZeroDivisionError), cluster.connect(rank=1):
            raise ZeroDivisionError
        store.push("w", [1.0, 1.0])
        with pytest.raises(WorkerLost, match="rank 1"):
            store.commit({"lr": 1.0})
        with pytest.raises(WorkerLost, match="rank 1"):
            store.barrier()
        for wait in (partial(store.commit, {"lr": 1.0}), store.barrier):
            started = time.monotonic()
            with pytest.raises(WorkerLost, match=r"rank 0 waited 0.2 s for a replacement: .* needs rank 1"):
                wait(wait_s=0.2)
            assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_slow_worker_ends_the_wait_at_its_deadline_and_the_commit_stands(transport: str) -> None:
    with clusters(transport) as start:
        cluster = start(workers=2)
        store = open_round(cluster)
        slow = cluster.connect(rank=1)
        store.push("w", [1.0, 1.0])
        with pytest.raises(DeadlineExceeded, match="rank 1") as caught:
            store.commit({"lr": 1.0}, wait_s=0.2)
        assert caught.value.details["waited_s"] == 0.2
        slow.push("w", [3.0, 3.0])
        slow.commit({"lr": 1.0})
        assert store.commit({"lr": 1.0}).decision == 1
        assert_array_equal(store.pull("w"), np.array([-2, -2], F32))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_pushed_after_a_commit_that_stands_is_of_the_next_round(transport: str) -> None:
    """And not before it is known what became of that one."""
    with clusters(transport) as start:
        first, second = start(workers=2).workers()
        first.create("w", np.zeros(4, F32), rule="sgd")
        first.push("w", np.full(4, 1.0, F32))
        with pytest.raises(DeadlineExceeded):
            first.commit({"lr": 1.0}, wait_s=0.1)
        assert first.is_sealed
        with pytest.raises(BadArgument, match="commit again"):
            first.push("w", np.full(4, 100.0, F32))
        second.push("w", np.full(4, 1.0, F32))
        assert second.commit({"lr": 1.0}).counts
        with pytest.raises(BadArgument, match="commit again"):
            first.push("w", np.full(4, 100.0, F32))
        assert first.commit({"lr": 1.0}).round == 1
        assert not first.is_sealed
        assert_array_equal(first.pull("w"), np.full(4, -1.0, F32))
        with ThreadPoolExecutor(2) as pool:
            for store in (first, second):
                store.push("w", np.full(4, 2.0, F32))
            list(pool.map(lambda store: store.commit({"lr": 1.0}), (first, second)))
        assert_array_equal(first.pull("w"), np.full(4, -3.0, F32))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_commit_that_is_refused_seals_nothing(transport: str) -> None:
    with clusters(transport) as start:
        store = start().connect(rank=0)
        store.create("w", np.zeros(4, F32), rule="sgd")
        store.push("w", np.full(4, 1.0, F32))
        with pytest.raises(BadHyper):
            store.commit({"lr": -1.0})
        store.push("w", np.full(4, 2.0, F32))
        store.commit({"lr": 1.0})
        assert_array_equal(store.pull("w"), np.full(4, -2.0, F32))
