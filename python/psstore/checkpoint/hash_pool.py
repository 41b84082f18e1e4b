"""SHA-256 of many pieces on several threads, beside whatever else writes or reads them.

One core hashes less than a fast disk or network moves, so hashing must neither follow that nor be on one thread.
Measured: docs/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from psstore.checkpoint.tensor_file import digest_of
from psstore.errors import StorageFailed

TASK_BYTES = 1 << 20
"""What one task of the pool hashes: about 0.6 ms; to hand over a task takes about 0.02."""

MAX_THREADS = 8

MAX_READS = 4
"""Reads under way at once: a request to an object store takes some 10 ms, in which a fast link brings some MiB."""

LEAST = 19
"""The nice value of what can wait."""

Returned = TypeVar("Returned")
Given = TypeVar("Given")


class PendingDigests:
    """Digests that are being made; their buffers may not change before `result`."""

    def __init__(self, tasks: Sequence[Future[list[bytes]]]) -> None:
        self._tasks = tasks

    def result(self) -> list[bytes]:
        """Waits for all, so that nobody looks at the buffers any more."""
        return [digest for task in self._tasks for digest in task.result()]


class HashPool:
    """Threads for hashing, and for reads that run beside it. Thread-safe; close it, or use it in a `with`."""

    def __init__(self, num_threads: int | None = None, *, yielding: bool = False) -> None:
        """`num_threads`: None means as many as cores, at most MAX_THREADS. `yielding`: they give way to all others."""
        self.num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(
            self.num_threads, thread_name_prefix="checkpoint-hash", initializer=give_way if yielding else None
        )
        self._readers = ThreadPoolExecutor(MAX_READS, thread_name_prefix="checkpoint-read")

    def digests(self, views: Sequence[memoryview]) -> PendingDigests:
        """SHA-256 of each view, in their order. Raises StorageFailed; then some may be hashed still, until `close`."""
        tasks: list[Future[list[bytes]]] = []
        some: list[memoryview] = []
        some_bytes = 0
        for view in views:
            some.append(view)
            some_bytes += view.nbytes
            if some_bytes >= TASK_BYTES:
                tasks.append(self._hash(some))
                some, some_bytes = [], 0
        if some:
            tasks.append(self._hash(some))
        return PendingDigests(tasks)

    def read(self, call: Callable[[Given], Returned], given: Given) -> Future[Returned]:
        """Calls it on a thread that may wait for storage. Raises StorageFailed."""
        with room_for_thread():
            return self._readers.submit(call, given)

    def _hash(self, views: Sequence[memoryview]) -> Future[list[bytes]]:
        with room_for_thread():
            return self._threads.submit(_digests, views)

    def close(self) -> None:
        self._threads.shutdown()
        self._readers.shutdown()

    def __enter__(self) -> HashPool:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def room_for_thread() -> Iterator[None]:
    """In the block a thread is started, or may be. Raises StorageFailed where the system has no room for another one:
    that costs a checkpoint, and no more."""
    try:
        yield
    except RuntimeError as error:
        raise StorageFailed(
            f"a checkpoint takes threads of its own: {error}; raise ulimit -u, or the limit of the container"
        ) from error


def give_way() -> None:
    """Has this thread run when no other one wants to: what is written beside training then costs that less."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)


def _digests(views: Sequence[memoryview]) -> list[bytes]:
    return [digest_of(view) for view in views]
