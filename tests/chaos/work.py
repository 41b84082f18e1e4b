"""What is trained: each step's data follow from its number and the rank, so that a step that is taken again is the
same. Says each step of rank 0, and at the end the hash of what was trained."""

from __future__ import annotations

import hashlib
import sys
import time

import torch

import psstore
import psstore.torch

PACE_S = 0.01


def main(overlap: str, stop_at: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with psstore.connect(num_workers=None) as store:
        optimizer = psstore.torch.DistributedOptimizer(plain, store, model.named_parameters(), overlap=overlap)  # type: ignore[arg-type]
        for step in psstore.torch.session(optimizer, stop_at=stop_at, drain=False):
            draw = torch.Generator().manual_seed(1000 * step.number + (store.rank or 0))
            inputs = torch.randn(8, 40, generator=draw)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if store.rank == 0:
                print(f"step {step.number}", flush=True)
            time.sleep(PACE_S)
        state = optimizer.state_dict()["state"]
        trained = [*model.state_dict().values(), *(one["momentum_buffer"] for one in state.values())]
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in trained))
        print(f"version {store.version} sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
