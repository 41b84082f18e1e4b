"""Learners far apart: the small GPT of transformer.py, on learners that each take their own steps, and every few of
them share what has become of a quarter of the weights.

    psstore run --shards 2 --workers 2 examples/learners.py [--quick] [--data-parallel] [--compression none]

Prints what went to and from the store. To compare with: with --data-parallel gradients are shared in every step, and
with --compression none what learners share goes as float32.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformer import Gpt, standard_library, windows

import psstore


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--data-parallel", action="store_true", help="share gradients in every step")
    parser.add_argument("--compression", default="int8", help="codec of what learners share, or none")
    options = parser.parse_args()
    length, num_steps, every = (32, 80, 20) if options.quick else (128, 600, 50)

    store = psstore.connect()
    model = Gpt(width=48 if options.quick else 128, num_blocks=2 if options.quick else 4, num_heads=4, length=length)
    inner = torch.optim.AdamW(
        model.parameters(), lr=3e-3 if options.quick else 1e-3, betas=(0.9, 0.99), weight_decay=0.1
    )
    if options.data_parallel:
        optimizer = psstore.torch.DistributedOptimizer(inner, store, model.named_parameters(), max_norm=1.0)
    else:
        compression = options.compression
        optimizer = psstore.torch.DiLoCo(model, inner, store, every=every, compression=compression, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps, pct_start=0.1)
    text = standard_library()
    seen, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    torch.manual_seed(1 + (store.rank or 0))  # the windows are each learner's own
    pushed, pulled = store.bytes_pushed, store.bytes_pulled

    for step in range(1, num_steps + 1):
        letters, following = windows(seen, 32 // store.num_workers, length)
        loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        if step == 1 or step % (num_steps // 10) == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    sent, came = (now - before for now, before in ((store.bytes_pushed, pushed), (store.bytes_pulled, pulled)))
    print(f"pushed {sent / num_steps:.0f} and pulled {came / num_steps:.0f} bytes a step")
    optimizer.synchronize()  # the weights that all learners have made
    torch.manual_seed(0)
    letters, following = windows(held_out, 64, length)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
    print(f"of text that no learner saw: loss {loss.item():.4f}")
    store.close()


if __name__ == "__main__":
    main()
