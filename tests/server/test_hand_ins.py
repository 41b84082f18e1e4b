"""What workers hand in: in checkpoints of running stores, and back in another life."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import psstore
from psstore.checkpoint.handed import pack_handed, unpack_handed
from psstore.checkpoint.place import open_place
from psstore.client.store import Store
from psstore.errors import BadArgument, DeadlineExceeded, NotAWorker, OutOfMemory, PsstoreError
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually

F32 = np.float32

NUM_WORKERS = 2

pytestmark = pytest.mark.sockets


def served(place: Path, *flags: str) -> StoreProcess:
    return restored("--checkpoint", str(place), "--checkpoint-every", "1000000", *flags)


def restored(*flags: str) -> StoreProcess:
    return StoreProcess("--shards", "2", "--workers", str(NUM_WORKERS), *flags)


def connected(process: StoreProcess, rank: int) -> Store:
    return psstore.connect(process.url, rank=rank, num_workers=NUM_WORKERS, wait_s=PATIENCE_S)


def each(process: StoreProcess, pool: ThreadPoolExecutor, work: Callable[[Store], None]) -> list[Future[None]]:
    """What every worker does, from its connection to its end."""

    def worker(rank: int) -> None:
        with connected(process, rank) as store:
            store.create("w", np.zeros(10, F32), rule="sgd")
            work(store)

    return [pool.submit(worker, rank) for rank in range(NUM_WORKERS)]


def step(store: Store) -> None:
    store.push("w", np.ones(10, F32))
    store.commit({"lr": 0.1})


class Part(NamedTuple):
    rank: int
    version: int
    state: Any


def parts(place: Path, version: int) -> list[Part]:
    """What a checkpoint has of workers."""
    with open_place(f"{place}@{version}").place.open(version) as checkpoint:
        found = [checkpoint.worker(rank) for rank in checkpoint.ranks]
    return [Part(one.rank, one.version, one.handed) for one in found]


@pytest.mark.one_loop
@pytest.mark.parametrize("mode", ["sync", "backup", "ssp", "async"])
def test_a_checkpoint_beside_training_has_them_and_they_come_back(tmp_path: Path, mode: str) -> None:
    enough = threading.Event()

    def train(store: Store) -> None:
        assert store.handed_in() is None
        store.hand_in({"version": store.version})
        store.barrier()
        while not store.stopped:
            step(store)
            if store.hand_in_wanted:
                store.hand_in({"version": store.version, "array": np.arange(3)})
            if enough.is_set():
                store.stop()

    place = tmp_path / "run"
    with ThreadPoolExecutor() as pool, served(place, "--mode", mode) as process:
        workers = each(process, pool, train)
        with psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader:
            eventually(lambda: int(leader.stats()[0]["decisions"]) > 10)
            version = leader.checkpoint()
        enough.set()
        for worker in workers:
            worker.result()
    found = parts(place, version)
    assert [rank for rank, _, _ in found] == [0, 1]
    for _, of, state in found:
        assert state["version"] == of
        assert of == version or mode != "sync"

    def look(store: Store) -> None:
        back = store.handed_in()
        assert back is not None
        assert (back.version, back.state["version"]) == (found[store.rank or 0].version,) * 2

    with ThreadPoolExecutor() as pool, restored("--restore", f"{place}@{version}", "--mode", mode) as process:
        for worker in each(process, pool, look):
            worker.result()


@pytest.mark.one_loop
def test_the_last_checkpoint_is_the_one_that_has_what_workers_hand_in(tmp_path: Path) -> None:
    """Workers that are killed are where they handed in last: as it ends, the store writes none of later."""
    place = tmp_path / "run"

    def begin(store: Store) -> None:
        store.create("w", np.zeros(10, F32), rule="sgd")
        store.hand_in("at first")
        step(store)

    with served(place) as process, ThreadPoolExecutor() as pool:
        stores = [connected(process, rank) for rank in range(NUM_WORKERS)]
        list(pool.map(begin, stores))
        with psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader:
            with pytest.raises(DeadlineExceeded, match="version 1 would be without what ranks 0, 1 hand in"):
                leader.checkpoint(gather_s=0, whole=True)
            for store in stores:
                store.hand_in("at 1")
            assert leader.checkpoint(gather_s=0, whole=True) == 1
        list(pool.map(step, stores))
        for store in stores:
            store.end(leave=False)
        assert process.stop() == 0
        assert "no last checkpoint was written" in process.log()
    assert [one.version for one in open_place(str(place)).place.list()] == [1]
    assert [part.state for part in parts(place, 1)] == ["at 1", "at 1"]


@pytest.mark.one_loop
def test_a_checkpoint_is_written_without_what_nobody_hands_in(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with served(place) as process, connected(process, 0) as one, connected(process, 1) as two:
        one.create("w", np.zeros(10, F32), rule="sgd")
        one.hand_in("old")
        two.hand_in("old")
        together(step, one, two)
        one.hand_in("new")
        with psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader:
            assert leader.checkpoint(gather_s=0.2) == 1
        assert parts(place, 1) == [Part(0, 1, "new")]
        assert "the checkpoint of version 1 is without what ranks 1 hand in" in process.log()
        together(step, one, two)
        two.hand_in("newer")
        assert two.checkpoint() == 2, "a worker that leads waits for nobody's next round"
        assert parts(place, 2) == [Part(1, 2, "newer")]


@pytest.mark.one_loop
def test_a_checkpoint_says_that_it_is_without_what_workers_hand_in_as_of_a_later_version(tmp_path: Path) -> None:
    """As where a loop takes two steps in each turn, and hands in between turns."""
    place = tmp_path / "run"
    with served(place) as process, connected(process, 0) as one, connected(process, 1) as two:
        one.create("w", np.zeros(10, F32), rule="sgd")
        one.hand_in("old")
        two.hand_in("old")
        together(step, one, two)
        with psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader, ThreadPoolExecutor() as pool:
            written = pool.submit(leader.checkpoint, gather_s=PATIENCE_S)
            while not one.hand_in_wanted:
                together(step, one, two)
            version = one.version
            together(step, one, two)
            one.hand_in("new")
            two.hand_in("new")
            assert written.result() == version
        assert parts(place, version) == []
        assert f"the checkpoint of version {version} is without what ranks 0, 1 hand in" in process.log()


@pytest.mark.one_loop
def test_nobody_waits_for_workers_that_have_never_handed_in(tmp_path: Path) -> None:
    with (
        served(tmp_path / "run") as process,
        connected(process, 0),
        connected(process, 1),
        psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader,
    ):
        assert leader.checkpoint(gather_s=PATIENCE_S) == 0


def test_the_next_leader_goes_on_when_one_dies_while_workers_hand_in(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with served(place) as process, connected(process, 0) as one, connected(process, 1) as two:
        one.create("w", np.zeros(10, F32), rule="sgd")
        one.hand_in("old")
        together(step, one, two)
        with psstore.connect(process.url, role="client", timeout_s=1.0) as leader, pytest.raises(PsstoreError):
            leader.checkpoint(gather_s=PATIENCE_S, wait_s=0.5)
        with psstore.connect(process.url, role="client", wait_s=PATIENCE_S) as leader:
            assert leader.checkpoint(gather_s=0.0) == 1


def together(work: Callable[[Store], None], *stores: Store) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, stores))


# ---- what is refused ----


@pytest.mark.one_loop
def test_what_can_not_be_handed_in_is_refused(tmp_path: Path) -> None:
    with psstore.connect("local://?max_memory=64MiB") as store:
        with pytest.raises(BadArgument, match=r"object at \['a'\]\[0\]"):
            store.hand_in({"a": [object()]})
        store.hand_in(b"before")
        with pytest.raises(OutOfMemory, match="more than the 16,777,216 kept for it"):
            store.hand_in(np.zeros(5_000_000, F32))
        assert store.handed_in() == (0, b"before")
        store.hand_in(b"fits")
        store.leave()
        for call in (store.handed_in, store.stop, lambda: store.hand_in(1)):
            with pytest.raises(NotAWorker):
                call()


@pytest.mark.one_loop
@pytest.mark.parametrize("damaged", [b"", b"\xc1", pack_handed([1])[:-1], b"\x92\x81\xa5array\x03\x90"])
def test_bytes_that_nobody_packs_are_refused(damaged: bytes) -> None:
    with pytest.raises(BadArgument, match="can't be made out"):
        unpack_handed(damaged)
