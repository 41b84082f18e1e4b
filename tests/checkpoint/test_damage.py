"""Damaged checkpoints are refused, whatever happened to them, with the name of the file: by `verify` and by reading.

pytest tests/checkpoint/test_damage.py --damages 10000
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.nested import as_plain_array
from psstore.checkpoint.reader import Checkpoint, verify
from psstore.checkpoint.shard_reader import ReadSlice
from psstore.checkpoint.worker_file import WorkerPart, write_worker_file
from psstore.checkpoint.writer import commit
from psstore.errors import CheckpointDamaged, CheckpointNotFound, StorageError
from tests.checkpoint.damage import DAMAGES
from tests.checkpoint.support import make_model, read_parts, specs_of_every_rule, write_model

FOLDER = "v000000001234"


def write_run(root: Path, seed: int) -> Path:
    """A checkpoint of three shards and a worker. All seeds give the same names, lengths and layout."""
    storage, model = LocalStorage(root), make_model(specs_of_every_rule(), seed=seed, whole=True)
    shards = write_model(storage, model, 3).files
    part = WorkerPart(
        rank=0, incarnation=1, version=5, handed={"x": as_plain_array(random.Random(seed).randbytes(500))}
    )
    with HashPool(1) as pool:
        worker = write_worker_file(storage, part, version=1234, attempt="0a1b2c3d", pool=pool)
    commit(storage, attempt="0a1b2c3d", store=model.state, files=[*shards, worker], created=1e9)
    return root / FOLDER


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs' checkpoints of the same version and shape."""
    return write_run(tmp_path_factory.mktemp("mine"), 1), write_run(tmp_path_factory.mktemp("other"), 2)


def read_all_of_it(storage: LocalStorage) -> None:
    with Checkpoint(storage, 1234) as checkpoint:
        read_parts(checkpoint, None)
        for rank in checkpoint.ranks:
            checkpoint.worker(rank)


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_found_and_its_file_named(
    runs: tuple[Path, Path], tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    mine, other = runs
    storage = LocalStorage(tmp_path)
    shutil.copytree(mine, tmp_path / FOLDER)
    verify(storage, 1234)
    read_all_of_it(storage)
    for seed in range(-(-request.config.getoption("--damages") // len(DAMAGES))):
        blamed = DAMAGES[name](random.Random(seed), tmp_path / FOLDER, other)
        for look in (lambda: verify(storage, 1234), lambda: read_all_of_it(storage)):
            with pytest.raises(StorageError) as caught:
                look()
            assert isinstance(caught.value, CheckpointDamaged) or (
                isinstance(caught.value, CheckpointNotFound) and blamed == {"manifest.json"}
            )
            assert any(one in caught.value.message for one in blamed), (seed, blamed, caught.value.message)
        for one in mine.iterdir():
            shutil.copyfile(one, tmp_path / FOLDER / one.name)


def test_what_was_verified_before_the_damage_is_right(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A reader that is given some slices and then an error was given the right ones."""
    shutil.copytree(runs[0], tmp_path / FOLDER)
    with Checkpoint(LocalStorage(runs[0].parent), 1234) as checkpoint:
        right = read_parts(checkpoint, None)
    file = sorted((tmp_path / FOLDER).glob("shard-*"))[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    seen: list[ReadSlice] = []
    with Checkpoint(LocalStorage(tmp_path), 1234) as checkpoint:
        reading = checkpoint.read(None, lambda slot, part, num_bytes: memoryview(bytearray(num_bytes)))
        with pytest.raises(CheckpointDamaged, match=file.name):
            seen.extend(reading)
    assert seen
    assert all(bytes(one.target) == right[one.slot.key][one.part] for one in seen)


def test_a_file_may_be_damaged_where_nobody_reads(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Who asks for other slices gets them: a damage elsewhere is for those who read there, and for `verify`."""
    shutil.copytree(runs[0], tmp_path / FOLDER)
    with Checkpoint(LocalStorage(tmp_path), 1234) as checkpoint:
        shard = checkpoint.shards[0]
        first, last = shard.pieces[0].slot.key, shard.pieces[-1].slot.key
        begin, _ = checkpoint.file(checkpoint.manifest.of_kind("shard")[0]).bounds(len(shard.pieces) + 1)
    file = sorted((tmp_path / FOLDER).glob("shard-*"))[0]
    content = bytearray(file.read_bytes())
    content[begin] ^= 1
    file.write_bytes(content)
    with Checkpoint(LocalStorage(tmp_path), 1234) as checkpoint:
        assert read_parts(checkpoint, frozenset([first]))
        with pytest.raises(CheckpointDamaged, match=f"{file.name} is damaged: bytes {begin} to"):
            read_parts(checkpoint, frozenset([last]))
