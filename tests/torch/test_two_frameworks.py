"""Two workers of a framework, with the lines of docs/pytorch.md, end with DDP's weights, and have logged and saved what
they do under DDP: also where the framework clips. In processes, since frameworks keep singletons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch import framework_worker

RUN_S = 110.0

DDP = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STORE = ("-m", "psstore.cli.main", "run", "--shards", "2", "--workers", "2")

CLOSE = 1e-6
"""torch sums the squares of a norm in float32, the store in float64: their factors differ by some 1e-7 of it."""

PACKAGES = {"plain": "torch", "accelerate": "accelerate", "lightning": "lightning", "huggingface": "transformers"}


def run(framework: str, folder: Path, launcher: tuple[str, ...], transport: str) -> str:
    folder.mkdir()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PSSTORE_")}
    environ |= {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environ |= {"PSSTORE_TRANSPORT": transport} if transport else {}
    command = [sys.executable, *launcher, str(Path(framework_worker.__file__)), framework]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def saved(folder: Path) -> list[str]:
    """Files of the framework's own."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "output").rglob("*"))


def assert_as_under_ddp(framework: str, transport: str, folder: Path) -> None:
    outputs = [run(framework, folder / "ddp", DDP, ""), run(framework, folder / "store", STORE, transport)]
    by_rank = [[torch.load(folder / name / f"{rank}.pt") for rank in (0, 1)] for name in ("ddp", "store")]
    (expected, _), (found, other) = by_rank
    for name, value in found.items():
        assert torch.equal(value, other[name]), "the workers differ"
        assert (value - expected[name]).abs().max() <= CLOSE, f"{name}: {(value - expected[name]).abs().max()}"
    norms = [sorted(map(float, re.findall(r"norm ([\d.]+)", output))) for output in outputs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "norms that are shown are the average's"
    assert saved(folder / "store") == saved(folder / "ddp")
    logged = [len(re.findall(r"logged|'loss'", output)) for output in outputs]
    assert logged[0] == logged[1], "rank 0 alone logs"
    if framework != "lightning":  # which has nobody to tell
        assert max(norms[0]) > 2 * framework_worker.MAX_NORM


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("framework", [one for one in PACKAGES if one != "plain"])
def test_two_workers_of_a_framework_train_clip_log_and_save_as_under_ddp(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[framework])
    assert_as_under_ddp(framework, "", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_plain_loop_clips_as_under_ddp_whatever_it_travels_over(transport: str, tmp_path: Path) -> None:
    assert_as_under_ddp("plain", transport, tmp_path)
