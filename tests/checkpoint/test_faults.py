"""Whatever fails, and wherever a writer is killed: the newest complete checkpoint loads, and what it is, is whole."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from psstore.checkpoint import local_storage
from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.manifest import FileRecord
from psstore.checkpoint.owned_place import OwnedPlace
from psstore.checkpoint.ownership import take
from psstore.checkpoint.place import COMPLETE, CheckpointPlace
from psstore.checkpoint.reader import verify
from psstore.checkpoint.remote_storage import RemoteStorage
from psstore.checkpoint.storage import Storage, read_all, write_all
from psstore.errors import StorageError, StorageFailed
from psstore.types import TensorSpec
from tests.checkpoint.faults import (
    FailingFileSystem,
    FailingSystem,
    Faults,
    RenamingFileSystem,
    UploadingFileSystem,
)
from tests.checkpoint.support import Model, make_model, read_model, sha256, shard_state, write_shard

SPECS = [TensorSpec(name="w", shape=(300,), rule="adam"), TensorSpec(name="b", shape=(3,), rule="sgd")]


def model_of(version: int) -> Model:
    return make_model(SPECS, decision=version, seed=version)


def checkpoint_once(storage: Storage, version: int, *, keep: int = 1) -> None:
    """All that a store does to write one checkpoint: take the place, write, commit, tidy up."""
    place = OwnedPlace(CheckpointPlace(storage), take(storage, take_over=True), keep=keep)
    model = model_of(version)
    attempt = place.begin(version)
    with HashPool(1) as pool:
        records: list[FileRecord] = [
            write_shard(storage, model, keys, shard_state(model, index, 2), pool=pool, attempt=attempt)
            for index, keys in enumerate(model.keys_on(2))
        ]
    place.commit(model.state, records)
    place.tidy_up()


def check_after(storage: Storage, *, at_least: int) -> int:
    """The latest is whole and is what was written; and the place can be gone on with."""
    place = CheckpointPlace(storage)
    latest = place.latest()
    assert latest >= at_least
    verify(storage, latest)
    with place.open() as checkpoint:
        assert sha256(read_model(checkpoint, 3)) == sha256(model_of(latest))
    return latest


def check_recovery(storage: Storage) -> None:
    """The next store sweeps what the dead one left."""
    checkpoint_once(storage, 9)
    assert [(found.version, found.status) for found in CheckpointPlace(storage).list()] == [(9, COMPLETE)]
    left = [entry.name for entry in storage.entries("v000000000009")]
    assert len(left) == 3, left


def every_fault(
    attempt: Callable[[Faults], Storage], fresh: Callable[[], Storage], *, killed: bool
) -> Iterator[tuple[int, bool]]:
    """Yields each call's number, and whether a checkpoint came of it all the same, after all was checked. `attempt`
    returns a storage with these faults, that has version 1."""
    at = 0
    while True:
        faults = Faults(at, killed=killed)
        storage = attempt(faults)
        try:
            checkpoint_once(storage, 2)
            committed = True
        except StorageError:
            assert faults.has_failed
            committed = False
        healthy = fresh()
        check_after(healthy, at_least=2 if committed else 1)
        check_recovery(healthy)
        yield at, committed
        if not faults.has_failed:
            return
        at += 1


@pytest.mark.parametrize("killed", [True, False])
def test_a_local_writer_may_fail_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    number = 0

    def attempt(faults: Faults) -> Storage:
        nonlocal number
        number += 1
        monkeypatch.setattr(local_storage, "os", os)
        checkpoint_once(LocalStorage(tmp_path / str(number)), 1)
        monkeypatch.setattr(local_storage, "os", FailingSystem(faults))
        return LocalStorage(tmp_path / str(number))

    def fresh() -> Storage:
        monkeypatch.setattr(local_storage, "os", os)
        return LocalStorage(tmp_path / str(number))

    outcomes = dict(every_fault(attempt, fresh, killed=killed))
    assert len(outcomes) > 60
    assert not outcomes[0]
    assert outcomes[max(outcomes)]


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("kind", [FailingFileSystem, UploadingFileSystem])
def test_a_writer_through_fsspec_may_fail_at_every_call(
    monkeypatch: pytest.MonkeyPatch, killed: bool, kind: type[FailingFileSystem]
) -> None:
    number = 0

    def storage_with(faults: Faults) -> Storage:
        monkeypatch.setattr(kind, "faults", faults)
        root = f"/{kind.__name__}-{killed}/{number}"
        return RemoteStorage(kind(), root, f"{kind.protocol}:/{root}")

    def attempt(faults: Faults) -> Storage:
        nonlocal number
        number += 1
        checkpoint_once(storage_with(Faults()), 1)
        return storage_with(faults)

    outcomes = dict(every_fault(attempt, lambda: storage_with(Faults()), killed=killed))
    assert len(outcomes) > 40
    assert not outcomes[0]
    assert outcomes[max(outcomes)]


def test_a_checkpoint_that_gets_no_thread_fails_and_the_next_one_is_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoint_once(storage, 1)
    no_room = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with no_room, HashPool(1) as pool, pytest.raises(StorageFailed, match="raise ulimit -u"):
        pool.digests([memoryview(bytes(1 << 20))])
    with no_room, pytest.raises(StorageFailed, match="raise ulimit -u"):
        verify(storage, 1)
    check_recovery(storage)


def test_a_file_system_that_shows_files_and_never_replaces_will_do() -> None:
    """HDFS by a stand-in: the way of working is tested, HDFS is not."""
    storage = RemoteStorage(RenamingFileSystem(), "/place", "renaming://place")
    for version in (1, 2, 2):
        checkpoint_once(storage, version)
        assert check_after(storage, at_least=version) == version
    check_recovery(storage)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_file_stays_where_the_one_in_its_place_can_not_be_renamed(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    storage = RemoteStorage(RenamingFileSystem(), f"/stays-{failing}", "renaming://stays")
    write_all(storage, "x", b"old")
    calls = 0
    rename = RenamingFileSystem.mv

    def mv(system: RenamingFileSystem, path: str, to: str, **named: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + failing:  # the first one finds that there is a file
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(system, path, to, **named)

    monkeypatch.setattr(RenamingFileSystem, "mv", mv)
    with pytest.raises(StorageFailed, match="could not be written"):
        write_all(storage, "x", b"new")
    assert read_all(storage, "x", at_most=9) == b"old"
    write_all(storage, "x", b"new")
    assert read_all(storage, "x", at_most=9) == b"new"
    assert [entry.name for entry in storage.entries("")] == ["x"]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that can't bring folders to the disk."""
    fsync = os.fsync

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def sync_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "fsync", sync_files)
    storage = LocalStorage(tmp_path / "place")
    checkpoint_once(storage, 1)
    assert check_after(storage, at_least=1) == 1
    assert not storage.claim("owner.json", b"another")
    assert [entry.name for entry in storage.entries("")] == ["owner.json", "v000000000001"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    checkpoint_once(storage, 1)
    write_two(LocalStorage(tmp_path / "elsewhere"))
    needed = sum(path.stat().st_size for path in (tmp_path / "elsewhere").rglob("shard-*"))
    for room in (0, 1, 100, needed // 2, needed - 1):
        monkeypatch.setattr(local_storage, "os", FailingSystem(Faults(), disk_bytes=room))
        with pytest.raises(StorageFailed, match=r"could not be written: No space left on device; free space there"):
            write_two(storage)
        monkeypatch.setattr(local_storage, "os", os)
        assert not list(tmp_path.rglob("*.partial"))
        check_after(storage, at_least=1)
    check_recovery(storage)


def write_two(storage: Storage) -> None:
    model = model_of(2)
    with HashPool(1) as pool:
        for index, keys in enumerate(model.keys_on(2)):
            write_shard(storage, model, keys, shard_state(model, index, 2), pool=pool, attempt="a")


def test_what_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system's error number, of each kind."""
    for number, advice in ((errno.EACCES, "give this user the right"), (errno.EROFS, "choose a URL")):
        monkeypatch.setattr(local_storage, "os", FailingSystem(Faults(0, error=number)))
        with pytest.raises(StorageFailed, match=rf"{tmp_path}.*{os.strerror(number)}; {advice}") as caught:
            write_two(LocalStorage(tmp_path))
        assert caught.value.details["file"]


NOBODY = 65534


def test_a_folder_without_the_right_to_it_is_refused(tmp_path: Path) -> None:
    """In a child that is nobody: root may write anywhere."""
    tmp_path.chmod(0o500)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            write_all(LocalStorage(tmp_path), "v000000000001/x", b"x")
        except StorageFailed as error:
            os.write(writing, error.message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as told:
        assert "Permission denied; give this user the right to it, or choose another URL" in told.read()


WRITER = """
import sys
from psstore.checkpoint.local_storage import LocalStorage
from tests.checkpoint.test_faults import checkpoint_once
version = int(sys.argv[2])
while True:
    checkpoint_once(LocalStorage(sys.argv[1]), version, keep=2)
    print(version, flush=True)
    version += 1
"""


def test_a_killed_writer_leaves_a_complete_checkpoint(tmp_path: Path, repository: Path) -> None:
    told = 0
    for num_checkpoints in (1, 2, 3, 5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(told + 1)], stdout=subprocess.PIPE, cwd=repository
        ) as writer:
            assert writer.stdout is not None
            for _ in range(num_checkpoints):
                told = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)  # somewhere in the next one
        latest = check_after(LocalStorage(tmp_path), at_least=told)
        told = latest
