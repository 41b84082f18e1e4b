"""The limit of shared memory: the SGD pass and one copy each way, in one process, with a thread for each worker's
copies. In batches, what is copied and stepped is in the cache still, which takes gradients that arrive while parameters
leave. The SGD pass alone is what would remain without any copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.comparison import Role
from bench.work import Floats, Work, flat_tensors, memory, sgd

NAME = "memory"
ROLE: Role = "limit"
IN_ONE_PROCESS = True
SPINS = False

BATCH_ELEMS = 1 << 18
"""1 MiB: gradient, staging and value of a batch fit into a core's own cache."""


def why_not(work: Work, transport: str) -> str | None:
    return None if transport == "shm" else "memory is no socket"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    yield ""


def join(work: Work, rank: int, where: str) -> MemoryWorker:
    return MemoryWorker(work)


class MemoryWorker:
    """All workers and the store at once."""

    def __init__(self, work: Work) -> None:
        self._tensors = [flat_tensors(work, rank) for rank in range(work.num_workers)]
        self._value = memory(work.num_elems)
        self._staging = [memory(work.num_elems) for _ in self._tensors]
        self._threads = ThreadPoolExecutor(work.num_workers)
        self.variants: Mapping[str, Callable[[], None]] = {
            "copy + SGD + copy": lambda: self._copied(work.num_elems),
            "the same in batches": lambda: self._copied(BATCH_ELEMS),
            "SGD alone": self._in_place,
        }

    @property
    def last(self) -> float:
        return float(self._value[-1])

    def close(self) -> None:
        self._threads.shutdown()

    def _copied(self, batch_elems: int) -> None:
        gradients, parameters = zip(*(tensors.next() for tensors in self._tensors), strict=True)
        for begin in range(0, self._value.size, batch_elems):
            part = slice(begin, begin + batch_elems)
            value, staging = self._value[part], [buffer[part] for buffer in self._staging]
            self._copy(staging, [gradient[part] for gradient in gradients])
            sgd(value, staging)
            self._copy([out[part] for out in parameters], [value] * len(parameters))

    def _in_place(self) -> None:
        sgd(self._value, [tensors.next()[0] for tensors in self._tensors])

    def _copy(self, targets: Sequence[Floats], sources: Sequence[Floats]) -> None:
        """numpy copies without the GIL."""
        if len(targets) == 1:
            np.copyto(targets[0], sources[0])
        else:
            list(self._threads.map(np.copyto, targets, sources))
