"""Mixed precision, loss scaling, gradient accumulation, clipping and a schedule in one loop, on a store.

    psstore run --shards 2 --workers 2 examples/all_together.py [--quick]

The loop is what the PyTorch documentation has for one GPU, but for the lines marked with a star. It trains on
scikit-learn's handwritten digits, in fp16 on the CPU, which is for showing how it goes together and not for speed.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import psstore
from psstore.cli.demo.data import load

MICRO_BATCHES = 2
"""Whose gradients are added up for one step."""

BATCH_IMAGES = 64
"""Of a step: over all workers and their micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch only")
    num_epochs = 1 if parser.parse_args().quick else 10

    torch.manual_seed(0)
    digits = load(None)
    data = TensorDataset(digits.train_images.flatten(1), digits.train_labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    store = psstore.connect()  # *
    optimizer = psstore.torch.DistributedOptimizer(  # *
        torch.optim.AdamW(model.parameters(), lr=3e-3), store, named_parameters=model.named_parameters()
    )
    sampler: DistributedSampler[object] = DistributedSampler(data, store.num_workers, store.rank)  # *
    loader = DataLoader(data, batch_size=BATCH_IMAGES // MICRO_BATCHES // store.num_workers, sampler=sampler)
    scaler = psstore.torch.GradScaler("cpu", init_scale=2.0**14)  # *
    num_steps = num_epochs * (len(loader) // MICRO_BATCHES)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)

    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, start=1):
            last = number % MICRO_BATCHES == 0
            with nullcontext() if last else optimizer.no_sync():  # *
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(images), labels) / MICRO_BATCHES
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if last:
                scaler.unscale_(optimizer)
                norm = optimizer.clip_grad_norm_(1.0)  # *
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        print(
            f"epoch {epoch + 1}: loss {MICRO_BATCHES * loss.item():.3f}, norm {norm:.2f}, scale {scaler.get_scale():g}"
        )

    right = (model(digits.test_images.flatten(1)).argmax(1) == digits.test_labels).float().mean()
    print(f"test accuracy {right:.1%}")
    store.close()


if __name__ == "__main__":
    main()
