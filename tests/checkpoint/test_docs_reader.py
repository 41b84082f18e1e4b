"""The page says all that a reader needs: one that knows nothing else reads what psstore wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from psstore.checkpoint.hash_pool import HashPool
from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.worker_file import WorkerPart, write_worker_file
from psstore.checkpoint.writer import commit
from psstore.types import slice_index
from tests.checkpoint.docs_reader import read_file, read_manifest, read_tensors
from tests.checkpoint.support import make_model, specs_of_every_rule, write_model


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_the_page_is_enough_to_read_a_checkpoint(tmp_path: Path, num_shards: int, whole: bool) -> None:
    model = make_model(specs_of_every_rule(), whole=whole)
    write_model(LocalStorage(tmp_path), model, num_shards)
    expected: dict[str, dict[str, bytearray]] = {}
    for key, parts in model.parts.items():
        tensor = model.tensor(key)
        total = sum(map(tensor.slice_bytes, range(tensor.num_slices)))
        begin = slice_index(key) * tensor.slice_bytes(0)
        for part, content in parts.items():
            name = tensor.part_names[part]
            array = expected.setdefault(tensor.spec.name, {}).setdefault(name, bytearray(total))
            array[begin : begin + len(content)] = content
    assert read_tensors(tmp_path / "v000000001234") == expected


def test_the_page_is_enough_to_read_what_a_worker_handed_in(tmp_path: Path) -> None:
    storage, model = LocalStorage(tmp_path), make_model([])
    shards = write_model(storage, model, 1).files
    with HashPool(1) as pool:
        handed = {"epoch": 3, 0: (1.5, b"ab")}
        part = WorkerPart(rank=2, incarnation=5, version=1234, handed=handed)
        record = write_worker_file(storage, part, version=1234, attempt="a", pool=pool)
    commit(storage, attempt="a", store=model.state, files=[*shards, record])
    folder = tmp_path / "v000000001234"
    (found,) = (one for one in read_manifest(folder)["files"] if one["kind"] == "worker")
    metadata, arrays = read_file(folder, found)
    assert metadata["worker"] == (
        '{"rank":2,"incarnation":5,"version":1234,"num_arrays":1,'
        '"handed":{"map":[["epoch",3],[0,{"tuple":[1.5,{"bytes":0}]}]]}}'
    )
    assert arrays == {"array/0": ("U8", [2], b"ab")}
