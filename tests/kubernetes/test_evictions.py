"""What is rendered, run by a stand-in of a cluster: a training whose pods are evicted ends as if they had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes.node import why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.sockets,
    pytest.mark.one_loop,
    pytest.mark.timeout(300),
]

LOOSE_S = 30.0
"""What a worker may wait here, beside other tests; python -m tests.kubernetes says 3."""


def evicted(repository: Path, *flags: str) -> str:
    """In a process of its own, which belongs to a network of its own from then on."""
    command = [sys.executable, "-m", "tests.kubernetes", "--most-s", str(LOOSE_S), *flags]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_store_with_standbys_loses_no_step_to_evictions(repository: Path) -> None:
    told = evicted(repository, "--evictions", "4")
    assert "2 workers end with the bytes of the undisturbed training" in told
    assert "4 × eviction of a shard" in told


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--evictions", "4", "--rolling-updates", "1", "--crash-share", "0.5"),
        ("--evictions", "3", "--worker-share", "1"),
        ("--evictions", "2", "--checkpoints"),
    ],
    ids=["crashes and an update", "workers", "checkpoints"],
)
def test_a_training_ends_as_if_nothing_had_been_done_to_its_pods(flags: tuple[str, ...], repository: Path) -> None:
    evicted(repository, *flags)
