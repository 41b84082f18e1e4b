"""What a shard does in one turn of its event loop: nothing that a request brings waits for the loop to come round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.counted_shard import PARTS, shards_end

from tests.support.python_forkserver import end_forkserver

pytestmark = pytest.mark.sockets


@pytest.fixture(scope="module", autouse=True)
def ended_fork_server(loop_name: str) -> Iterator[None]:
    """It would outlive the tests, and serve under the loop that it began with."""
    yield
    end_forkserver()


def test_server_ends_a_commit_in_the_turn_that_it_came_in() -> None:
    """The decision is applied by then, and the next request waited for: a pull does not find the loop on its way."""
    with shards_end(1, 4) as end:
        for part in PARTS:
            with end.asked(part):
                end.loop.turn(end.loop.poll(None))
                assert not end.loop.has_ready(), f"a {part} left something for another turn"
