"""Checkpoints of running stores: written beside training, and gone on from in any number of shards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import msgspec
import numpy as np
import psutil
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import LocalStore
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.place import open_place
from psstore.checkpoint.reader import verify
from psstore.checkpoint.url import folder_of
from psstore.client.rule_state import Restored
from psstore.client.store import Store
from psstore.errors import (
    BadArgument,
    CheckpointNotFound,
    PsstoreError,
    RolledBack,
    StorageError,
    StorageFailed,
    StoreUnreachable,
    VersionGone,
)
from psstore.exit_codes import EXIT_FAILED
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.signing import Signer
from psstore.server import checkpoint_keeper, checkpoint_place
from psstore.server.checkpoint_keeper import FORGET_S, CheckpointKeeper
from psstore.server.checkpoint_place import StoragePlace
from psstore.server.other_member import refuses
from psstore.server.processes import ShortLives
from psstore.types import Consistency, TensorSpec
from psstore.wire import messages as m
from tests.support.cluster import PATIENCE_S
from tests.support.free_ports import free_ports
from tests.support.server_process import StoreProcess, eventually, failed_start

F32 = np.float32

SHAPES = {"a": (300, 500), "b": (7,), "c": (70_000,), "empty": (0, 3)}
"""The first takes three slices, the third two."""

HYPERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "amsgrad": 1.0},
    "adamw": {"lr": 0.01},
    "adagrad": {"lr": 0.01},
    "rmsprop": {"lr": 0.01, "momentum": 0.5, "centered": 1.0},
    "delayed_nesterov": {"lr": 0.1, "every": 2.0},
}

NUMBERS_OF_SHARDS = (1, 2, 3, 4, 7, 8)

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]  # test_hand_ins.py has checkpoints under both


@contextlib.contextmanager
def served(*flags: str, shards: int = 2, port: int = 0) -> Iterator[StoreProcess]:
    with StoreProcess("--shards", str(shards), *flags, port=port) as store:
        yield store


@contextlib.contextmanager
def training(process: StoreProcess, rule: str = "sgd", *, reduction: str = "median") -> Iterator[Store]:
    """`reduction`: of the tensor 'b', which is refused if the store has another one."""
    with psstore.connect(process.url, wait_s=PATIENCE_S) as store:
        store.create_many(
            [
                TensorSpec(name=name, shape=shape, rule=rule, reduction=reduction if name == "b" else "mean")
                for name, shape in SHAPES.items()
            ]
        )
        yield store


def step(store: Store, number: int, rule: str = "sgd") -> None:
    """The gradient of a step depends on its number alone; every third one leaves a tensor out."""
    draw = np.random.default_rng(number)
    gradients = {name: draw.standard_normal(shape).astype(F32) for name, shape in SHAPES.items()}
    if number % 3 == 0:
        del gradients["b"]
    store.push_many(gradients)
    store.commit(HYPERS[rule] if number < 3 else None)  # later rounds keep them


def everything(store: Store) -> dict[str, bytes]:
    """Values, state, steps and versions."""
    names = list(SHAPES)
    found = {name: np.asarray(value).tobytes() for name, value in zip(names, store.pull_many(names), strict=True)}
    for name, state in zip(names, store.pull_state(names), strict=True):
        found[f"{name} state"] = repr(sorted((key, _plain(value)) for key, value in _fields(state))).encode()
        found[f"{name} version"] = str(store.version_of(name)).encode()
    return found


def _fields(state: object) -> list[tuple[str, object]]:
    return [(key, getattr(state, key)) for key in ("step", "buffers") if hasattr(state, key)]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return sorted((key, np.asarray(one).tobytes()) for key, one in value.items())
    return value


# ---- going on ----


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", list(HYPERS))
@pytest.mark.parametrize("before", NUMBERS_OF_SHARDS)
def test_a_checkpoint_of_any_number_of_shards_goes_on_in_any_other(tmp_path: Path, before: int, rule: str) -> None:
    place = str(tmp_path / "run")
    with served("--checkpoint", place, shards=before) as first, training(first, rule) as store:
        for number in range(1, 4):
            step(store, number, rule)
        assert store.checkpoint() == 3
        step(store, 4, rule)
        expected = everything(store)
    for after in NUMBERS_OF_SHARDS:
        with served("--restore", f"{place}@3", shards=after) as second, training(second, rule) as store:
            step(store, 4, rule)
            assert everything(store) == expected, f"{before} shards to {after}"


@pytest.mark.parametrize("rule", list(HYPERS))
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_training_goes_on_bit_for_bit_in_another_number_of_shards(
    tmp_path: Path, rule: str, before: int, after: int
) -> None:
    place = str(tmp_path / "run")
    with served("--checkpoint", place, shards=before) as first, training(first, rule) as store:
        for number in range(1, 6):
            step(store, number, rule)
        assert store.checkpoint() == 5
        at_five = everything(store)
        for number in range(6, 9):
            step(store, number, rule)
        at_eight = everything(store)
        first.signal(signal.SIGKILL)
    with served("--restore", f"{place}@5", shards=after) as second, training(second, rule) as store:
        assert store.version == 5
        assert everything(store) == at_five
        for number in range(6, 9):
            step(store, number, rule)
        assert everything(store) == at_eight
        assert store.version == 8
        store.create("new", np.ones(3, F32))
        assert_array_equal(store.pull("new"), 1.0)


def test_what_was_added_to_and_what_nobody_has_given_a_value_comes_back(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    with served("--checkpoint", place) as first, psstore.connect(first.url) as store:
        store.create("count", np.zeros(3, F32), rule="add")
        store.create("assigned", np.arange(4.0))
        store.create("zeros", shape=(100_000,), rule="adam")
        store.create("gone", np.ones(3, F32))
        store.drop("gone")
        store.push("count", np.ones(3, F32))
        assert store.checkpoint() == 0
        store.push("count", np.ones(3, F32))
    with served("--restore", f"{place}@0", shards=3) as second, psstore.connect(second.url) as store:
        assert sorted(store.keys()) == ["assigned", "count", "zeros"]
        assert_array_equal(store.pull("count"), 1.0)
        assert_array_equal(store.pull("assigned"), np.arange(4.0))
        assert store.pull("assigned").dtype == np.float64
        assert_array_equal(store.pull("zeros"), np.zeros(100_000, F32))


def test_a_killed_store_goes_on_by_the_same_command(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"), "--restore", "auto", "--checkpoint-every", "2")
    with served(*flags) as first, training(first) as store:
        for number in range(1, 6):
            step(store, number)
        eventually(lambda: max(written(tmp_path), default=0) >= 4)
        first.signal(signal.SIGKILL)
        with contextlib.suppress(PsstoreError):
            store.stats()
    with served(*flags, shards=3) as second, training(second) as store:
        version = store.version
        assert version in (4, 5)
        for number in range(version + 1, 8):
            step(store, number)
        killed = everything(store)
    with served() as never, training(never) as store:
        for number in range(1, 8):
            step(store, number)
        assert everything(store) == killed


def test_a_clean_end_writes_a_last_checkpoint(tmp_path: Path) -> None:
    with served("--checkpoint", str(tmp_path / "run"), "--keep", "2") as process:
        with training(process) as store:
            for number in (1, 2):
                step(store, number)
                store.checkpoint()
            step(store, 3)
        assert process.stop() == 0
        assert "checkpoint of version 3" in process.log()
    assert written(tmp_path) == [2, 3]
    assert not (tmp_path / "run" / "owner.json").exists(), "the place is anybody's again"


def test_the_last_checkpoint_is_waited_for_whatever_happens_to_standbys(tmp_path: Path) -> None:
    with served("--checkpoint", str(tmp_path / "run"), "--standbys", "1") as process:
        with training(process) as store:
            step(store, 1)
            assert eventually(lambda: all(shard["standbys"] == 1 for shard in store.stats()))
            leader = int(store.stats()[0]["process"])
        writer = writer_of(process)
        writer.suspend()
        process.signal(signal.SIGTERM)
        os.kill(leader, signal.SIGKILL)  # its standby leads
        assert eventually(lambda: "serves again" in process.log())
        writer.resume()
        assert process.wait() == 0
    assert written(tmp_path) == [1]


def test_a_last_checkpoint_that_is_not_written_is_told(tmp_path: Path) -> None:
    with served("--checkpoint", str(tmp_path / "run")) as process:
        with training(process) as store:
            step(store, 1)
        writer = writer_of(process)
        writer.suspend()
        with open(f"/proc/{writer.pid}/fd/0", "rb") as asked:
            unread = num_unread(asked)
            process.signal(signal.SIGTERM)
            assert eventually(lambda: num_unread(asked) > unread), "the store waits for it"
        assert eventually(lambda: "waiting for the last checkpoint" in process.log())
        writer.kill()
        assert process.wait() == EXIT_FAILED
        assert "the last checkpoint was not written" in process.log()


def writers_of(process: StoreProcess) -> list[psutil.Process]:
    return [one for one in process.shards() if "psstore.launch.checkpointing" in one.cmdline()]


def writer_of(process: StoreProcess) -> psutil.Process:
    """What has its checkpoints written, which may be there later than the store."""
    assert eventually(lambda: bool(writers_of(process)))
    (writer,) = writers_of(process)
    return writer


def num_unread(pipe: BinaryIO) -> int:
    """Bytes that wait to be read from it."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


def test_an_end_is_told_to_have_no_last_checkpoint_where_what_writes_them_is_not_started_any_more(
    tmp_path: Path,
) -> None:
    with served("--checkpoint", str(tmp_path / "run")) as process:
        with training(process) as store:
            step(store, 1)
        for _ in range(ShortLives.MOST):
            writer = writer_of(process)
            writer.kill()
            assert eventually(lambda gone=writer: not gone.is_running())  # type: ignore[misc]
        assert eventually(lambda: "none are written any more" in process.log())
        assert process.stop() == EXIT_FAILED
        assert "the last checkpoint was not written" in process.log()


@pytest.mark.parametrize("how", ["done", "lost"])
def test_shards_of_several_hosts_write_a_last_checkpoint_when_the_workers_are(tmp_path: Path, how: str) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of more than sixteen bytes")
    token.chmod(0o600)
    with hosts(3, token, "--checkpoint", str(tmp_path / "run"), "--until-done", "--patience-s", "1") as shards:
        store = psstore.connect(shards[0].url, rank=0, token=token.read_text())
        store.create_many([TensorSpec(name=name, shape=shape, rule="adam") for name, shape in SHAPES.items()])
        step(store, 1, "adam")
        store.end(leave=how == "done")
        assert [shard.wait() for shard in shards] == ([0, 0, 0] if how == "done" else [EXIT_FAILED] * 3)
    assert written(tmp_path) == [1]


def test_what_is_written_while_workers_train_is_one_version(tmp_path: Path) -> None:
    """All tensors get the same gradient in each step, so that they are equal at each version."""
    place = str(tmp_path / "run")
    names = [f"t{number}" for number in range(6)]
    with served("--workers", "2", "--mode", "async", "--checkpoint", place, shards=3) as process:
        stop = threading.Event()

        def train(rank: int) -> None:
            with psstore.connect(process.url, rank=rank, wait_s=PATIENCE_S) as store:
                store.create_many([TensorSpec(name=name, shape=(50_000,), rule="sgd") for name in names])
                while not stop.is_set():
                    store.push_many({name: np.ones(50_000, F32) for name in names})
                    store.commit({"lr": 1.0})

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        with psstore.connect(process.url, role="client") as store:
            eventually(lambda: int(store.stats()[0]["version"]) > 3)
            versions = [store.checkpoint() for _ in range(5)]
            eventually(lambda: all(one["holds"] == 0 for one in store.stats()))
        stop.set()
        for thread in threads:
            thread.join()
    assert versions == sorted(versions)
    for version in written(tmp_path):
        verify(open_place(place).place.storage, version)
        with served("--restore", f"{place}@{version}", shards=2) as restored, psstore.connect(restored.url) as store:
            values = store.pull_many(names)
            assert store.version == version
            assert len({value.tobytes() for value in values}) == 1


def test_a_device_s_shards_are_written_and_restored(tmp_path: Path) -> None:
    place, devices = str(tmp_path / "run"), ("--device", "fake:0?seed=1,fake:1?seed=2")
    trained = partial(training, rule="adam", reduction="mean")
    with served("--checkpoint", place, *devices, shards=3) as first, trained(first) as store:
        for number in (1, 2, 3):
            step(store, number, "adam")
        assert store.checkpoint() == 3
        at_three = everything(store)
    with served("--restore", f"{place}@3", *devices) as second, trained(second) as store:
        assert everything(store) == at_three


def test_shards_of_several_hosts_are_written_and_restored(tmp_path: Path) -> None:
    place, token = str(tmp_path / "run"), tmp_path / "token"
    token.write_text("a secret of more than sixteen bytes")
    token.chmod(0o600)
    with (
        hosts(2, token, "--checkpoint", place) as shards,
        psstore.connect(shards[0].url, token=token.read_text()) as store,
    ):
        store.create_many([TensorSpec(name=name, shape=shape, rule="adam") for name, shape in SHAPES.items()])
        for number in (1, 2):
            step(store, number, "adam")
        assert store.checkpoint() == 2
        at_two = everything(store)
    with (
        hosts(3, token, "--restore", f"{place}@2") as shards,
        psstore.connect(shards[0].url, token=token.read_text()) as store,
    ):
        assert everything(store) == at_two
        step(store, 3, "adam")
        assert store.version == 3


@contextlib.contextmanager
def hosts(count: int, token: Path, *flags: str) -> Iterator[list[StoreProcess]]:
    """A store of so many shards, each of which is started by itself."""
    with contextlib.ExitStack() as ends:
        places = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
        shards = [
            StoreProcess(
                "--shards-at", places, "--shard-index", str(index), "--token-file", str(token), *flags, port=None
            )
            for index in range(count)
        ]
        for shard in reversed(shards):  # shard 0 ends first
            ends.callback(shard.end)
        assert all(shard.wait_ready() for shard in shards), [shard.log() for shard in shards]
        yield shards


# ---- whoever lived through it ----


def test_who_lives_through_a_restart_is_told_where_the_store_is_again(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path / "run"))
    (port,) = free_ports(1)
    with served(*flags, shards=1, port=port) as first, training(first) as worker:
        reader = psstore.connect(first.url, role="client", timeout_s=PATIENCE_S)
        step(worker, 1)
        worker.checkpoint()
        step(worker, 2)
        first.signal(signal.SIGKILL)
        first.wait()
        assert eventually(lambda: refuses(first.url))  # its shard listens until it has seen that it is gone
        with served(*flags, "--restore", "auto", shards=1, port=port) as second:
            for store in (worker, reader):
                told = told_of_restart(store)
                assert told.details["version"] == 1
            with training(second) as again:
                assert again.version == 1
                step(again, 2)
        reader.close()


def told_of_restart(store: Store) -> RolledBack:
    """The store may be found to be out of reach first."""
    while True:
        try:
            store.stats()
        except RolledBack as error:
            return error
        except StoreUnreachable:
            continue


# ---- what is refused ----


def test_a_place_that_cannot_be_written_is_refused_before_serving(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, log = failed_start("--checkpoint", str(tmp_path / "file" / "run"))
    assert status == 3
    assert str(tmp_path / "file") in log


def test_a_place_of_a_store_that_lives_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    with served("--checkpoint", place):  # it beats every ten seconds, which whoever watches sees within a lease
        status, log = failed_start("--checkpoint", place)
    assert status == 3
    assert "writes its checkpoints there and lives" in log


def test_a_place_that_is_ahead_of_the_store_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    with served("--checkpoint", place) as process, training(process) as store:
        step(store, 1)
        store.checkpoint()
    status, log = failed_start("--checkpoint", place)
    assert status == 3
    assert "has version 1, and the store is at version 0" in log


def test_what_is_not_there_is_not_restored(tmp_path: Path) -> None:
    status, log = failed_start("--restore", str(tmp_path / "nothing"))
    assert status == 3
    assert "no complete checkpoint" in log
    status, log = failed_start("--restore", "auto")
    assert status == 3
    assert "--checkpoint" in log
    status, log = failed_start("--checkpoint", str(tmp_path), "--checkpoint-every", "often")
    assert status == 3
    assert "expected decisions, as 500, or seconds, as 60s" in log


def test_a_damaged_checkpoint_is_not_restored(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with served("--checkpoint", str(place)) as process, training(process) as store:
        step(store, 1)
        store.checkpoint()
    victim = next(place.glob("v*/shard-00001*"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    status, log = failed_start("--restore", str(place), "--shards", "3")
    assert status == 3
    assert victim.name in log


def test_a_checkpoint_goes_where_its_caller_says_or_the_store_says_why_not(tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    with served() as process, training(process) as store:
        step(store, 1)
        with pytest.raises(BadArgument, match="started without --checkpoint"):
            store.checkpoint()
        assert store.checkpoint(other) == 1
        (tmp_path / "file").touch()
        for _ in range(2):
            with pytest.raises(StorageError):
                store.checkpoint(str(tmp_path / "file" / "run"))
        step(store, 2)
        assert store.checkpoint(other) == 2
    assert [one.version for one in open_place(other).place.list()] == [1, 2]


def test_who_has_a_token_cannot_have_the_store_write_elsewhere(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of more than sixteen bytes")
    token.chmod(0o600)
    flags = ("--token-file", str(token), "--checkpoint", str(tmp_path / "run"))
    with served(*flags) as process, psstore.connect(process.url, token=token.read_text()) as store:
        with pytest.raises(BadArgument, match="serves several users"):
            store.checkpoint(str(tmp_path / "elsewhere"))
        assert store.checkpoint() == 0
    assert not (tmp_path / "elsewhere").exists()


def test_a_store_inside_a_program_says_that_it_writes_none(tmp_path: Path) -> None:
    with LocalStore() as local, local.connect() as store, pytest.raises(BadArgument, match="psstore-server"):
        store.checkpoint(str(tmp_path))


def written(folder: Path) -> list[int]:
    """Versions of the complete checkpoints."""
    try:
        return [one.version for one in open_place(str(folder / "run")).place.list() if one.status == "complete"]
    except CheckpointNotFound:
        return []


# ---- who leads ----


def test_two_who_want_one_at_the_same_time_both_get_one(tmp_path: Path) -> None:
    with served("--checkpoint", str(tmp_path / "run")) as process, training(process) as store:
        step(store, 1)
        with ThreadPoolExecutor() as pool, psstore.connect(process.url, role="client") as other:
            both = [pool.submit(one.checkpoint, wait_s=PATIENCE_S) for one in (store, other)]
            assert [one.result() for one in both] == [1, 1]


def test_what_was_restored_is_in_the_next_checkpoint_and_snapshot_and_ends_those_before(tmp_path: Path) -> None:
    """As after load_state_dict(), when no decision has followed yet."""
    place = str(tmp_path / "run")
    with served("--checkpoint", place) as process, training(process) as store:
        step(store, 1)
        step(store, 2)
        with store.snapshot() as before:
            store.restore({"a": Restored(np.full(SHAPES["a"], 7.0, F32))})
            with pytest.raises(VersionGone):
                before.pull("a")
        with store.snapshot() as view:
            assert (view.version, view.pull("a")[0, 0]) == (2, 7.0)
            step(store, 4)
            assert view.pull("a")[0, 0] == 7.0
        store.restore({"a": Restored(np.full(SHAPES["a"], 5.0, F32))})
        assert store.checkpoint() == 3
        found = everything(store)
    with served("--restore", place, shards=3) as process, psstore.connect(process.url) as store:
        assert everything(store) == found
        with store.snapshot() as view:
            assert view.pull("a")[0, 0] == 5.0


def test_a_clipped_round_is_settled_before_it_is_written_or_held(tmp_path: Path) -> None:
    with served("--checkpoint", str(tmp_path / "run")) as process, training(process) as store:
        step(store, 1)
        for call in (written_version, held_version):
            store.push("a", np.ones(SHAPES["a"], F32))
            store.commit(max_norm=1.0)
            assert call(store) == store.version


def written_version(store: Store) -> int:
    return store.checkpoint()


def held_version(store: Store) -> int:
    with store.snapshot(state=True) as view:
        view.pull_state(["a"])
        return view.version


def opened(url: str, at: int) -> StoragePlace:
    return StoragePlace(url, at=at)


def test_an_attempt_whose_leader_is_gone_makes_room(tmp_path: Path) -> None:
    signer = Signer(b"k" * 32)
    consistency = Consistency()
    coordinator = Coordinator(consistency=consistency, liveness=Liveness(), num_shards=1, signer=signer)
    place = StoragePlace(str(tmp_path), keep=1)
    place.start_at(0)
    now = 0.0
    keeper = CheckpointKeeper(
        coordinator,
        num_shards=1,
        signer=signer,
        lineage="",
        own=place,
        open_place=opened,
        any_place=False,
        now=lambda: now,
    )
    try:
        fact = begun(keeper, signer)
        assert fact.version == 0
        assert not keeper.begin(m.Begin()).ready
        keeper.begin(m.Begin(reader=2, give_up=True))
        assert not keeper.begin(m.Begin()).ready, "it is another one's"
        keeper.begin(m.Begin(reader=1, give_up=True))
        assert keeper.begin(m.Begin()).ready
        begun(keeper, signer)
        now += 1.1 * FORGET_S
        assert keeper.begin(m.Begin()).ready, "nobody has asked for it again"
        fact = begun(keeper, signer)
        for _ in range(3):
            now += 0.9 * FORGET_S
            keeper.led(fact.attempt)
            assert not keeper.begin(m.Begin()).ready, "its leader asks shards whether it is written"
        now += 1.1 * FORGET_S
        assert keeper.begin(m.Begin()).ready
        fact = begun(keeper, signer)
        record = FileRecord(
            name="shard-00000-of-00001.safetensors", kind="shard", index=0, num_bytes=1, digest="0" * 64
        )
        saved = m.SavedFact(shard=0, attempt=fact.attempt, record=msgspec.json.encode(record))
        keeper.keep(m.Keep(saved=(signer.sign(saved),)))
        assert eventually(lambda: keeper.begin(m.Begin()).ready)
    finally:
        keeper.close()


def test_places_that_clients_name_are_left_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_keeper, "MAX_PLACES", 3)
    signer = Signer(b"k" * 32)
    coordinator = Coordinator(consistency=Consistency(), liveness=Liveness(), num_shards=1, signer=signer)
    own = StoragePlace(str(tmp_path / "own"), keep=1)
    own.start_at(0)
    keeper = CheckpointKeeper(
        coordinator, num_shards=1, signer=signer, lineage="", own=own, open_place=opened, any_place=True
    )

    def owned() -> set[str]:
        return {owner.parent.name for owner in tmp_path.glob("*/owner.json")}

    def is_ready(name: str) -> bool:
        return keeper.begin(m.Begin(url=str(tmp_path / name))).ready

    try:
        for name in ("one", "two", "three", "one"):
            assert eventually(partial(is_ready, name))
        assert eventually(lambda: owned() == {"own", "three", "one"})
    finally:
        keeper.close()
    assert not owned()


def test_a_place_of_a_store_that_was_to_go_on_elsewhere_is_left_when_that_comes_to_nothing(tmp_path: Path) -> None:
    signer = Signer(b"k" * 32)
    coordinator = Coordinator(consistency=Consistency(), liveness=Liveness(), num_shards=1, signer=signer)
    keeper = CheckpointKeeper(
        coordinator, num_shards=1, signer=signer, lineage="", own=None, open_place=opened, any_place=False
    )
    asked = m.Begin(url=str(tmp_path), reader=1)
    try:
        assert eventually(lambda: keeper.begin(asked, at_any_place=True).ready)
        assert (tmp_path / "owner.json").exists()
        keeper.begin(m.Begin(reader=1, give_up=True), at_any_place=True)
        assert eventually(lambda: not (tmp_path / "owner.json").exists())
    finally:
        keeper.close()


def test_a_place_that_gets_no_thread_is_tried_again(tmp_path: Path) -> None:
    signer = Signer(b"k" * 32)
    coordinator = Coordinator(consistency=Consistency(), liveness=Liveness(), num_shards=1, signer=signer)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        own = opened(str(tmp_path), 0)
    keeper = CheckpointKeeper(
        coordinator, num_shards=1, signer=signer, lineage="", own=own, open_place=opened, any_place=False
    )
    try:
        with pytest.raises(StorageFailed, match="raise ulimit -u"):
            keeper.begin(m.Begin())
        assert eventually(lambda: keeper.begin(m.Begin()).ready)
    finally:
        own.close()
        keeper.close()


def test_a_store_tells_why_a_checkpoint_came_to_nothing(tmp_path: Path) -> None:
    """Also where a shard could not write its file: `psstore top` and `doctor` say so."""
    (tmp_path / folder_of(1)).touch()
    with served("--checkpoint", str(tmp_path)) as process, training(process) as store:
        step(store, 1)
        with pytest.raises(StorageFailed) as failed:
            store.checkpoint()
        assert eventually(lambda: "checkpoint_failure" in store.stats()[0])
        assert store.stats()[0]["checkpoint_failure"] == failed.value.message


def test_a_place_with_newer_checkpoints_is_nobodys_to_name(tmp_path: Path) -> None:
    with StoreProcess() as newer, psstore.connect(newer.url) as store:
        for _ in range(2):
            store.publish({"w": np.ones(2, np.float32)})
        assert store.checkpoint(str(tmp_path)) == 2
    with StoreProcess() as older, psstore.connect(older.url, role="client") as store:
        for _ in range(2):  # it is as free as it was
            with pytest.raises(BadArgument, match="has version 2, and the store is at version 0"):
                store.checkpoint(str(tmp_path))
        assert not (tmp_path / "owner.json").exists()


def test_what_an_attempt_that_failed_has_written_is_removed(tmp_path: Path) -> None:
    place = StoragePlace(str(tmp_path), keep=1)
    try:
        place.start_at(0)
        name, _ = place.begin(7, has_rows=False)
        folder = tmp_path / folder_of(7)
        folder.mkdir()
        (folder / f"shard-00000-of-00002.{name}.safetensors").touch()
        place.abandon(7)
        assert eventually(lambda: not folder.exists())
    finally:
        place.close()


def test_a_place_that_is_worked_at_stays_its_owner_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_place, "LEASE_S", 0.3)
    place = StoragePlace(str(tmp_path), keep=1)
    try:
        place.start_at(0)
        before = (tmp_path / "owner.json").read_bytes()

        def is_renewed() -> bool:
            place.abandon(1)  # work comes more often than the owner has to say that it lives
            return (tmp_path / "owner.json").read_bytes() != before

        assert eventually(is_renewed)
    finally:
        place.close()


def begun(keeper: CheckpointKeeper, signer: Signer) -> m.SaveFact:
    """A new attempt."""
    save = keeper.begin(m.Begin(reader=1)).save
    assert save is not None
    fact = signer.open(save)
    assert isinstance(fact, m.SaveFact)
    return fact
