"""What bench.instructions counts, to be run under callgrind: training rounds of one worker.

On an embedded store it is all of the data path but sockets: face, layout, frames, decoder, session, service, staging,
update. Over a socket it is one end of direct calls: the worker's, whose store is a process of its own and is not
counted, or the shard's (counted_shard.py).
Each part of each round is dumped under its name. Not counted: imports, creating, and the first rounds, in which layouts
are worked out, pools fill and the interpreter specialises its bytecode.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

import psstore
from bench.counted_shard import PARTS, shards_end
from bench.processes import store_server
from psstore.client.arrays import Array
from psstore.client.local import LocalStore
from psstore.client.store import Store
from psstore.types import TensorSpec

CASES = {"1 KiB": (1, 256), "4 MiB": (1, 1 << 20), "1000 x 4 KiB": (1000, 1024)}
"""Tensors, and float32 elements of each: what costs by the call, by the byte, and by the slice."""

SOCKET_CASES = {"1 KiB, socket": (1, 256), "1000 x 64 B, socket": (1000, 16)}
"""As much as a socket takes at once, so that it does not matter who is faster."""

EARLY_CASE = "16 x 16 KiB, early"
EARLY_SIZES = 16, 4096
"""The same of a round that was committed early: its pulls wait, each for its push."""

WARM_UP = 6
ROUNDS = 5

SOCKET_ROUNDS = 25
"""The shortest counts, and on a busy machine the shard often answers when a commit does not wait in the extension any
more."""

Part = Callable[[], object]


def round_of(
    store: Store, num_tensors: int, num_elems: int, *, embedded: bool = False, early: bool = False
) -> dict[str, Part]:
    """The parts of a round, in order. The shard of an `embedded` store takes the step after the commit, on a thread of
    its own, as far as it gets before the pull does the rest: together they are always the same."""
    names = [f"tensor {index}" for index in range(num_tensors)]
    gradients = {name: np.ones(num_elems, np.float32) for name in names}
    weights = [np.zeros(num_elems, np.float32) for _ in names]
    store.create_many([TensorSpec(name=name, shape=(num_elems,), rule="sgd") for name in names])
    if early:
        return {"round": lambda: early_round(store, gradients, weights)}

    def push() -> None:
        store.push_many(gradients)

    def commit() -> None:
        store.commit({"lr": 0.1})

    def pull() -> None:
        store.pull_many(names, out=weights)

    def commit_and_pull() -> None:
        commit()
        pull()

    return (
        {"push": push, "commit and pull": commit_and_pull}
        if embedded
        else {"push": push, "commit": commit, "pull": pull}
    )


def early_round(store: Store, gradients: dict[str, Array], weights: list[Array]) -> None:
    """All pulls wait at the shard before the first push comes: so each push ends one, in every round alike."""
    store.commit({"lr": 0.1}, present=gradients, early=True)
    pulls = [store.start_pull_many([name], out=[out]) for name, out in zip(gradients, weights, strict=True)]
    store.stats()
    for name, gradient in gradients.items():
        store.push(name, gradient)
    for pull in pulls:
        pull.result()
    store.finish()


def _at_once(_: str) -> AbstractContextManager[None]:
    return nullcontext()


IDLE_S = 0.1
"""An embedded store's idle work is done by then, which its own thread begins a little after each round."""


def _at_rest(_: str) -> AbstractContextManager[None]:
    time.sleep(IDLE_S)
    return nullcontext()


def count(
    case: str,
    parts: dict[str, Part],
    marks: ctypes.CDLL,
    around: Callable[[str], AbstractContextManager[None]] = _at_once,
    *,
    rounds: int = ROUNDS,
) -> None:
    """`around`: what is done before and after a part, and is not counted."""
    for _ in range(WARM_UP):
        for name, part in parts.items():
            with around(name):
                part()
    marks.begin()
    for _ in range(rounds):
        for name, part in parts.items():
            with around(name):
                marks.forget()
                part()
                marks.dump(f"{name} {case}".encode())
    marks.end()


def main() -> None:
    marks = ctypes.CDLL(sys.argv[1])
    gc.disable()  # when it runs depends on what else was allocated
    for case, sizes in CASES.items():
        with LocalStore() as local, local.connect(rank=0) as store:
            count(case, round_of(store, *sizes, embedded=True), marks, _at_rest)
    for case, sizes in SOCKET_CASES.items():
        with store_server("unix", 1) as url, psstore.connect(url, rank=0, transport="unix") as store:
            count(case, round_of(store, *sizes), marks, rounds=SOCKET_ROUNDS)
        with shards_end(*sizes) as shard:
            count(f"{case}, shard", dict.fromkeys(PARTS, shard.turn), marks, shard.asked)
    with LocalStore() as local, local.connect(rank=0) as store:
        count(EARLY_CASE, round_of(store, *EARLY_SIZES, early=True), marks, _at_rest)


if __name__ == "__main__":
    main()
