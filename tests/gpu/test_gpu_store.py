"""A store whose shards live on a GPU takes the same steps as one in main memory, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from bench.processes import store_server

import psstore
from psstore import errors
from tests.gpu.rounds import after_rounds, assert_same_bits
from tests.gpu.support import on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["plain", "clipped"])
def test_gpu_shards_train_as_those_in_main_memory_do(shards: int, max_norm: float | None) -> None:
    assert_same_bits(
        after_rounds("cuda:0", shards=shards, max_norm=max_norm), after_rounds("cpu", shards=shards, max_norm=max_norm)
    )


def test_gpu_shards_can_be_served_by_processes() -> None:
    value = np.arange(300_000, dtype=np.float32)
    with (
        store_server("unix", 2, options=["--device", "cuda:0"]) as url,
        psstore.connect(url, rank=0) as store,
    ):
        store.create("w", value, rule="sgd")
        store.push("w", np.ones_like(value))
        store.commit({"lr": 0.5})
        np.testing.assert_array_equal(store.pull("w"), value - 0.5)


def test_gpu_shards_refuse_what_does_not_fit_and_go_on() -> None:
    with psstore.connect("local://?device=cuda:0") as store:
        with pytest.raises(errors.OutOfMemory, match="cuda:0"):
            store.create("far too large", shape=(1 << 36,), rule="sgd")
        store.create("small", np.zeros(10, np.float32), rule="sgd")
        assert store.pull("small").tolist() == [0.0] * 10
