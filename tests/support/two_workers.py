"""Programs of two workers, as processes: under torchrun with DistributedDataParallel, and under `psstore run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

RUN_S = 300.0
"""How long a run may take on a machine that does much else: two workers import torch and a framework."""

DDP = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STORE = ("-m", "psstore.cli.main", "run", "--shards", "2", "--workers", "2")


def run(launcher: tuple[str, ...], script: Path, folder: Path, **environ: str) -> str:
    """What it prints, on CPUs."""
    folder.mkdir()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PSSTORE_")}
    told = {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        env={**inherited, **told, "CUDA_VISIBLE_DEVICES": "", **environ},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_same_weights(ddp: Path, store: Path, *, close: float) -> None:
    """Of what each rank of a run has saved in its folder, as RANK.pt."""
    expected, found, other = (torch.load(path) for path in (ddp / "0.pt", store / "0.pt", store / "1.pt"))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, other[name]), "the workers differ"
        assert (value - expected[name]).abs().max() <= close, f"{name}: {(value - expected[name]).abs().max()}"
