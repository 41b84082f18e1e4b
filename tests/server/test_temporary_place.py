"""Where a store is written down on its way to another number of shards, and what is left of it by the dead."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from psstore.checkpoint.local_storage import LocalStorage
from psstore.server import temporary_place
from psstore.server.temporary_place import TemporaryPlace, sweep
from psstore.types import TensorSpec
from tests.checkpoint.support import make_model, write_model

MODEL = make_model([TensorSpec(name="w", shape=(300,), rule="sgd")], decision=3)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(temporary_place, "MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))
    return tmp_path


def left(place: TemporaryPlace) -> Path:
    """As by a process that was killed: its lock is gone."""
    os.close(place._lock)
    return place.path


def test_a_store_begins_where_no_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    sweep()


def test_what_is_in_use_stays() -> None:
    place = TemporaryPlace(1)
    sweep()
    assert place.path.is_dir()
    place.remove()
    assert not place.path.exists()


def test_what_is_left_and_not_whole_is_removed() -> None:
    empty, begun = left(TemporaryPlace(1)), left(TemporaryPlace(1))
    write_model(LocalStorage(begun), MODEL, 2)
    (begun / "v000000000003" / "manifest.json").unlink()
    sweep()
    assert not empty.exists()
    assert not begun.exists()


def test_what_is_left_and_whole_stays_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    whole = left(TemporaryPlace(1))
    write_model(LocalStorage(whole), MODEL, 2)
    with caplog.at_level(logging.WARNING):
        sweep()
    assert f"--restore {whole}" in caplog.text
    next((whole / "v000000000003").glob("shard-*")).unlink()
    sweep()
    assert not whole.exists()


def test_what_is_not_its_own_is_left_alone(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (memory / "psstore-reshard-link").symlink_to(elsewhere)
    (memory / "psstore-reshard-file").touch()
    (memory / "another").mkdir()
    sweep()
    assert (elsewhere / "file").exists()
    assert {one.name for one in memory.iterdir()} == {"psstore-reshard-link", "psstore-reshard-file", "another"}


def test_one_that_is_swept_before_it_is_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[..., str] = tempfile.mkdtemp
    made: list[str] = []

    def make_and_lose(**arguments: object) -> str:
        made.append(make(**arguments))
        if len(made) == 1:
            sweep()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    place = TemporaryPlace(1)
    assert place.path.is_dir()
    assert len(made) == 2
