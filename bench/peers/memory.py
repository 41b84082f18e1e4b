"""The limit of shared memory: the SGD pass and one copy each way, in one process.

"at once": all is copied, stepped and copied, with a thread for each worker's copies. "in batches": the same of a batch
at a time, so that what is copied and stepped is in the cache still. "in batches, on two cores": each takes half of the
batches, as a store and its worker have two. Batches take gradients that arrive while parameters leave. The fastest of
the three is the limit. "SGD alone" is what would remain without any copy.
"""

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

CORES = 2
"""That step batches side by side."""


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
        self._small_staging = [[memory(BATCH_ELEMS) for _ in self._tensors] for _ in range(CORES)]
        self._threads = ThreadPoolExecutor(work.num_workers)
        self._cores = ThreadPoolExecutor(CORES)
        self.variants: Mapping[str, Callable[[], None]] = {
            "copies + SGD, at once": self._at_once,
            "copies + SGD, in batches": lambda: self._in_batches(1),
            "copies + SGD, in batches, on two cores": lambda: self._in_batches(CORES),
            "SGD alone": self._in_place,
        }

    @property
    def last(self) -> float:
        return float(self._value[-1])

    def close(self) -> None:
        self._threads.shutdown()
        self._cores.shutdown()

    def _at_once(self) -> None:
        gradients, parameters = self._next()
        self._copy(self._staging, gradients)
        sgd(self._value, self._staging)
        self._copy(parameters, [self._value] * len(parameters))

    def _in_batches(self, num_cores: int) -> None:
        """Every core has a batch of staging memory of its own."""
        gradients, parameters = self._next()
        begins = range(0, self._value.size, BATCH_ELEMS)

        def work(core: int) -> None:
            for begin in begins[core::num_cores]:
                part = slice(begin, begin + BATCH_ELEMS)
                value = self._value[part]
                staging = [buffer[: value.size] for buffer in self._small_staging[core]]
                _copy_each(staging, [gradient[part] for gradient in gradients])
                sgd(value, staging)
                _copy_each([out[part] for out in parameters], [value] * len(parameters))

        list(self._cores.map(work, range(num_cores)))

    def _in_place(self) -> None:
        sgd(self._value, self._next()[0])

    def _next(self) -> tuple[Sequence[Floats], Sequence[Floats]]:
        """Gradients and memory for parameters, of each worker."""
        gradients, parameters = zip(*(tensors.next() for tensors in self._tensors), strict=True)
        return gradients, parameters

    def _copy(self, targets: Sequence[Floats], sources: Sequence[Floats]) -> None:
        """numpy copies without the GIL."""
        list(self._threads.map(np.copyto, targets, sources))


def _copy_each(targets: Sequence[Floats], sources: Sequence[Floats]) -> None:
    for into, source in zip(targets, sources, strict=True):
        np.copyto(into, source)
