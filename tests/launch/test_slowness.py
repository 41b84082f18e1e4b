"""Whom workers wait for, and why, from two looks at a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import psstore
from psstore.client.store_status import StoreStatus, TransferStatus, WorkerStatus, look_at
from psstore.launch.slowness import Look, busy_shards, times_spent, waited_for, who_and_why

SECONDS = 2.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def status() -> StoreStatus:
    """An embedded store's, of two shards and three workers, none of whom has come."""
    with psstore.LocalStore(2, workers=3) as local, local.connect() as store:
        store.create("w", np.zeros(600_000, np.float32), rule="sgd")
        return replace(look_at(store), absent=(), live=(0, 1, 2))


def worker(rank: int, *, clock: int = 9, waited_s: float = 0.0, silent_s: float = 0.0) -> WorkerStatus:
    return WorkerStatus(rank=rank, clock=clock, ahead=0, waited_s=waited_s, silent_s=silent_s)


def transfer(rank: int, shard: int, **figures: Any) -> TransferStatus:
    nothing = {"pushed_bytes": 0, "pulled_bytes": 0, "push_s": 0.0, "pull_s": 0.0, "waited_s": 0.0}
    return TransferStatus(rank=rank, shard=shard, **{**nothing, **figures})


def looks(status: StoreStatus, *workers: WorkerStatus, **changes: Any) -> tuple[Look, Look]:
    """Before, when nobody had waited or sent anything, and then."""
    at_first = tuple(worker(one.rank, clock=5) for one in workers)
    before = replace(status, workers=at_first, transfers=())
    return Look(0.0, before, 0.0), Look(SECONDS, replace(status, workers=workers, **changes), 0.0)


def told(before: Look, now: Look) -> tuple[str, str]:
    return who_and_why(times_spent(before, now), busy_shards(before, now), now.status)


OTHERS = (worker(0, waited_s=1.8), worker(2, waited_s=1.7))


@pytest.mark.parametrize(
    ("slow", "seen", "why"),
    [
        ({}, [], "it computes, or loads data: for 100% of the time nothing of it is under way"),
        (
            {"silent_s": 4.4},
            [],
            "nothing was heard of it for 4 s: its process stands still, or is cut off",
        ),
        (
            {},
            [{"push_s": 0.2, "pushed_bytes": 9 * MIB}, {"push_s": 1.6, "pushed_bytes": 8 * MIB, "pull_s": 0.2}],
            "its gradients arrive for 80% of the time: 5.0 MiB/s, its link or that of shard 1",
        ),
        (
            {},
            [{"pull_s": 1.5, "pulled_bytes": 6 * MIB}, {}],
            "its values travel for 75% of the time: 4.0 MiB/s, its link or that of shard 0",
        ),
    ],
)
def test_whom_the_others_wait_for_is_named_with_what_it_does(
    status: StoreStatus, slow: Mapping[str, Any], seen: list[Mapping[str, Any]], why: str
) -> None:
    transfers = tuple(transfer(1, shard, **figures) for shard, figures in enumerate(seen))
    assert told(*looks(status, *OTHERS, worker(1, **slow), transfers=transfers)) == ("rank 1", why)


def test_a_shard_that_has_no_processor_left_is_named_in_place_of_a_link(status: StoreStatus) -> None:
    shards = tuple(replace(one, processor_s=one.processor_s + 1.9 * one.shard) for one in status.shards)
    before, now = looks(status, *OTHERS, worker(1), transfers=(transfer(1, 1, push_s=1.6),), shards=shards)
    assert told(before, now)[1] == (
        "its gradients arrive for 80% of the time: they wait for shard 1, which takes 95% of a processor"
    )


def test_who_has_not_come_or_is_lost_is_waited_for_by_those_who_have_committed(status: StoreStatus) -> None:
    there = (worker(0, waited_s=2.0), worker(2, waited_s=2.0))
    assert told(*looks(status, *there, absent=(1,), commits_waiting=2)) == ("rank 1", "it has not come yet")
    assert told(*looks(status, *there, lost=(1,), commits_waiting=2)) == ("rank 1", "it is lost")
    assert told(*looks(status, *there, absent=(1,)))[0] == "", "nobody waits"


def test_who_is_behind_is_waited_for_and_of_equals_it_is_said_what_all_do(status: StoreStatus) -> None:
    behind = times_spent(*looks(status, worker(0), worker(1, clock=4), worker(2)))
    slowest = waited_for(behind)
    assert slowest is not None
    assert slowest.worker.rank == 1
    equal = looks(status, worker(0, waited_s=0.4), worker(1, waited_s=0.4), transfers=(transfer(0, 0, push_s=1.0),))
    assert told(*equal) == ("", "workers compute 55% of the time, push 25%, pull 0%, wait 20%")
    assert waited_for(times_spent(*looks(status, worker(0)))) is None, "nobody waits for one who is alone"


def test_counters_of_a_process_that_has_begun_since_are_not_compared_with_those_of_the_one_before(
    status: StoreStatus,
) -> None:
    before, now = looks(status, worker(1), transfers=(transfer(1, 0, push_s=0.5), transfer(1, 1, push_s=0.5)))
    before = before._replace(status=replace(before.status, transfers=(transfer(1, 0, push_s=9.0),)))
    other = tuple(replace(one, process=one.process + 1) for one in status.shards)
    assert times_spent(before, now._replace(status=replace(now.status, shards=other)))[0].pushes == 0.25
