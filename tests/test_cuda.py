"""What holds of CUDA on any machine: the extension loads without a driver and says what there is."""

from __future__ import annotations

import pytest

import psstore.cuda
from psstore import _core, errors
from psstore.hyper import HYPER_DEFAULTS


def test_availability_is_an_answer_and_not_an_error() -> None:
    assert psstore.cuda.is_available() == (psstore.cuda.device_count() > 0)
    assert psstore.cuda.is_built() or not psstore.cuda.is_available()


@pytest.mark.skipif(psstore.cuda.is_available(), reason="there is a CUDA device here")
def test_a_cuda_call_without_a_device_says_what_is_missing() -> None:
    with pytest.raises(errors.InternalError, match="no CUDA"):
        _core.cuda_reduce_sgd(
            HYPER_DEFAULTS["sgd"],
            value=bytearray(16),
            momentum_buffer=None,
            contributions=[],
            divisor=1.0,
            first_step=True,
        )
