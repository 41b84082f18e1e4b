"""Shards that die and are started again, all of them, from the latest checkpoint; and clients that live through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client.store import Store
from psstore.errors import PsstoreError, RolledBack, StorageFailed, StoreClosed, StoreUnreachable, UsageError
from psstore.net.client import LAST_BACKOFF_S
from psstore.server.processes import ShortLives
from tests.chaos import disk
from tests.support.cluster import PATIENCE_S, TO_SHARDS
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess, eventually, failed_start

F32 = np.float32
ELEMS = 600_000
"""Some slices, on every shard."""

pytestmark = pytest.mark.sockets


@pytest.fixture
def served(tmp_path: Path) -> Iterator[StoreProcess]:
    """A store that may start again twice."""
    place = str(tmp_path / "run")
    socket = str(tmp_path / "socket")
    with StoreProcess(
        *("--shards", "2", "--checkpoint", place, "--checkpoint-every", "1000000", "--restarts", "2"),
        *("--host", "127.0.0.1", "--uds", socket),
    ) as process:
        yield process


def connect(process: StoreProcess, transport: str = "auto", timeout_s: float = PATIENCE_S) -> Store:
    """`timeout_s`: how long a store that does not come back is waited for."""
    store = psstore.connect(
        process.url,
        transport=transport,  # type: ignore[arg-type]
        wait_s=PATIENCE_S,
        connect_timeout_s=timeout_s,
        timeout_s=timeout_s,
    )
    store.create("w", shape=(ELEMS,), rule="sgd")
    return store


def train(store: Store, *, until: int) -> None:
    while store.version < until:
        store.push("w", np.full(ELEMS, 1.0, F32))
        store.commit({"lr": 1.0})


def keep_pulling(store: Store) -> None:
    while True:
        store.pull("w")


def kill(process: StoreProcess, shard: int) -> None:
    os.kill(process.shard_pids()[shard], signal.SIGKILL)


@pytest.mark.skipif(disk.why_not() is not None, reason=str(disk.why_not()))
def test_a_store_goes_back_while_its_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    flags = ["--checkpoint", str(tmp_path / "disk" / "run"), "--checkpoint-every", "1000000", "--restarts", "1"]
    with disk.SmallDisk(tmp_path / "disk") as small, StoreProcess(*flags) as served:
        with psstore.connect(served.url, wait_s=PATIENCE_S) as store:
            store.create("w", np.zeros(8, F32), rule="sgd")
            store.push("w", np.ones(8, F32))
            store.commit({"lr": 1.0})
            assert store.checkpoint() == 1
            small.fill()
            kill(served, 0)
            with pytest.raises(RolledBack):
                store.push("w", np.ones(8, F32))
        with psstore.connect(served.url, wait_s=PATIENCE_S) as store:
            with pytest.raises(StorageFailed, match="No space left"):
                store.checkpoint()
            store.push("w", np.ones(8, F32))
            store.commit({"lr": 1.0})
            small.empty()

            def is_written() -> bool:
                # Whoever asked before, as the store itself does, may have one more attempt under way.
                with contextlib.suppress(StorageFailed):
                    return store.checkpoint() == 2
                return False

            assert eventually(is_written)
            assert_array_equal(store.pull("w"), np.full(8, -2.0, F32))


def test_a_store_goes_back_once_its_storage_is_there_again(tmp_path: Path) -> None:
    place, away = tmp_path / "run", tmp_path / "away"
    flags = ("--checkpoint", str(place), "--checkpoint-every", "1000000", "--restarts", "1")
    with StoreProcess(*flags) as served, psstore.connect(served.url, wait_s=PATIENCE_S) as store:
        store.create("w", np.zeros(ELEMS, F32), rule="sgd")
        train(store, until=1)
        assert store.checkpoint() == 1
        place.rename(away)
        place.touch()
        kill(served, 0)
        assert eventually(lambda: "it is looked for again" in served.log())
        place.unlink()
        away.rename(place)
        with pytest.raises(RolledBack):
            store.push("w", np.ones(ELEMS, F32))
        assert_array_equal(psstore.connect(served.url).pull("w"), np.full(ELEMS, -1.0, F32))


@pytest.mark.parametrize("workers", ["1", "1:2"])
def test_a_store_that_went_back_and_to_which_nobody_returns_ends(tmp_path: Path, workers: str) -> None:
    """As where its shard dies just when the workers are done: they have ended, and the checkpoint is of before."""
    flags = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1000000", "--restarts", "1", "--until-done")
    with StoreProcess("--workers", workers, "--patience-s", "2", *flags) as served:
        with psstore.connect(served.url, wait_s=PATIENCE_S) as store:
            store.create("w", np.zeros(8, F32), rule="sgd")
            store.push("w", np.ones(8, F32))
            store.commit({"lr": 1.0})
            assert store.checkpoint() == 1
            kill(served, 0)
        assert served.wait() == 1
        assert "rank 0 went without leaving, and nobody came back within 2 s" in served.log()


@pytest.mark.parametrize("transport", TO_SHARDS)
def test_all_go_back_to_the_latest_checkpoint_and_clients_go_on(served: StoreProcess, transport: str) -> None:
    with connect(served, transport) as store:
        reader = psstore.connect(served.url, role="client", transport=transport)  # type: ignore[arg-type]
        train(store, until=3)
        assert store.checkpoint() == 3
        train(store, until=5)
        store.push("w", np.full(ELEMS, 7.0, F32))  # which no decision counts
        for victim in (1, 0):
            kill(served, victim)
            with pytest.raises(RolledBack) as told:
                store.pull("w")
            assert told.value.details == {"version": 3, "undone": 2}
            with pytest.raises(RolledBack):
                reader.pull("w")
            store.reconnect()
            reader.reconnect()
            assert (store.rank, store.version, store.round) == (0, 3, 4)
            for one in (store, reader):
                assert_array_equal(one.pull("w"), np.full(ELEMS, -3.0, F32))
            train(store, until=5)
            assert_array_equal(reader.pull("w"), np.full(ELEMS, -5.0, F32))
        reader.close()
    log = served.log()
    assert "shard 1 was killed by signal 9 (SIGKILL); all shards go back to version 3 (restart 1 of 2)" in log
    assert eventually(lambda: served.log().count("the store serves again, from version 3 on") == 2)


@pytest.mark.one_loop
def test_a_shard_that_is_told_to_end_alone_leaves_its_socket_to_its_next_life(served: StoreProcess) -> None:
    with connect(served, "unix") as store:
        train(store, until=1)
        store.checkpoint()
        os.kill(served.shard_pids()[1], signal.SIGTERM)
        with pytest.raises(RolledBack):
            keep_pulling(store)  # it may still answer what comes beside the signal
        store.reconnect()
        assert_array_equal(store.pull("w"), np.full(ELEMS, -1.0, F32))


@pytest.mark.one_loop
def test_checkpoints_go_on_where_they_were(served: StoreProcess) -> None:
    """The place has an owner that is gone, and newer checkpoints count from then on."""
    with connect(served) as store:
        train(store, until=2)
        store.checkpoint()
        kill(served, 0)
        with pytest.raises(RolledBack):
            train(store, until=4)
        store.reconnect()
        train(store, until=6)
        assert store.checkpoint() == 6
        kill(served, 1)
        with pytest.raises(RolledBack) as told:
            train(store, until=9)
        assert told.value.details["version"] == 6
        store.reconnect()
    assert served.stop() == 0


@pytest.mark.one_loop
def test_a_store_that_has_died_too_often_is_lost(served: StoreProcess) -> None:
    with connect(served) as store:
        train(store, until=1)
        store.checkpoint()
        for _ in range(2):
            kill(served, 0)
            with pytest.raises(RolledBack):
                store.stats()
            store.reconnect()
    with connect(served, timeout_s=6.0) as store:
        kill(served, 1)
        with pytest.raises(StoreUnreachable):
            store.stats()
        with pytest.raises(StoreUnreachable):
            store.reconnect()
        with pytest.raises(StoreClosed):
            store.pull("w")
    assert served.wait() == 1
    assert "the store is lost" in served.log()


@pytest.mark.one_loop
def test_a_store_without_a_checkpoint_yet_is_lost(served: StoreProcess) -> None:
    with connect(served, timeout_s=6.0) as store:
        train(store, until=1)
        kill(served, 1)
        with pytest.raises(PsstoreError):
            store.stats()
        assert served.wait() == 1
    assert "before there was a checkpoint to go back to" in served.log()


@pytest.mark.one_loop
def test_a_store_that_is_told_to_end_while_it_starts_again_ends_well(served: StoreProcess) -> None:
    with connect(served) as store:
        train(store, until=1)
        store.checkpoint()
    kill(served, 0)
    assert eventually(lambda: "all shards go back to version 1" in served.log())
    assert served.stop() == 0


def test_reconnecting_is_awaited_too(served: StoreProcess) -> None:
    async def read() -> None:
        async with await psstore.connect_async(served.url, role="client") as reader:
            kill(served, 0)
            with pytest.raises(RolledBack):
                await reader.stats()
            await reader.reconnect()
            assert_array_equal(await reader.pull("w"), np.full(ELEMS, -1.0, F32))

    with connect(served) as store:
        train(store, until=1)
        store.checkpoint()
    asyncio.run(read())


@pytest.mark.one_loop
def test_what_is_not_ours_to_start_again_is_said() -> None:
    with psstore.connect("local://") as store, pytest.raises(UsageError, match="no store of other processes"):
        store.reconnect()
    store.close()
    status, log = failed_start("--restarts", "1")
    assert status == 3
    assert "--checkpoint" in log


@pytest.mark.one_loop
def test_what_writes_checkpoints_is_started_again_but_not_for_ever(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "2")
    with StoreProcess(*flags) as process, connect(process) as store:
        for life in range(1, ShortLives.MOST):
            kill_writer(process)
            assert eventually(lambda life=life: process.log().count("is started again") == life)  # type: ignore[misc]
        train(store, until=3)
        assert eventually(lambda: "checkpoint of version" in process.log()), process.log()
        kill_writer(process)
        assert eventually(lambda: "none are written any more" in process.log())


def kill_writer(process: StoreProcess) -> None:
    """It is there a moment after it is said that it is started."""

    def writers() -> list[psutil.Process]:
        return [one for one in process.shards() if "psstore.launch.checkpointing" in one.cmdline()]

    assert eventually(lambda: len(writers()) == 1)
    writers()[0].kill()


# ---- several hosts ----


class Hosts:
    """A store of two shards, each of which is started by itself, and may start again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._flags = flags
        self.token = folder / "token"
        self.token.write_text("a secret that both of them have")
        self.token.chmod(0o600)
        self._place = str(folder / "run")
        self._places = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        self.shards = [self.start(index) for index in range(2)]
        assert all(shard.wait_ready() for shard in self.shards), [shard.log() for shard in self.shards]

    def start(self, index: int) -> StoreProcess:
        where = ("--shards-at", self._places, "--shard-index", str(index), "--token-file", str(self.token))
        flags = ("--checkpoint", self._place, "--checkpoint-every", "1000000", "--restore", "auto", "--restarts", "5")
        return StoreProcess(*where, *flags, *self._flags, port=None)

    def connect(self) -> Store:
        store = psstore.connect(
            self.shards[0].url, token=self.token.read_text(), wait_s=PATIENCE_S, connect_timeout_s=PATIENCE_S
        )
        store.create("w", shape=(ELEMS,), rule="sgd")
        return store


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    for shard in hosts.shards:
        shard.end()


def pull_for_ever(store: Store) -> None:
    while True:
        store.pull("w")


def shard_of(process: StoreProcess) -> psutil.Process:
    (shard,) = [one for one in process.shards() if "psstore.server.shard" in one.cmdline()]
    return shard


@pytest.mark.one_loop
@pytest.mark.parametrize("whole", [False, True], ids=["shard", "host"])
def test_the_shards_of_several_hosts_go_back_together(hosts: Hosts, whole: bool) -> None:
    """Whichever dies, alone or with its supervisor, which somebody starts again."""
    with hosts.connect() as store:
        train(store, until=3)
        assert store.checkpoint() == 3
        for victim in (1, 0, 1):
            train(store, until=5)
            if whole:
                shard = shard_of(hosts.shards[victim])
                hosts.shards[victim].signal(signal.SIGKILL)
                hosts.shards[victim].wait()
                psutil.wait_procs([shard], timeout=PATIENCE_S)
                hosts.shards[victim] = hosts.start(victim)
            else:
                shard_of(hosts.shards[victim]).kill()
            with pytest.raises(RolledBack) as told:
                pull_for_ever(store)
            assert told.value.details == {"version": 3, "undone": 2}, [shard.log() for shard in hosts.shards]
            store.reconnect()
            assert_array_equal(store.pull("w"), np.full(ELEMS, -3.0, F32))
        train(store, until=6)
        assert_array_equal(store.pull("w"), np.full(ELEMS, -6.0, F32))


@pytest.mark.one_loop
def test_the_shards_of_several_hosts_go_back_together_after_a_worker_has_left(tmp_path: Path) -> None:
    """In the life before: nothing was done in the one that begins."""
    hosts = Hosts(tmp_path, "--workers", "2")
    try:
        with hosts.connect() as store:
            hosts.connect().close()
            train(store, until=3)
            assert store.checkpoint() == 3
            shard_of(hosts.shards[1]).kill()
            with pytest.raises(RolledBack):
                pull_for_ever(store)
            store.reconnect()
            train(store, until=5)
    finally:
        for shard in hosts.shards:
            shard.end()


@pytest.mark.one_loop
def test_a_store_whose_storage_is_out_of_order_when_it_starts_again_waits_for_it(
    served: StoreProcess, tmp_path: Path
) -> None:
    """Where it reads its checkpoint."""
    with connect(served) as store:
        train(store, until=3)
        assert store.checkpoint() == 3
        (part,) = (tmp_path / "run").glob("v*/shard-00001-*.safetensors")
        content = part.read_bytes()
        part.write_bytes(bytes(len(content)))
        kill(served, 1)
        assert eventually(lambda: "it is tried again in" in served.log())
        part.write_bytes(content)
        with pytest.raises(RolledBack):
            pull_for_ever(store)
        store.reconnect()
        assert_array_equal(store.pull("w"), np.full(ELEMS, -3.0, F32))


@pytest.mark.one_loop
def test_a_host_that_comes_back_late_takes_the_store_back_once(hosts: Hosts) -> None:
    """The others try it seldom by then, and what they know of it is old when clients have found it already."""
    with hosts.connect() as store:
        train(store, until=3)
        assert store.checkpoint() == 3
        hosts.shards[1].signal(signal.SIGKILL)
        hosts.shards[1].wait()
        time.sleep(2 * LAST_BACKOFF_S)
        hosts.shards[1] = hosts.start(1)
        with pytest.raises(RolledBack):
            pull_for_ever(store)
        store.reconnect()
        seen = time.monotonic()
        while time.monotonic() < seen + 1.5 * LAST_BACKOFF_S:
            assert_array_equal(store.pull("w"), np.full(ELEMS, -3.0, F32))
