"""A recommender on a store: `psstore run --shards 2 --workers 2 dlrm.py`. Embedding tables beside dense layers."""

from __future__ import annotations

import argparse

import torch

import psstore
from psstore.cli.demo.dlrm import DIM, TABLES, ClickLog, Dlrm, auc

SAMPLES = 256
"""Of a worker's batch."""


def train(store: psstore.Store, *, steps: int) -> Dlrm:
    log = ClickLog(seed=0)
    rank = store.rank or 0
    tables = [
        psstore.torch.EmbeddingBag(name, DIM, store, mode="sum", rule="adagrad", init="normal(0, 0.1)", lr=0.1)
        for name in TABLES
    ]
    model = Dlrm(tables)
    optimizer = psstore.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        store,
        named_parameters=model.named_parameters(),
        tables=tables,
    )
    batch = log.batch(0, samples=SAMPLES, rank=rank)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(batch)
        batch = log.batch(step + 1, samples=SAMPLES, rank=rank)
        for table, ids in zip(tables, batch.ids, strict=True):
            table.prefetch(ids)  # is pulled when this step is decided
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, AUC {auc(model, log.test()):.3f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    with psstore.connect() as store:
        train(store, steps=args.steps)


if __name__ == "__main__":
    main()
