"""A checkpoint of N shards, read into M, is what was written: values, rule state, and every record beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.place import UNFINISHED, CheckpointPlace, FoundCheckpoint
from psstore.checkpoint.reader import Checkpoint, verify
from psstore.checkpoint.slots import SlotRecord, SlotTable
from psstore.checkpoint.storage import Storage
from psstore.checkpoint.url import open_storage
from psstore.checkpoint.writer import ShardFileWriter, commit
from psstore.errors import BadArgument, CheckpointDamaged, CheckpointNotFound, InternalError
from psstore.types import TensorSpec
from tests.checkpoint.support import (
    Model,
    make_model,
    read_model,
    read_parts,
    sha256,
    shard_state,
    specs_of_every_rule,
    write_model,
    write_shard,
)

SHARDS = (1, 2, 3, 4, 7, 8)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(specs_of_every_rule())


@pytest.fixture(scope="module")
def storages(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[int, LocalStorage]:
    """A checkpoint of each number of shards."""
    made = {count: LocalStorage(tmp_path_factory.mktemp(f"by_{count}")) for count in SHARDS}
    for count, storage in made.items():
        write_model(storage, model, count)
    return made


@pytest.mark.parametrize("readers", SHARDS)
@pytest.mark.parametrize("writers", SHARDS)
def test_what_n_shards_wrote_m_shards_read(
    storages: dict[int, LocalStorage], model: Model, writers: int, readers: int
) -> None:
    with Checkpoint(storages[writers], 1234) as checkpoint:
        assert len(checkpoint.shards) == writers
        assert sha256(read_model(checkpoint, readers)) == sha256(model)


@pytest.mark.parametrize("writers", SHARDS)
def test_records_come_back_as_they_were(storages: dict[int, LocalStorage], model: Model, writers: int) -> None:
    with Checkpoint(storages[writers], 1234) as checkpoint:
        assert checkpoint.store == model.state
        states = [shard.state for shard in checkpoint.shards]
        assert states == [shard_state(model, index, writers) for index in range(writers)]


def test_equal_stores_give_equal_bytes(storages: dict[int, LocalStorage], model: Model, tmp_path: Path) -> None:
    write_model(LocalStorage(tmp_path), model, 4)
    for path in sorted(tmp_path.rglob("*.*")):
        assert path.read_bytes() == (storages[4].root / path.relative_to(tmp_path)).read_bytes()


def test_verify_reads_every_byte(storages: dict[int, LocalStorage]) -> None:
    seen: list[int] = []
    manifest = verify(storages[3], 1234, progress=seen.append)
    with Checkpoint(storages[3], 1234) as checkpoint:
        beside = sum(checkpoint.file(one).bounds(0)[1] + 40 * len(checkpoint.file(one)) for one in manifest.files)
    assert sum(seen) + beside == manifest.num_bytes


def test_only_the_slices_asked_for_are_read(storages: dict[int, LocalStorage], model: Model) -> None:
    keys = frozenset(list(model.slots)[5:9])
    with Checkpoint(storages[2], 1234) as checkpoint:
        assert read_parts(checkpoint, keys) == {key: model.parts[key] for key in keys if model.parts[key]}
        assert read_parts(checkpoint, frozenset()) == {}


def test_memory_of_another_size_is_refused(storages: dict[int, LocalStorage]) -> None:
    with Checkpoint(storages[2], 1234) as checkpoint, pytest.raises(BadArgument, match="memory of 3 bytes for a piece"):
        list(checkpoint.read(None, lambda slot, part, num_bytes: memoryview(bytearray(3))))


def test_a_store_without_tensors_has_a_checkpoint(tmp_path: Path) -> None:
    model = make_model([])
    write_model(LocalStorage(tmp_path), model, 2)
    verify(LocalStorage(tmp_path), 1234)
    with Checkpoint(LocalStorage(tmp_path), 1234) as checkpoint:
        assert read_model(checkpoint, 3) == model


def test_large_slices_are_read_in_batches(tmp_path: Path) -> None:
    model = make_model(specs_of_every_rule(elems=400_000)[:6], slice_elems=1 << 16)
    write_model(LocalStorage(tmp_path), model, 2)
    with Checkpoint(LocalStorage(tmp_path), 1234) as checkpoint:
        assert sha256(read_model(checkpoint, 1)) == sha256(model)


@pytest.mark.parametrize("place", ["", "file://", "local://"])
def test_a_place_is_a_folder_or_a_url(tmp_path: Path, place: str) -> None:
    storage = open_storage(f"{place}{tmp_path}/new/folders")
    assert isinstance(storage, LocalStorage)
    write_model(storage, make_model([]), 1)
    assert (tmp_path / "new" / "folders" / "v000000001234" / "manifest.json").is_file()


def test_fsspec_opens_what_is_not_local(model: Model) -> None:
    storage: Storage = open_storage("memory://round_trip/place")
    write_model(storage, model, 3)
    with Checkpoint(storage, 1234) as checkpoint:
        assert sha256(read_model(checkpoint, 2)) == sha256(model)
    verify(storage, 1234)


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path, model: Model) -> None:
    storage = LocalStorage(tmp_path)
    write_model(storage, model, 2)
    (tmp_path / "v000000001234" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"version 1234.*manifest\.json is not there"):
        Checkpoint(storage, 1234)


def test_a_commit_needs_every_file_as_it_was_written(tmp_path: Path, model: Model) -> None:
    storage = LocalStorage(tmp_path)
    files = write_model(storage, model, 2).files
    with pytest.raises(InternalError, match="shards"):
        commit(storage, attempt="x", store=model.state, files=files[1:])
    (tmp_path / "v000000001234" / files[1].name).write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=f"{files[1].name} has 0 bytes"):
        commit(storage, attempt="x", store=model.state, files=files)


def test_a_commit_of_what_could_not_be_read_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    twice = make_model([TensorSpec(name="w", shape=(2,))] * 2)
    for model, attempt in ((twice, "a"), (make_model([]), "../a")):
        with pytest.raises(InternalError, match=r"can't be a checkpoint|two entries"):
            write_model(storage, model, 1, attempt=attempt)
    assert CheckpointPlace(storage).list() == [FoundCheckpoint(1234, UNFINISHED)]


@pytest.mark.parametrize("url", ["", "memory://side_by_side"])
def test_shards_write_side_by_side(tmp_path: Path, url: str, model: Model) -> None:
    storage = open_storage(url or str(tmp_path))
    states = [shard_state(model, index, 4) for index in range(4)]
    with HashPool(2) as pool, ThreadPoolExecutor(4) as threads:
        writing = [
            threads.submit(write_shard, storage, model, keys, state, pool=pool, attempt="a")
            for keys, state in zip(model.keys_on(4), states, strict=True)
        ]
        commit(storage, attempt="a", store=model.state, files=[one.result() for one in writing])
    verify(storage, 1234)
    with Checkpoint(storage, 1234) as checkpoint:
        assert sha256(read_model(checkpoint, 2)) == sha256(model)


def test_a_writer_takes_only_what_comes_next(tmp_path: Path, model: Model) -> None:
    table = SlotTable.of(model.slots.values())
    with (
        HashPool(1) as pool,
        ShardFileWriter(
            LocalStorage(tmp_path),
            attempt="a",
            state=shard_state(model, 0, 1),
            tensors=model.state.tensors,
            table=table,
            pool=pool,
        ) as writer,
    ):
        with pytest.raises(InternalError, match="pieces of"):
            writer.write([memoryview(bytes(writer.pieces[0].num_bytes + 1))])
        with pytest.raises(InternalError, match=r"1 of \d+ pieces were written"):
            writer.finish()
    assert not list(tmp_path.rglob("*shard*"))


def test_slots_are_sorted_and_unique() -> None:
    slots = [SlotRecord(7, 1, 2, 1), SlotRecord(3, 4, 5, 0)]
    table = SlotTable.of(slots)
    assert list(table) == sorted(slots)
    assert table[1] == slots[0]
    with pytest.raises(ValueError, match="ascending"):
        SlotTable.of([slots[0], slots[0]])
