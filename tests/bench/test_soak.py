"""The soak: its line through what shards hold, and a short run."""

from __future__ import annotations

import argparse

import pytest
from bench import soak
from bench.soak import Sample

from tests.support.cluster import MAY_FORK

pytestmark = pytest.mark.one_loop

MIB = 1024


def test_a_line_is_laid_through_the_samples() -> None:
    samples = [
        Sample(seconds=60.0 * minute, lives=200 * minute, anonymous=20 * MIB + 2 * MIB * minute, shared=5 * MIB)
        for minute in range(5)
    ]
    assert soak.rows(1, samples) == [
        ["1", "anonymous", "20.00", "28.00", "10.00", "120.00"],
        ["1", "shared", "5.00", "5.00", "0.00", "0.00"],
    ]


def test_a_single_sample_has_no_slope() -> None:
    assert soak.slope([3.0], [5.0]) == 0.0


@pytest.mark.sockets
@pytest.mark.filterwarnings(MAY_FORK)
def test_a_short_soak_looks_at_every_shard_and_loses_no_life() -> None:
    report = soak.soak(argparse.Namespace(quick=False, minutes=0.05, mode="async"))
    assert [row[:2] for row in report.tables[0].rows] == [
        [shard, kind] for shard in "01" for kind in ("anonymous", "shared")
    ]
    assert all(float(str(row[2])) > 1.0 for row in report.tables[0].rows)
    assert ", 0 of which failed" in report.about
    assert report.notes == ["no line: that needs more than 256 lives, and some time after them"]
