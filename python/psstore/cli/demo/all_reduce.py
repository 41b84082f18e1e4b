"""Strategy `allreduce`: torch's DistributedDataParallel over gloo. No store: every worker takes every step itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psstore.cli.demo.settings import Settings
from psstore.config import worker_environment

WAIT_S = 60.0
"""For a worker that is slow to start or to step. One that dies closes its connections, which is noticed at once."""


class AllReduce:
    """The default process group as Peers."""

    staleness = 0

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.round = 1
        self._round_bytes = 0

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """What a ring all-reduce of the gradients sends and receives, 2(W-1)/W of their bytes: gloo does not say."""
        moved = (self.round - 1) * self._round_bytes * 2 * (dist.get_world_size() - 1) // dist.get_world_size()
        return moved, moved

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._round_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        optimizer.register_step_post_hook(self._stepped)
        return DistributedDataParallel(model), optimizer

    def _stepped(self, *_: object) -> None:
        self.round += 1

    def meet(self, name: str) -> None:
        dist.barrier()

    def finish(self, model: nn.Module) -> None:
        """Nothing to do: all have the same weights."""


@contextmanager
def all_reduce(settings: Settings) -> Iterator[AllReduce]:
    rank = worker_environment().rank
    assert rank is not None, "the launcher says which worker this is"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.rendezvous_path}",
        rank=rank,
        world_size=settings.num_workers,
        timeout=timedelta(seconds=WAIT_S),
    )
    try:
        yield AllReduce()
    finally:
        dist.destroy_process_group()
