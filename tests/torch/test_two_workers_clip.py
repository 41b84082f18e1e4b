"""Two workers that clip with torch's function end with DDP's weights, whatever gradients travel over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.two_workers import DDP, RUN_S, STORE, assert_same_weights, run
from tests.torch import clipping_worker

CLOSE = 1e-6
"""torch sums the squares of a norm in float32, the store in float64: their factors differ by some 1e-7 of it."""


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_plain_loop_clips_as_under_ddp_whatever_it_travels_over(transport: str, tmp_path: Path) -> None:
    script = Path(clipping_worker.__file__)
    outputs = [
        run(DDP, script, tmp_path / "ddp"),
        run(STORE, script, tmp_path / "store", PSSTORE_TRANSPORT=transport),
    ]
    assert_same_weights(tmp_path / "ddp", tmp_path / "store", close=CLOSE)
    norms = [sorted(map(float, re.findall(r"norm ([\d.]+)", output))) for output in outputs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "norms that are shown are the average's"
    assert max(norms[0]) > 2 * clipping_worker.MAX_NORM
