"""torch's fused SGD on the local model: what a training step pays for its optimizer where nothing is sent anywhere. A
round of a store has that step in it, and both ways of the bytes besides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle

import torch

from bench.comparison import Role
from bench.work import LEARNING_RATE, Work, tensors

NAME = "torch's fused step, no store"
ROLE: Role = "limit"
IN_ONE_PROCESS = False
SPINS = False


def why_not(work: Work, transport: str) -> str | None:
    return None if transport == "shm" else "nothing is sent"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    yield ""


def join(work: Work, rank: int, where: str) -> LocalWorker:
    torch.set_num_threads(1)
    return LocalWorker(work, rank)


class LocalWorker:
    """Every worker steps a model of its own, all at the same time."""

    def __init__(self, work: Work, rank: int) -> None:
        mean = (work.num_workers + 1) / 2
        self._parameters = [torch.zeros(shape) for shape in work.shapes.values()]
        sets = [list(one.gradients.values()) for one in tensors(work, rank).sets]
        for gradients in sets:
            gradients[-1].flat[-1] = mean  # as others have it, who add those of all workers
        self._gradients = cycle([[torch.from_numpy(one) for one in gradients] for gradients in sets])
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE, fused=True)
        self.variants: Mapping[str, Callable[[], None]] = {"opt_step": self._step}

    @property
    def last(self) -> float:
        return float(self._parameters[-1].flatten()[-1])

    def close(self) -> None: ...

    def _step(self) -> None:
        for parameter, gradient in zip(self._parameters, next(self._gradients), strict=True):
            parameter.grad = gradient
        self._optimizer.step()
