"""A store's own calls, as in plain_loop, where workers come and go: all but rank 0 leave now and then, and come back a
little later. Nobody leaves in the second half of the training, so that all are there at its end.

All of them push the same of the network, in so few bits that the mean over any three is exactly that: what is trained
does not depend on who was there. The store's log of members says who was.
"""

from __future__ import annotations

import random
import time

import numpy as np

import psstore
from psstore.client.store import Store
from psstore.errors import RolledBack
from psstore.wire.messages import members_after
from tests.chaos.plain_loop import ELEMS, HYPERS, define, go_on
from tests.chaos.work import CONNECT_S, Work, say

LEAVES_ONE_IN = 8
LONGEST_AWAY_S = 0.3

AWAIT_S = 1.0
"""How long rank 0 waits, before each step of the second half, for those who are away."""


def train(work: Work) -> None:
    define(work, ELEMS)
    while not _is_done(work):
        go_on(work.store)


def _is_done(work: Work) -> bool:
    """False: the store went back."""
    try:
        while (step := work.store.round) <= work.num_steps:
            if work.rank == 0 and step > work.num_steps // 2:
                work.absences.await_none(AWAIT_S)
            work.write(step)
            draw = np.random.default_rng(step).standard_normal(ELEMS, "f4")
            gradient = (draw - np.asarray(work.store.pull("network"))).astype("f2").astype("f4")
            work.store.push("network", gradient)
            work.store.push("rounds", work.own(step, -1.0))
            work.store.commit(HYPERS)
            work.stepped(step)
            if step <= work.num_steps // 2 and _leaves(work.rank, step):
                say(f"leaves after step {step}")
                _go_away(work)
        took = who_took_part(work.store, work.num_steps)
        shares = np.array([max(1, len(ranks)) for ranks in took], "f4")
        state = work.store.pull_state(["network"])[0]
        rounds = np.round(work.store.pull("rounds") * shares, 3)  # each was one over how many they were
        work.end(rounds, [work.store.pull("network"), *state.buffers.values()], took=took)
        work.store.barrier("read")
        return True
    except RolledBack:
        return False


def _leaves(rank: int, step: int) -> bool:
    return rank != 0 and random.Random(f"{rank} {step}").randrange(LEAVES_ONE_IN) == 0


def _go_away(work: Work) -> None:
    """Leaves, and comes back."""
    with work.absences.of(work.rank):
        work.store.close()
        time.sleep(random.uniform(0.0, LONGEST_AWAY_S))
        work.store = psstore.connect(num_workers=None, connect_timeout_s=CONNECT_S)
        define(work, ELEMS)


def who_took_part(store: Store, num_steps: int) -> list[list[int]]:
    """The ranks in each step, as the store's log of members has it."""
    log, took = store.member_log, []
    for step in range(1, num_steps + 1):
        absent = {rank for one in log if one.version == step for rank in one.absent}
        took.append(sorted(set(members_after((), (one for one in log if one.version < step))) - absent))
    return took
