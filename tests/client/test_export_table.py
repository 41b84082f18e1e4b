"""A table as a file of others' format: ids, rows and rule state, as of one decision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import psstore
from psstore.errors import RuleMismatch, UnknownTensor

safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.one_loop

F32 = np.float32
IDS = np.array([2**64 - 1, 7, 0, 1000], np.uint64)
GRADIENTS = np.arange(12, dtype=F32).reshape(4, 3) + 1


@pytest.mark.parametrize("evict", [None, "lru"])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl"])
def test_the_library_reads_ids_rows_and_state(tmp_path: Path, rule: str, evict: str | None) -> None:
    path = tmp_path / "t.safetensors"
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule=rule, init="normal(0, 1)", max_rows=6400, evict=evict)
        first = store.pull_rows("t", np.sort(IDS)).astype(np.float64)
        store.push_rows("t", IDS, GRADIENTS)
        store.commit({"lr": 0.1})
        store.export_table("t", path)
        rows = store.pull_rows("t", np.sort(IDS))
    found = safetensors.load_file(path)
    gradients = GRADIENTS[np.argsort(IDS)]
    assert_array_equal(found.pop("ids/t"), np.sort(IDS))
    assert_array_equal(found.pop("rows/t"), rows)
    expected = {
        "sgd": {},
        "adagrad": {"sum/t": gradients**2},
        "rowwise_adagrad": {"sum/t": (gradients**2).mean(axis=1, keepdims=True)},
        "adam": {"exp_avg/t": 0.1 * gradients, "exp_avg_sq/t": 0.001 * gradients**2},
        "momentum": {"momentum_buffer/t": gradients},
        "ftrl": {
            "accumulator/t": 0.1 + gradients**2,
            "linear/t": gradients - (np.sqrt(0.1 + gradients**2) - np.sqrt(0.1)) / 0.1 * first,
        },
    }[rule]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert_allclose(found[name], array, rtol=1e-5)


def test_a_table_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule="adam")
        store.export_table("t", tmp_path / "t.safetensors")
    found = safetensors.load_file(tmp_path / "t.safetensors")
    assert {name: array.shape for name, array in found.items()} == {
        "ids/t": (0,),
        "rows/t": (0, 3),
        "exp_avg/t": (0, 3),
        "exp_avg_sq/t": (0, 3),
    }


def test_what_is_no_table_or_no_place_is_refused(tmp_path: Path) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create("w", np.zeros(3, F32), rule="sgd")
        store.create_table("t", dim=3, rule="sgd", group=1)
        with pytest.raises(RuleMismatch, match="no table"):
            store.export_table("w", tmp_path / "w")
        with pytest.raises(UnknownTensor):
            store.export_table("nowhere", tmp_path / "w")
        with pytest.raises(OSError, match="nowhere"):
            store.export_table("t", tmp_path / "nowhere" / "t.safetensors")
