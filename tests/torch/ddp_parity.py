"""Prints how far psstore and DistributedDataParallel train from each other and from plain PyTorch: the table in
docs/pytorch.md.

    python -m tests.torch.ddp_parity [--json FILE] [--only TEXT]

For each feature the same script (ddp_scripts.py) trains a small model in one process over whole batches (local
torch), under DDP (two processes, gloo), and on a store with one worker and with two. A figure is the largest
difference of any final weight: absolute, and in units in the last place of that weight. What can't be run says why.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from bench.report import write_json

from tests.kernels.parity import ulp_distance
from tests.torch.ddp_scripts import FEATURES, Feature
from tests.torch.ddp_trainers import DdpWorkers, Weights, train_alone_on_store, train_locally, train_on_store

T = TypeVar("T")


@dataclass(frozen=True)
class Difference:
    """Between the weights of two trainings."""

    absolute: float
    ulp: int

    def __str__(self) -> str:
        return "0" if self.absolute == self.ulp == 0 else f"{self.absolute:.1e} ({self.ulp} ulp)"


@dataclass(frozen=True)
class Missing:
    """One of two trainings did not take place."""

    reason: str

    def __str__(self) -> str:
        return f"**missing**: {self.reason}"


Cell = Difference | Missing


@dataclass(frozen=True)
class Row:
    """One feature; what stands to the left of the dash is compared with what stands to the right."""

    feature: str
    one_worker_and_local: Cell
    two_workers_and_ddp: Cell
    two_workers_and_local: Cell
    ddp_and_local: Cell


HEADER = (
    "| feature | psstore, 1 worker – local | psstore, 2 workers – DDP | psstore, 2 workers – local | DDP – local |\n"
    "|---|---|---|---|---|"
)


def difference(left: Weights | Missing, right: Weights | Missing) -> Cell:
    """Between the same weights of both; NaN if there is a NaN in either."""
    for side in (left, right):
        if isinstance(side, Missing):
            return side
    assert not isinstance(left, Missing)
    assert not isinstance(right, Missing)
    assert left.keys() == right.keys()
    return Difference(
        absolute=float(np.max([abs(left[name].astype("f8") - right[name]).max(initial=0.0) for name in left])),
        ulp=max(ulp_distance(left[name], right[name]) for name in left if left[name].dtype.kind == "f"),
    )


def attempt(training: Callable[[], T]) -> T | Missing:
    try:
        return training()
    except Exception as error:  # the table shows it
        return Missing(f"{type(error).__name__}: {error}".partition("\n")[0].replace("|", "/"))


def measure(feature: Feature, ddp_workers: DdpWorkers) -> Row:
    local = attempt(lambda: train_locally(feature.script))
    ddp = attempt(lambda: ddp_workers.train(feature.script, feature.ddp)[0])
    alone = attempt(lambda: train_alone_on_store(feature.script, feature.store))
    together = attempt(lambda: train_on_store(feature.script, feature.store)[0])
    return Row(
        feature=feature.name,
        one_worker_and_local=difference(alone, local),
        two_workers_and_ddp=difference(together, ddp),
        two_workers_and_local=difference(together, local),
        ddp_and_local=difference(ddp, local),
    )


def in_markdown(row: Row) -> str:
    cells = (row.one_worker_and_local, row.two_workers_and_ddp, row.two_workers_and_local, row.ddp_and_local)
    return "| " + " | ".join((row.feature, *map(str, cells))) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--only", default="", help="features whose names contain this")
    args = parser.parse_args()

    torch.set_num_threads(1)
    print(HEADER, flush=True)
    rows = []
    with DdpWorkers() as ddp_workers:
        for feature in FEATURES:
            if args.only in feature.name:
                rows.append(measure(feature, ddp_workers))
                print(in_markdown(rows[-1]), flush=True)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    print(f"\n{machine}, {torch.backends.cpu.get_cpu_capability()}")
    if args.json:
        write_json(args.json, {"machine": machine, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
