"""psstore itself. "late": all pushes, then the commit, then all pulls, as without overlap. "early": the commit goes
first, and pulls and pushes are in flight together, a few tensors at a time. Over shared memory, "borrowed values": like
"late", with the values read where they lie (`Store.borrow`), which the other two copy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import psstore
from bench.comparison import BORROWED, Role
from bench.processes import store_server
from bench.work import SGD, Tensors, Work, tensors
from psstore.config import Transport
from psstore.types import TensorSpec

NAME = "psstore"
ROLE: Role = "psstore"
IN_ONE_PROCESS = False
SPINS = False

TRANSPORTS = ("tcp", "unix", "shm")

CHUNK_BYTES = 4 << 20
"""Of tensors that are pushed and pulled by one call in "early": about a frame."""


def why_not(work: Work, transport: str) -> str | None:
    return None if transport in TRANSPORTS else f"psstore has no transport {transport!r}"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    with store_server("tcp" if transport == "tcp" else "unix", 1, workers=work.num_workers) as url:
        yield f"{transport} {url}"


def join(work: Work, rank: int, where: str) -> StoreWorker:
    transport, url = where.split()
    store = psstore.connect(url, rank=rank, num_workers=work.num_workers, transport=cast(Transport, transport))
    return StoreWorker(work, store, rank, may_borrow=transport == "shm")


class StoreWorker:
    """A worker that trains all tensors in every round."""

    def __init__(self, work: Work, store: psstore.Store, rank: int, *, may_borrow: bool) -> None:
        self._store = store
        self._names = list(work.shapes)
        self._chunks = _chunks(work)
        self._tensors = tensors(work, rank)
        self.last = 0.0
        specs = [TensorSpec(name=name, shape=shape, rule="sgd") for name, shape in work.shapes.items()]
        store.create_many(specs)
        variants = {"late commit": self._late, "early commit": self._early}
        self.variants: Mapping[str, Callable[[], None]] = (
            {**variants, BORROWED: self._borrowed} if may_borrow else variants
        )

    def close(self) -> None:
        self._store.close()

    def _late(self) -> None:
        used = self._tensors.next()
        self._store.push_many(used.gradients)
        self._store.commit(SGD)
        self._store.pull_many(self._names, out=list(used.parameters.values()))
        self.last = used.last

    def _early(self) -> None:
        used = self._tensors.next()
        self._store.commit(SGD, present=self._names, early=True)
        moving = [future for names in self._chunks for future in self._start(names, used)]
        for future in moving:
            future.result()
        self._store.finish()
        self.last = used.last

    def _borrowed(self) -> None:
        """Given back in the round, so that everybody's next step is in place."""
        self._store.push_many(self._tensors.next().gradients)
        self._store.commit(SGD)
        with self._store.borrow(self._names) as values:
            self.last = float(values[self._names[-1]].flat[-1])

    def _start(self, names: Sequence[str], used: Tensors) -> list[Future[Any]]:
        return [
            self._store.start_pull_many(names, out=[used.parameters[name] for name in names]),
            self._store.start_push_many({name: used.gradients[name] for name in names}),
        ]


def _chunks(work: Work) -> list[list[str]]:
    """The tensors' names in their order, CHUNK_BYTES or more to each list but the last."""
    chunks: list[list[str]] = [[]]
    num_bytes = 0
    for name, shape in work.shapes.items():
        if num_bytes >= CHUNK_BYTES:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(name)
        num_bytes += 4 * math.prod(shape)
    return chunks
