"""Many pieces go between a GPU and the host, and among its memory, as they are."""

from __future__ import annotations

import pytest

from tests.gpu.copies import check_pieces
from tests.gpu.support import Engine, on_a_gpu

pytestmark = on_a_gpu

GPU = Engine("cuda:0")


@pytest.mark.parametrize(
    ("num_pieces", "most_bytes"), [(1, 100_000), (300, 40), (300, 20_000), (10_000, 4096), (5, 1 << 20)]
)
def test_gpu_scatters_and_gathers_pieces(num_pieces: int, most_bytes: int) -> None:
    check_pieces(GPU, num_pieces, most_bytes=most_bytes)


@pytest.mark.sanitized
def test_gpu_scatters_and_gathers_a_few_pieces() -> None:
    check_pieces(GPU, 50, most_bytes=20_000)
