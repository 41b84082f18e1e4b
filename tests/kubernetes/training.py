"""What the workers' pods run: a training whose steps' data follow from their number and the rank, so that it ends with
the same bytes whatever is done to pods. Prints each step with the time of its end, and then the hash of the weights.

    python training.py     until /tmp/last says which step is the last one
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import psstore
from psstore.client.store import Store
from psstore.errors import RolledBack

ELEMS = 20_000

PACE_S = 0.02
"""What a step computes."""

LAST = Path("/tmp/last")


def train(store: Store, last: Callable[[], float], took: Callable[[int], None]) -> str:
    """The hash of what was trained. `last`: the number of the last step, as far as it is known; `took`: is told of
    each."""
    store.create("weights", np.ones(ELEMS, "f4"), rule="sgd")
    while True:
        try:
            while (step := store.round) <= last():
                draw = np.random.default_rng(1000 * step + (store.rank or 0)).standard_normal(ELEMS, "f4")
                store.push("weights", draw - store.pull("weights"))
                store.commit({"lr": 0.05, "momentum": 0.9})
                took(step)
            store.barrier("done")
            break
        except RolledBack:
            reconnect(store)
    momentum = store.pull_state(["weights"])[0].buffers.values()
    digest = hashlib.sha256(b"".join(one.tobytes() for one in (store.pull("weights"), *momentum))).hexdigest()
    store.barrier("read")
    return digest


def reconnect(store: Store) -> None:
    while True:
        try:
            return store.reconnect()
        except RolledBack:
            continue


def last_step() -> float:
    return int(LAST.read_text()) if LAST.exists() else math.inf


def say(step: int) -> None:
    print(f"step {step} {time.monotonic():.4f}", flush=True)
    time.sleep(PACE_S)


def main() -> None:
    with psstore.connect(connect_timeout_s=60.0) as store:
        digest = train(store, last_step, say)
        print(f"version {store.version} sha256 {digest}", flush=True)


if __name__ == "__main__":
    main()
