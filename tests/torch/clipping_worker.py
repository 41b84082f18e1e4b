"""A worker of two that clips with torch's function, under torchrun with DistributedDataParallel, or under `psstore run`
with a store."""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import psstore

STEPS = 12
BATCH = 8
WIDTH = 8
MAX_NORM = 0.5


def train(store: psstore.Store | None, rank: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
    model: nn.Module = network
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    if store is None:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(network)
    else:
        optimizer = psstore.torch.DistributedOptimizer(optimizer, store, network.named_parameters())
    inputs = torch.randn(2 * STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, 5 * inputs.sin().sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, num_replicas=2, rank=rank)
    for rows, targets in DataLoader(data, batch_size=BATCH, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows), targets).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        print(f"norm {norm.item():.4f}")
        optimizer.step()
    return network


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = psstore.connect() if "PSSTORE_URL" in os.environ else None
    network = train(store, rank)
    torch.save(network.state_dict(), f"{rank}.pt")
    if store is None:
        torch.distributed.destroy_process_group()
    else:
        assert store.version == STEPS
        store.close()


if __name__ == "__main__":
    main()
