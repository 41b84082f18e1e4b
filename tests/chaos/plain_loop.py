"""A store's own calls, with numpy: a loop that is no session, and goes on by itself when the store went back."""

from __future__ import annotations

import numpy as np

from psstore.client.store import Store
from psstore.errors import RolledBack
from tests.chaos.work import Work

ELEMS = 20_000
LARGE_ELEMS = 800_000
"""With each of six shards there is a frame that is large enough."""
NETWORK, LEDGER = 0, 1
"""Parameter groups."""

HYPERS = {NETWORK: {"lr": 0.05, "momentum": 0.9}, LEDGER: {"lr": 1.0, "momentum": 0.0}}


def train(work: Work, num_elems: int) -> None:
    define(work, num_elems)
    while not _is_done(work, num_elems):
        go_on(work.store)


def define(work: Work, num_elems: int) -> None:
    """What is trained, in the store or found there."""
    work.store.create("network", np.ones(num_elems, "f4"), rule="sgd", group=NETWORK)
    work.store.create("rounds", np.zeros(work.shape, "f4"), rule="sgd", group=LEDGER)


def go_on(store: Store) -> None:
    """Of a store that went back, as often as it does."""
    while True:
        try:
            store.reconnect()
            return
        except RolledBack:
            continue


def _is_done(work: Work, num_elems: int) -> bool:
    """False: the store went back."""
    store = work.store
    try:
        while (step := store.round) <= work.num_steps:
            work.write(step)
            draw = np.random.default_rng(1000 * step + work.rank).standard_normal(num_elems, "f4")
            store.push("network", draw - store.pull("network"))
            store.push("rounds", work.own(step, -work.shape[0]))
            store.commit(HYPERS)
            work.stepped(step)
        state = store.pull_state(["network"])[0]
        work.end(store.pull("rounds"), [store.pull("network"), *state.buffers.values()])
        # The only barrier: a worker that is killed at its second one begins at the first, where nobody is any more.
        store.barrier("read")
        return True
    except RolledBack:
        return False
