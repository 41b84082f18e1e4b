"""A few kills of what `python -m tests.learners` does for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learners.run import Plan, run
from tests.support.python_forkserver import end_forkserver


@pytest.fixture(autouse=True)
def forks() -> Iterator[None]:
    """The process that forks learners ends with the test."""
    yield
    end_forkserver()


@pytest.mark.sockets
@pytest.mark.one_loop
def test_each_contribution_counts_once_whoever_is_killed() -> None:
    plan = Plan(seed=3, kills=5, num_learners=3, fragments=4, between_kills_s=0.2, shard_share=0.3)
    result = run(plan, print)
    assert not result.account.lost
    assert not result.account.doubled
    assert result.account.acknowledged > result.account.unanswered > 0
    assert result.shard_kills > 0
