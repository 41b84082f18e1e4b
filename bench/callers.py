"""Who takes part in `latency`: each pushes and pulls one small value and blocks until it is done. Plain sockets are in
ping_pong.py.

Their servers are processes of their own. What is between two bursts of calls (`around`) is not measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

import psstore
from bench.comparison import Role
from bench.peers import redis_store
from bench.processes import store_server
from bench.work import one_large
from psstore.config import Transport

VALUE_ELEMS = 256
"""1 KiB."""

BULK_ELEMS = 4 << 20
"""16 MiB: what another client sends again and again while latency is measured under load."""

BUSY_POLL_US = 200.0
"""Longer than a round trip, so that between two calls nobody sleeps."""


class Cores(NamedTuple):
    """Where the two ends of a call run; None: wherever the kernel wakes them."""

    client: int | None
    server: int | None

    @property
    def pinned(self) -> bool:
        return self.client is not None

    def __str__(self) -> str:
        return "" if not self.pinned else ", one core" if self.client == self.server else ", two cores"


FREE = Cores(None, None)


def placements() -> list[Cores]:
    """Both ends on one core, where one sleeps as the other wakes; and on two, each of which may sleep as well."""
    first, *others = sorted(os.sched_getaffinity(0))
    return [Cores(first, second) for second in (first, *others[:1])]


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """This thread, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Caller:
    name: str
    transport: str
    role: Role
    push: Callable[[], object]
    pull: Callable[[], object]
    pipelined: Callable[[int], object]
    """Pushes so many times, with all of them under way at once."""
    bulk: Callable[[], Callable[[], object]] | None = None
    """In another process: connects, and returns what pushes BULK_ELEMS. Picklable; None: not for this one."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What is to be done before and after a burst of calls."""
    cores: Cores = FREE
    one_thread: bool = False
    """Of a limit: its server has one for all clients."""


# ---- psstore ----


@contextlib.contextmanager
def store_caller(
    transport: str, *, spinning: bool = False, shares: bool = False, cores: Cores = FREE
) -> Iterator[Caller]:
    """Blocking, or both ends asking the kernel for `BUSY_POLL_US` before they sleep. `shares`: memory for
    what is large, as clients on one host do by themselves, and that transport's sockets for the rest."""
    where = cast(Transport, "auto" if shares else transport)  # bulk of others, too, is to go the same way
    busy_us = BUSY_POLL_US if spinning else 0.0
    with contextlib.ExitStack() as ends:
        with on_core(cores.server):
            options = ["--busy-poll-us", str(busy_us)]
            url = ends.enter_context(store_server("tcp" if transport == "tcp" else "unix", 1, options=options))
        store = ends.enter_context(psstore.connect(url, rank=0, transport=where, busy_poll_us=busy_us))
        value, out = np.ones(VALUE_ELEMS, np.float32), np.zeros(VALUE_ELEMS, np.float32)
        store.create("small", value)

        def pipelined(count: int) -> None:
            for under_way in [store.start_push_many({"small": value}) for _ in range(count)]:
                under_way.result()

        yield Caller(
            f"psstore, {transport}{', spinning' if spinning else ''}{' and shared memory' if shares else ''}{cores}",
            transport,
            "psstore",
            push=lambda: store.push("small", value),
            pull=lambda: store.pull("small", out=out),
            pipelined=pipelined,
            bulk=None if spinning or cores.pinned else StoreBulk(url, where),
            around=partial(on_core, cores.client),
            cores=cores,
        )


@dataclass(frozen=True)
class StoreBulk:
    url: str
    transport: Transport

    def __call__(self) -> Callable[[], object]:
        store = psstore.connect(self.url, role="client", transport=self.transport)
        value = np.ones(BULK_ELEMS, np.float32)
        store.create("bulk", value)
        return lambda: store.push("bulk", value)


# ---- Redis ----


@contextlib.contextmanager
def redis_caller(transport: str) -> Iterator[Caller]:
    """Raises ImportError or FileNotFoundError where something is missing."""
    with redis_store.serve(one_large(1), transport) as where:
        client = redis_store.client(where)
        value = bytes(4 * VALUE_ELEMS)

        def pipelined(count: int) -> None:
            pipeline = client.pipeline(transaction=False)
            for _ in range(count):
                pipeline.set("small", value)
            pipeline.execute()

        yield Caller(
            f"Redis, {transport}",
            transport,
            "peer",
            push=lambda: client.set("small", value),
            pull=lambda: client.get("small"),
            pipelined=pipelined,
            bulk=RedisBulk(where),
        )
        client.close()


@dataclass(frozen=True)
class RedisBulk:
    where: str

    def __call__(self) -> Callable[[], object]:
        client = redis_store.client(self.where)
        value = bytes(4 * BULK_ELEMS)
        return lambda: client.set("bulk", value)


# ---- torch.distributed.rpc ----


@contextlib.contextmanager
def rpc_caller() -> Iterator[Caller]:
    """Raises ImportError without torch. Under load it is not measured: a third process would have to be in it from
    the beginning."""
    import torch  # only who takes part needs it
    from torch.distributed import rpc

    from bench.peers import torch_rpc

    work = one_large(1)
    with torch_rpc.serve(work, "tcp") as where:
        torch_rpc.start("worker0", 1, work, where)
        value = torch.ones(VALUE_ELEMS)

        def push(server: str = torch_rpc.SERVER) -> Any:
            return rpc.rpc_async(server, torch_rpc.keep, (value,))

        yield Caller(
            "torch.distributed.rpc, tcp",
            "tcp",
            "peer",
            push=lambda: push().wait(),
            pull=lambda: rpc.rpc_sync(torch_rpc.SERVER, torch_rpc.kept),
            pipelined=lambda count: torch.futures.wait_all([push() for _ in range(count)]),
        )
        rpc.shutdown()
