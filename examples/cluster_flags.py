"""One script for every host of a cluster, told by the classic flags which task it is (docs/clusters.md):

    python cluster_flags.py --ps_hosts=h1:2222,h2:2222 --worker_hosts=w1,w2 --job_name=ps     --task_index=0
    python cluster_flags.py --ps_hosts=h1:2222,h2:2222 --worker_hosts=w1,w2 --job_name=worker --task_index=1

Under `psstore run --shards 2 --workers 2 cluster_flags.py` it runs on one host, without them.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn

import psstore
from psstore import cluster


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    _, own = cluster.parse_known_args()  # the flags that are not the cluster's
    rounds = parser.parse_args(own).rounds

    with cluster.from_flags() as store:  # on a ps host it serves here, and ends the program
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        mine = slice(store.rank, None, store.num_workers)
        inputs, targets = (images[mine] / 16).float(), labels[mine]

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = psstore.torch.DistributedOptimizer(optimizer, store, named_parameters=model.named_parameters())

        for _ in range(rounds):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        print(f"worker {store.rank}: accuracy {(model(inputs).argmax(1) == targets).float().mean():.1%}")


if __name__ == "__main__":
    main()
