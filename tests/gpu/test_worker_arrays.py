"""Arrays on a GPU are pushed and pulled in the order of their streams, and a model there trains as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal

import psstore
import psstore.cuda
from psstore.client.store import Store
from tests.gpu.models import assert_same, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not psstore.cuda.is_available(), reason="psstore can use no CUDA device here"),
]

LATE_CYCLES = 50_000_000
"""What keeps a stream busy for some ten milliseconds, so that what is queued after it is late."""


@pytest.fixture
def store() -> Iterator[Store]:
    with psstore.connect("local://?shards=2") as store:
        yield store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_of_a_stream_that_is_late_are_pushed_and_pulled(store: Store, dtype: torch.dtype) -> None:
    value = torch.randn(3, 1_000_003, dtype=torch.float64).to(dtype)
    store.create("w", torch.zeros(value.shape, dtype=dtype))
    out = torch.full_like(value, torch.nan, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        made = torch.full_like(value, torch.nan, device="cuda")
        ready = value.pin_memory()
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        made.copy_(ready, non_blocking=True)
        store.push("w", made)
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        assert store.pull("w", out=out) is out
        copied = out.clone()
    torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), value)


def test_a_view_with_gaps_is_pushed_and_pulled(store: Store) -> None:
    value = torch.randn(300, 200, device="cuda")
    store.create("w", torch.zeros(200, 300))
    store.push("w", value.t())
    out = torch.zeros(300, 200, device="cuda")
    store.pull("w", out=out.t())
    assert torch.equal(out, value)


def test_cupy_arrays_are_pushed_and_pulled(store: Store) -> None:
    cupy: Any = pytest.importorskip("cupy")
    value = cupy.random.standard_normal((3, 100_000), dtype=cupy.float32)
    store.create("w", value * 0)
    with cupy.cuda.Stream(non_blocking=True):
        made = value * 2
        store.push("w", made)
        out = cupy.empty_like(value)
        store.pull("w", out=out)
        doubled = out * 1
        cupy.cuda.get_current_stream().synchronize()
    assert_array_equal(doubled.get(), (value * 2).get())


@pytest.mark.parametrize("overlap", ["backward", "none", "eager"])
def test_a_model_trains_as_one_whose_gradients_come_from_main_memory(overlap: Any) -> None:
    assert_same(train(overlap, through_main_memory=False), train(overlap, through_main_memory=True))


@pytest.mark.parametrize("compression", ["bf16", "int8", "sign", "push=topk:0.05,pull=bf16"])
def test_a_model_whose_gradients_are_encoded_on_the_gpu_trains_as_one_whose_are_not(compression: str) -> None:
    assert_same(
        train("backward", through_main_memory=False, compression=compression),
        train("backward", through_main_memory=True, compression=compression),
    )
