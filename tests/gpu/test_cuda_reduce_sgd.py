"""The CUDA kernel gives the CPU kernels' bytes. Skipped without a device: `pytest -m gpu` runs these alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import psstore.cuda
from psstore import _core
from psstore.hyper import HYPER_DEFAULTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not psstore.cuda.is_built(), reason="this build of psstore has no CUDA kernels"),
    pytest.mark.skipif(not psstore.cuda.is_available(), reason="no CUDA device can be used here"),
]

Floats = npt.NDArray[np.float32]

OPTIONS: list[dict[str, float]] = [
    {},
    {"weight_decay": 0.03, "maximize": 1.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.03},
    {"momentum": 0.9, "nesterov": 1.0},
]


def on_cpu(hyper: dict[str, float], value: Floats, buffer: Floats, grads: list[Floats], *, first_step: bool) -> None:
    dtype = _core.DTYPES["float32"]
    _core.reduce_update(
        _core.RULES["sgd"],
        hyper,
        step=1,
        value=value.data,
        state={"momentum_buffer": buffer.data},
        contributions=[(grad.data, dtype, 0.5 + k) for k, grad in enumerate(grads)],
        divisor=3.0,
        dtype=dtype,
        first={"momentum_buffer": first_step},
    )


def on_gpu(hyper: dict[str, float], value: Floats, buffer: Floats, grads: list[Floats], *, first_step: bool) -> None:
    _core.cuda_reduce_sgd(
        hyper,
        value=value.data,
        momentum_buffer=buffer.data if hyper["momentum"] else None,
        contributions=[(grad.data, 0.5 + k) for k, grad in enumerate(grads)],
        divisor=3.0,
        first_step=first_step,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("num_workers", [1, 3, 8])
@pytest.mark.parametrize("num_elems", [0, 1, 255, 257, 100_003, 2_000_003])
def test_cuda_equals_the_cpu_bit_for_bit(num_elems: int, num_workers: int, options: dict[str, float]) -> None:
    hyper = {**HYPER_DEFAULTS["sgd"], **options}
    random = np.random.default_rng(0)
    value = random.standard_normal(num_elems).astype(np.float32)
    ours, theirs = (value.copy(), np.zeros_like(value)), (value.copy(), np.zeros_like(value))
    for step in range(5):
        grads = [random.standard_normal(num_elems).astype(np.float32) for _ in range(num_workers)]
        on_gpu(hyper, *ours, grads, first_step=step == 0)
        on_cpu(hyper, *theirs, grads, first_step=step == 0)
    assert ours[0].tobytes() == theirs[0].tobytes()
    assert ours[1].tobytes() == theirs[1].tobytes()
