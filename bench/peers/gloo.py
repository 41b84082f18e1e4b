"""All-reduce over gloo, then torch's fused SGD in every worker: what DistributedDataParallel does, without DDP.

Gradients lie in one flat array, as DDP's bucket views do. "flat": one all-reduce of all. "25-MiB buckets": DDP's
default, several under way, each bucket stepped as it comes. "per tensor": one all-reduce for each.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from bench.comparison import Role
from bench.work import LEARNING_RATE, Work, flat_tensors

NAME = "gloo all-reduce + torch SGD"
ROLE: Role = "peer"
IN_ONE_PROCESS = False
SPINS = False

BUCKET_BYTES = 25 << 20


def why_not(work: Work, transport: str) -> str | None:
    if transport != "tcp":
        return "gloo has no other transport than tcp"
    return None if work.num_workers > 1 else "a single worker has nothing to all-reduce"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "group")


def join(work: Work, rank: int, where: str) -> GlooWorker:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=work.num_workers)
    return GlooWorker(work, rank)


class GlooWorker:
    """All variants step the same parameters."""

    def __init__(self, work: Work, rank: int) -> None:
        self._rank = rank
        self._gradients = cycle([torch.from_numpy(gradients) for gradients, _ in flat_tensors(work, rank).sets])
        self._parameters = torch.zeros(work.num_elems)
        bucket_elems = BUCKET_BYTES // 4
        buckets = [min(bucket_elems, work.num_elems - begin) for begin in range(0, work.num_elems, bucket_elems)]
        self.variants: Mapping[str, Callable[[], None]] = {
            "flat": self._round([work.num_elems], work),
            "25-MiB buckets": self._round(buckets, work),
            "per tensor": self._round([math.prod(shape) for shape in work.shapes.values()], work),
        }

    @property
    def last(self) -> float:
        return float(self._parameters[-1])

    def close(self) -> None:
        dist.destroy_process_group()

    def _round(self, sizes: list[int], work: Work) -> Callable[[], None]:
        """One that reduces so many elements at a time."""
        parameters = torch.split(self._parameters, sizes)
        optimizers = [torch.optim.SGD([part], lr=LEARNING_RATE / work.num_workers, fused=True) for part in parameters]

        def one_round() -> None:
            gradients = torch.split(self._next_gradients(), sizes)
            under_way = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
            for parameter, gradient, reducing, optimizer in zip(
                parameters, gradients, under_way, optimizers, strict=True
            ):
                reducing.wait()
                parameter.grad = gradient
                optimizer.step()

        return one_round

    def _next_gradients(self) -> torch.Tensor:
        """Their sum is left in their place, so that the other elements double each time: that takes no longer."""
        gradients = next(self._gradients)
        gradients[-1] = self._rank + 1
        return gradients
