"""Conversions and encodings on a GPU give the processor's bytes."""

from __future__ import annotations

import pytest

from tests.gpu.support import ENCODED, SIZES, Engine, check_codec, check_conversions, on_a_gpu

pytestmark = on_a_gpu

GPU = Engine("cuda:0")

LARGE = 3_000_017
"""Many blocks of threads, and no multiple of anything."""


@pytest.mark.parametrize("num_elems", [*SIZES, LARGE])
def test_gpu_converts_as_the_processor_does(num_elems: int) -> None:
    check_conversions(GPU, num_elems)


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("num_elems", [*SIZES, LARGE])
@pytest.mark.parametrize("encoding", ENCODED)
def test_gpu_encodes_as_the_processor_does(encoding: str, num_elems: int, with_residual: bool, special: bool) -> None:
    check_codec(GPU, encoding, num_elems, special=special, with_residual=with_residual)


@pytest.mark.sanitized
@pytest.mark.parametrize("encoding", ENCODED)
def test_gpu_encodes_a_few_blocks(encoding: str) -> None:
    check_codec(GPU, encoding, 4099, special=False, with_residual=True)
