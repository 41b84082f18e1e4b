"""A learner as a process, which trains until a file is there: `python -m tests.torch.learner_worker learn FILE`, or
`average FILE` for model averaging. Says that it has begun, that four rounds were decided since, and that it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import psstore
from tests.torch.support import Odd, backward, batches


def main(way: str, stop: Path) -> None:
    torch.set_num_threads(1)
    store = psstore.connect()
    model = Odd(seed=0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.001)
    optimizer = (
        psstore.torch.DistributedOptimizer(inner, store, model.named_parameters(), mode="average", every=4)
        if way == "average"
        else psstore.torch.DiLoCo(model, inner, store, every=4, fragments=2, delay=1)
    )
    print(f"began at {store.version}", flush=True)
    told_at = store.version + 4
    for inputs in batches(1_000_000, seed=store.rank or 0):
        optimizer.zero_grad()
        loss = backward(model, inputs)
        optimizer.step()
        if told_at <= store.version:
            print(f"round {store.version}", flush=True)
            told_at = sys.maxsize
        if stop.exists():
            break
    print(f"ended at {store.version} with loss {loss:.6f}", flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
