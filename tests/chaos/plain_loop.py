"""A store's own calls, with numpy: a loop that is no session, and goes on by itself when the store went back."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.chaos.work import Work

ELEMS = 20_000
LARGE_ELEMS = 800_000
"""With each of six shards there is a frame that is large enough."""
NETWORK, LEDGER = 0, 1
"""Parameter groups."""

HYPERS = {NETWORK: {"lr": 0.05, "momentum": 0.9}, LEDGER: {"lr": 1.0, "momentum": 0.0}}


def train(work: Work, num_elems: int) -> None:
    work.until_done(partial(_is_done, work, num_elems))


def define(work: Work, num_elems: int) -> None:
    """What is trained, in the store or found there."""
    work.store.create("network", np.ones(num_elems, "f4"), rule="sgd", group=NETWORK)
    work.store.create("rounds", np.zeros(work.shape, "f4"), rule="sgd", group=LEDGER)


def _is_done(work: Work, num_elems: int) -> bool:
    """True: it never leaves."""
    define(work, num_elems)
    store = work.store
    while (step := store.round) <= work.num_steps:
        work.write(step)
        draw = np.random.default_rng(1000 * step + work.rank).standard_normal(num_elems, "f4")
        store.push("network", draw - store.pull("network"))
        store.push("rounds", work.own(step, -work.shape[0]))
        store.commit(HYPERS)
        work.stepped(step)
    state = store.pull_state(["network"])[0]
    rounds = store.pull("rounds")
    work.end(rounds, [rounds, store.pull("network"), *state.buffers.values()])
    # The only barrier: a worker that is killed at its second one begins at the first, where nobody is any more.
    store.barrier("read")
    return True
