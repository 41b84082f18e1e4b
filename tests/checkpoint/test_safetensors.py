"""Files of a checkpoint are safetensors to the library of that name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from psstore.checkpoint.local_storage import LocalStorage
from psstore.types import TensorSpec
from tests.checkpoint.support import Model, make_model, specs_of_every_rule, write_model

safetensors = pytest.importorskip("safetensors")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def whole(model: Model, name: str, part: int) -> bytes:
    (tensor,) = (tensor for tensor in model.state.tensors if tensor.spec.name == name)
    return b"".join(model.parts[tensor.key(index)][part] for index in range(tensor.num_slices))


def test_the_library_reads_what_a_shard_wrote(tmp_path: Path) -> None:
    model = make_model(specs_of_every_rule(), whole=True)
    write_model(LocalStorage(tmp_path), model, 1)
    (file,) = files_of(tmp_path)
    with safetensors.safe_open(file, framework="numpy") as found:
        assert json.loads(found.metadata()["shard"])["version"] == 1234
        arrays = {name: found.get_tensor(name) for name in found.keys()}
    for tensor in model.state.tensors:
        for part, name in enumerate(tensor.part_names):
            if tensor.num_slices:
                array = arrays.pop(f"{name}/{tensor.spec.name}")
                assert array.shape == tensor.spec.shape
                assert array.dtype == np.dtype(tensor.spec.dtype)
                assert array.tobytes() == whole(model, tensor.spec.name, part)
    assert set(arrays) == {"slots", "hashes"}
    assert arrays["slots"].tolist() == [list(model.slots[key]) for key in sorted(model.slots)]


def test_the_library_reads_a_part_of_a_tensor_as_a_flat_array(tmp_path: Path) -> None:
    model = make_model([TensorSpec(name="w", shape=(4, 96), rule="sgd", zeros=False)], whole=True)
    write_model(LocalStorage(tmp_path), model, 2)
    sizes = []
    for file in files_of(tmp_path):
        with safetensors.safe_open(file, framework="pt") as found:
            sizes.append(tuple(found.get_slice("momentum_buffer/w").get_shape()))
            assert found.get_tensor("value/w").numel() == sizes[-1][0]
    assert sizes == [(256,), (128,)]


def test_names_that_look_like_state_are_no_state(tmp_path: Path) -> None:
    specs = [TensorSpec(name=name, shape=(2,), rule="sgd") for name in ("w", "value/w", "momentum_buffer/w", "slots")]
    write_model(LocalStorage(tmp_path), make_model(specs, whole=True), 1)
    with safetensors.safe_open(files_of(tmp_path)[0], framework="numpy") as found:
        assert len(found.keys()) == 2 + 2 * len(specs)
