"""What a worker process is told through its environment: pure functions of what the launcher found."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

REJOIN_S = 60.0
"""How long workers wait for one that is started again, unless the user chose it: imports and data take a while."""

TOLD_S = 60.0
"""By how much workers wait longer than the store does for one in a lost one's place: they hear what became of it."""

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""One directory per GPU, made by NVIDIA's kernel driver."""


def worker_environ(
    base: Mapping[str, str],
    *,
    url: str | None,
    rank: int,
    num_workers: int,
    gpus: Sequence[str],
    local_place: tuple[int, int] | None = None,
    restart: int = 0,
) -> dict[str, str]:
    """`base` and what makes this process worker `rank`; with more workers than GPUs, they take turns.

    `restart`: how often this worker was started again.
    `local_place`: (its number on this host, workers on this host), if there are other hosts.
    OMP_NUM_THREADS is 1 unless the user chose it, as under torchrun: several processes that each use every
    core are slower than one.
    """
    local_rank, num_local = local_place or (rank, num_workers)
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(num_local),
    }
    if restart:
        told["PSSTORE_RESTART"] = str(restart)
    if url is not None:
        told["PSSTORE_URL"] = url
    if gpus:
        told["CUDA_VISIBLE_DEVICES"] = gpus[local_rank % len(gpus)]
    if num_local > 1 and "OMP_NUM_THREADS" not in base:
        told["OMP_NUM_THREADS"] = "1"
    return {**base, **told}


def meeting_environ(base: Mapping[str, str], *, free_port: Callable[[], int]) -> dict[str, str]:
    """Where the workers of one host meet if their script, or the framework that they are in, makes a process group of
    torch's beside the store: as under torchrun. `base`: what they are told anyway, which counts."""
    if "MASTER_ADDR" in base or "MASTER_PORT" in base:
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def checkpoint_environ(place: str | None, *, every: str | None) -> dict[str, str]:
    """What a store is told that is to write checkpoints, and to begin with the latest, if there is one."""
    told = {} if place is None else {"PSSTORE_CHECKPOINT": place, "PSSTORE_RESTORE": "auto"}
    return told if every is None else {**told, "PSSTORE_CHECKPOINT_EVERY": every}


def restart_environ(base: Mapping[str, str], *, restarts: int) -> dict[str, str]:
    """What a store is told that is to live on: the peers of workers that are started again wait for these, and where it
    writes checkpoints, its shards are started again, too. `base`: what it is told anyway, which counts."""
    if not restarts:
        return {}
    told = {"PSSTORE_REJOIN_S": f"{REJOIN_S:g}"}
    if "PSSTORE_CHECKPOINT" in base:
        told["PSSTORE_RESTARTS"] = str(restarts)
    return {name: value for name, value in told.items() if name not in base}


def find_gpus(environ: Mapping[str, str], *, proc: Path = NVIDIA_GPUS) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one per GPU that the launcher itself may use; [] where there is none.

    Without torch, which would take seconds and memory on every GPU to say the same.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(_count_gpus(environ, proc))]


def _count_gpus(environ: Mapping[str, str], proc: Path) -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], env=dict(environ), capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(proc.iterdir())) if proc.is_dir() else 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
