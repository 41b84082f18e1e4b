"""Clipping by the global norm: who says the bound, what shards tell, and how the scale reaches them. And RESTORE."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from psstore import _core, errors
from psstore.protocol.client import Client
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.types import Tensor
from psstore.wire import messages as m
from tests.protocol.support import F32, FakeStore, Peer, carrying, decisions_in, sgd, tensor_of

F64 = _core.DTYPES["float64"]
RATE = {0: {"lr": 1.0}}


def worker_with_tensors(store: FakeStore, *names: str) -> tuple[Peer, list[Tensor]]:
    peer = store.worker(0)
    return peer, [tensor_of(signed) for signed in peer.create(*map(sgd, names)).tensors]


def clipped_round(store: FakeStore, peer: Peer, tensors: list[Tensor], round: int = 1, **fields: Any) -> m.Committed:
    """Every gradient is [3, 0, 0, 4]: the norm of each is 5."""
    for tensor in tensors:
        peer.push(tensor, [3.0, 0.0, 0.0, 4.0], round=round)
    ids = [tensor.id for tensor in tensors]
    return peer.committed(peer.commit(round, ids, max_norm=1.0, hypers=RATE, **fields))


def ask_norms(peer: Peer, *tensors: Tensor, **fields: Any) -> int:
    table = _core.SliceTable([(tensor.key(0), 0, F64) for tensor in tensors])
    return peer.send("NORM", carrying(**fields), table=table)


def norms(peer: Peer, request: int) -> tuple[list[int], list[float]]:
    statuses = peer.answer(request).table.statuses()
    return statuses, list(np.frombuffer(peer.payloads.pop(request, b""), np.float64))


# ---- the coordinator ----


def test_bound_of_the_lowest_rank_counts() -> None:
    store = FakeStore()
    first, second = store.worker(0), store.worker(1)
    waiting = second.commit(1, max_norm=7.0)
    first.commit(1, max_norm=2.0)
    assert decisions_in(second.committed(waiting))[0].max_norm == 2.0


def test_bound_of_another_rank_alone_counts_for_nobody() -> None:
    store = FakeStore()
    first, second = store.worker(0), store.worker(1)
    waiting = second.commit(1, max_norm=7.0)
    first.commit(1)
    assert decisions_in(second.committed(waiting))[0].max_norm is None


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_bound_that_is_no_norm_is_refused(max_norm: float) -> None:
    peer = FakeStore(num_workers=1).worker(0)
    with pytest.raises(errors.BadArgument, match=r"max_norm .* must be a number that is not negative"):
        peer.answer(peer.commit(1, max_norm=max_norm))
    assert peer.committed(peer.commit(1, max_norm=0.0)).decision == 1


def test_skip_needs_no_norm() -> None:
    peer = FakeStore(num_workers=1).worker(0)
    (fact,) = decisions_in(peer.committed(peer.commit(1, max_norm=1.0, non_finite=True)))
    assert (fact.skip, fact.max_norm) == (True, None)


# ---- a shard ----


def test_norm_carries_the_decision_and_tells_the_sum_of_squares_of_each_slice() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "v", "w", "absent")
    told = clipped_round(store, peer, tensors[:2])
    assert norms(peer, ask_norms(peer, *tensors, decisions=told.decisions)) == (
        [errors.OK, errors.OK, errors.NOT_MODIFIED],
        [25.0, 25.0],
    )


def test_norm_waits_for_its_decision_like_a_pull() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    reader = store.connect()
    waiting = ask_norms(reader, *tensors, at_least=1, wait_s=10.0)
    told = clipped_round(store, peer, tensors)
    assert not reader.is_answered(waiting)
    ask_norms(peer, *tensors, decisions=told.decisions)
    assert norms(reader, waiting)[1] == [25.0]


def test_norm_is_the_same_before_and_after_the_step() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    before = norms(peer, ask_norms(peer, *tensors, decisions=told.decisions))
    peer.answer(peer.pull(*tensors, scale=m.Scale(decision=1, factor=0.5)))
    assert norms(peer, ask_norms(peer, *tensors)) == before


def test_pull_waits_for_the_scale_whoever_brings_it() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    reader = store.connect()
    peer.answer(peer.pull(decisions=told.decisions))
    waiting = reader.pull(*tensors, wait_s=10.0)
    assert not reader.is_answered(waiting)
    peer.answer(peer.pull(scale=m.Scale(decision=1, factor=0.5)))
    assert reader.pulled(waiting) == [-1.5, 0.0, 0.0, -2.0]


def test_push_carries_the_scale_before_it_is_staged() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    carry = carrying(decisions=told.decisions, scale=m.Scale(decision=1, factor=0.5))
    peer.push(tensors[0], [1.0] * 4, carry, round=2)
    assert peer.pulled(peer.pull(*tensors)) == [-1.5, 0.0, 0.0, -2.0]


def test_first_scale_counts() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    for factor in (0.5, 0.25):
        request = peer.pull(*tensors, decisions=told.decisions, scale=m.Scale(decision=1, factor=factor))
        assert peer.pulled(request) == [-1.5, 0.0, 0.0, -2.0]


@pytest.mark.parametrize("decision", [0, 2])
def test_scale_of_another_decision_is_ignored(decision: int) -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    request = peer.pull(*tensors, decisions=told.decisions, scale=m.Scale(decision=decision, factor=0.5))
    assert peer.answer(request).table.statuses() == [errors.NOT_APPLIED]


def test_scale_of_who_is_no_worker_is_ignored() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    stranger = store.connect()
    request = stranger.pull(*tensors, decisions=told.decisions, scale=m.Scale(decision=1, factor=0.0))
    assert stranger.answer(request).table.statuses() == [errors.NOT_APPLIED]


def test_no_factor_makes_the_decision_a_skip() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    request = peer.pull(*tensors, decisions=told.decisions, scale=m.Scale(decision=1, factor=None))
    assert peer.pulled(request) == [0.0] * 4


@pytest.mark.parametrize("factor", [-0.5, 1.5, math.inf])
def test_factor_that_is_none_is_a_bad_body(factor: float) -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    with pytest.raises(errors.BadBody, match="scale"):
        peer.answer(peer.pull(*tensors, scale=m.Scale(decision=1, factor=factor)))


def test_norm_of_a_connection_is_limited_with_its_pulls() -> None:
    peer, tensors = worker_with_tensors(FakeStore(num_workers=1), "w")
    for _ in range(_core.MAX_PENDING_READS // 2):
        ask_norms(peer, *tensors, at_least=1, wait_s=10.0)
        peer.pull(*tensors, at_least=1, wait_s=10.0)
    with pytest.raises(errors.Overloaded, match="1024 reads of this connection wait already"):
        peer.answer(ask_norms(peer, *tensors, at_least=1, wait_s=10.0))


# ---- the client ----


def unscaled_client() -> Client:
    """A worker that knows of a clipped decision, and not of its scale."""
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    identity = ClientIdentity(client=peer.client, role="worker", ticket=peer.ticket, incarnation=peer.incarnation)
    decisions = DecisionCache(1)
    decisions.learn(1, clipped_round(store, peer, tensors).decisions)
    return Client(driver=mock.Mock(), identity=identity, decisions=decisions, sessions=[], timeout_s=1.0)


def test_client_refuses_to_push_before_the_norm_was_asked_for() -> None:
    with pytest.raises(errors.BadArgument, match="push: round 1 is clipped, and its norm was not asked for"):
        unscaled_client().push([]).send(None)


def test_client_refuses_to_commit_before_the_norm_was_asked_for() -> None:
    with pytest.raises(errors.BadArgument, match="commit: round 1 is clipped, and its norm was not asked for"):
        unscaled_client().worker.commit(present=[], hypers={}, wait_s=1.0).send(None)


def test_client_whose_decision_is_scaled_goes_on() -> None:
    client = unscaled_client()
    assert client.worker.unscaled is not None
    client.worker.set_scale(m.Scale(decision=1, factor=1.0))
    assert client.worker.unscaled is None


# ---- restoring ----


def restore(peer: Peer, tensor: Tensor, values: list[float], sequence: int) -> list[int]:
    table = _core.SliceTable([(tensor.key(0), 4 * len(values), F32)])
    return peer.ask("RESTORE", values=values, table=table, sequence=sequence).table.statuses()


def test_restore_is_applied_once_per_sequence() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    assert restore(peer, tensors[0], [1.0] * 4, 1) == [errors.OK]
    assert restore(peer, tensors[0], [2.0] * 4, 2) == [errors.OK]
    assert restore(peer, tensors[0], [1.0] * 4, 1) == [errors.OK]
    assert peer.pulled(peer.pull(*tensors)) == [2.0] * 4


def test_restore_gives_a_first_value_to_who_waits_for_it() -> None:
    store = FakeStore(num_workers=1)
    peer = store.worker(0)
    tensor = tensor_of(peer.create(sgd("w", zeros=False)).tensors[0])
    waiting = peer.pull(tensor, wait_s=10.0)
    restore(peer, tensor, [1.0] * 4, 1)
    assert peer.pulled(waiting) == [1.0] * 4


def test_restore_of_a_slice_whose_step_is_not_taken_is_refused() -> None:
    store = FakeStore(num_workers=1)
    peer, tensors = worker_with_tensors(store, "w")
    told = clipped_round(store, peer, tensors)
    peer.answer(peer.pull(decisions=told.decisions))
    assert restore(peer, tensors[0], [1.0] * 4, 1) == [errors.NOT_APPLIED]
