"""The data path takes no more instructions than were recorded: a guard against regressions that needs no clock."""

from __future__ import annotations

import pytest
from bench import instructions

pytestmark = pytest.mark.skipif(instructions.why_not() is not None, reason=str(instructions.why_not()))


@pytest.mark.timeout(600)  # valgrind, beside whatever else the machine does
def test_a_push_and_a_pull_take_no_more_instructions_than_recorded() -> None:
    before = instructions.recorded()
    if before is None:
        pytest.skip(f"nothing is recorded for {instructions.kind()}: python -m bench.instructions --record")
    counts = instructions.counted()
    assert counts.keys() == before.keys()
    grown = {part: f"{ratio:.2f} times" for part, ratio in instructions.grown(counts, before).items()}
    assert not grown, "if it has to be so: python -m bench.instructions --record (CONTRIBUTING.md)"


def test_instructions_that_grow_beyond_the_margin_are_named() -> None:
    before = {"push": 1000, "pull": 1000, "commit": 1000}
    counts = {"push": 1000 + int(1000 * instructions.MARGIN), "pull": 1100, "commit": 10, "new": 1}
    assert instructions.grown(counts, before) == {"pull": 1.1}
