"""A store's own calls, as in plain_loop, where workers come and go.

All of them push the same of the network, in so few bits that the mean over any three is exactly that: what is trained
does not depend on who was there. The store's log of members says who was.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.chaos.ledger import who_took_part
from tests.chaos.plain_loop import ELEMS, HYPERS, define
from tests.chaos.work import Work


def train(work: Work) -> None:
    work.until_done(partial(_is_done, work))


def _is_done(work: Work) -> bool:
    """False: it leaves."""
    define(work, ELEMS)
    store = work.store
    while (step := store.round) <= work.num_steps:
        work.write(step)
        draw = np.random.default_rng(step).standard_normal(ELEMS, "f4")
        store.push("network", (draw - np.asarray(store.pull("network"))).astype("f2").astype("f4"))
        store.push("rounds", work.own(step, -1.0))
        store.commit(HYPERS)
        work.stepped(step)
        if work.leaves_after(step):
            return False
    took = who_took_part(store.member_log, *work.shape)
    shares = np.array([max(1, len(ranks)) for ranks in took], "f4")
    state = store.pull_state(["network"])[0]
    rounds = np.round(store.pull("rounds") * shares, 3)  # each was one over how many they were
    work.end(rounds, [store.pull("network"), *state.buffers.values()])
    store.barrier("read")
    return True
