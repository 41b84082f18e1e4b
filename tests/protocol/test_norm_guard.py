"""Contributions that are refused by their norm: what shards measure, and what the coordinator makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from psstore import errors
from psstore.checkpoint.state import StoreState
from psstore.protocol import state_copy
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.norm_guard import FEWEST, KEPT, MOST_SETS, NormGuard
from psstore.server.store_state import restore_coordinator, store_state
from psstore.types import Tensor
from psstore.wire import messages as m
from psstore.wire.ranges import to_ranges
from tests.protocol.support import LIVENESS, SIGNER, FakeStore, Peer, decisions_in, failure_of, sgd, tensor_of

RATIO = 3.0
RATE = {0: {"lr": 1.0}}
USUAL = [0.0, 3.0, 0.0, 4.0]
"""Its norm is 5."""


def guarded(num_workers: int = 2, **fields: Any) -> tuple[FakeStore, list[Peer], Tensor]:
    """A store that refuses by norm, its workers, and a tensor of zeros that they train."""
    store = FakeStore(num_workers=num_workers, refuse_norm=RATIO, **fields)
    peers = [store.worker(rank) for rank in range(num_workers)]
    return store, peers, tensor_of(peers[0].create(sgd("w", zeros=True)).tensors[0])


def measured(peer: Peer, round: int, ids: Sequence[int]) -> tuple[m.Signed, ...]:
    """What the peer's shard says of its contribution."""
    asked = m.Attest(round=round, present=to_ranges(ids))
    told = peer.control("ATTEST", asked, m.Attested).measured
    assert told is not None
    return (told,)


def end(store: FakeStore, peer: Peer, round: int, tensor: Tensor, values: Sequence[float], **fields: Any) -> int:
    """Pushes, has it measured, and commits; the number of the request."""
    store.services[0].catch_up(store.now)
    peer.push(tensor, values, round=round)
    told = measured(peer, round, [tensor.id])
    return peer.commit(round, [tensor.id], measured=told, hypers=RATE, **fields)


def train(
    store: FakeStore, peers: Sequence[Peer], tensor: Tensor, *, rounds: range, values: Sequence[float] = USUAL
) -> None:
    """Rounds to which everybody contributes these values."""
    for round in rounds:
        requests = [end(store, peer, round, tensor, values) for peer in peers]
        assert [peer.committed(request).refused for peer, request in zip(peers, requests, strict=True)] == [None] * len(
            peers
        )


def after_usual_rounds(num_workers: int = 2, **fields: Any) -> tuple[FakeStore, list[Peer], Tensor, int]:
    """The number of the next round, which begins with enough norms to compare with."""
    store, peers, tensor = guarded(num_workers, **fields)
    train(store, peers, tensor, rounds=range(1, 1 + FEWEST))
    return store, peers, tensor, 1 + FEWEST


def value(store: FakeStore, peer: Peer, tensor: Tensor) -> list[float]:
    store.services[0].catch_up(store.now)
    return peer.pulled(peer.pull(tensor))


# ---- the verdict ----


def test_a_contribution_far_beyond_the_median_is_refused_and_its_round_goes_on_without_it() -> None:
    store, (usual, astray), tensor, round = after_usual_rounds()
    before = value(store, usual, tensor)
    waiting = end(store, usual, round, tensor, [0.0, 0.0, 0.0, 4.0])
    told = astray.committed(end(store, astray, round, tensor, [0.0, 30.0, 0.0, 40.0]))
    assert told.refused == m.Refusal(rank=1, norm=50.0, median=5.0, limit=15.0)
    assert (told.decision, told.late, told.skip, told.next_round) == (round, False, False, round + 1)
    honest = usual.committed(waiting)
    assert honest.refused is None
    fact = decisions_in(honest)[-1]
    assert ([member.rank for member in fact.members], fact.divisor, fact.skip) == ([0], 1.0, False)
    assert value(store, usual, tensor) == [before[0], before[1], before[2], before[3] - 4.0]
    assert store.coordinator.counters(store.now)["rank_refusals"] == "1:1"


@pytest.mark.parametrize("norm", [14.9, 15.0])
def test_a_contribution_up_to_the_limit_counts(norm: float) -> None:
    store, (first, second), tensor, round = after_usual_rounds()
    end(store, first, round, tensor, USUAL)
    assert second.committed(end(store, second, round, tensor, [norm, 0.0, 0.0, 0.0])).refused is None


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_contribution_that_is_not_finite_is_refused_from_the_first_round_on(wrong: float) -> None:
    store, (usual, astray), tensor = guarded()
    end(store, usual, 1, tensor, USUAL)
    refused = astray.committed(end(store, astray, 1, tensor, [wrong, 0.0, 0.0, 0.0])).refused
    assert refused is not None
    assert (refused.rank, math.isfinite(refused.norm), refused.median, refused.limit) == (1, False, None, None)
    assert "rank 1 was refused: its norm is" in refused.describe()
    assert value(store, usual, tensor) == [0.0, -3.0, 0.0, -4.0]


def test_before_there_are_enough_norms_to_compare_with_every_finite_contribution_counts() -> None:
    store, (peer,), tensor = guarded(1)
    train(store, [peer], tensor, rounds=range(1, FEWEST))
    assert peer.committed(end(store, peer, FEWEST, tensor, [1e9, 0.0, 0.0, 0.0])).refused is None
    assert peer.committed(end(store, peer, FEWEST + 1, tensor, [1e9, 0.0, 0.0, 0.0])).refused is not None


def test_a_round_in_which_everybody_is_refused_changes_nothing() -> None:
    store, peers, tensor, round = after_usual_rounds()
    before = value(store, peers[0], tensor)
    requests = [end(store, peer, round, tensor, [100.0] * 4) for peer in peers]
    for rank, (peer, request) in enumerate(zip(peers, requests, strict=True)):
        told = peer.committed(request)
        assert told.skip
        assert told.refused is not None
        assert told.refused.rank == rank
    assert value(store, peers[0], tensor) == before
    train(store, peers, tensor, rounds=range(round + 1, round + 2))


def test_where_nobody_waits_for_others_a_refused_contribution_is_a_skip() -> None:
    store, (peer, _), tensor = guarded(quorum=1, staleness=100)
    train(store, [peer], tensor, rounds=range(1, 1 + FEWEST))
    before = value(store, peer, tensor)
    told = peer.committed(end(store, peer, 1 + FEWEST, tensor, [100.0] * 4))
    assert (told.skip, told.decision) == (True, 1 + FEWEST)
    assert value(store, peer, tensor) == before


def test_refused_norms_do_not_move_the_median_and_old_ones_are_forgotten() -> None:
    store, (peer,), tensor, round = after_usual_rounds(1)
    kept = store.coordinator.rounds.norm_guard.admitted[(tensor.id, tensor.id),]
    for later in range(round, round + FEWEST):
        assert peer.committed(end(store, peer, later, tensor, [100.0] * 4)).refused is not None
    assert kept == [5.0] * FEWEST
    train(store, [peer], tensor, rounds=range(round + FEWEST, round + FEWEST + KEPT), values=[1.0, 0.0, 0.0, 0.0])
    assert kept == [1.0] * KEPT


def test_a_verdict_does_not_depend_on_who_of_a_round_came_first() -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        store, peers, tensor, round = after_usual_rounds(3)
        given = ([5.0, 0, 0, 0], [20.0, 0, 0, 0], [14.0, 0, 0, 0])
        requests = {rank: end(store, peers[rank], round, tensor, given[rank]) for rank in order}
        told = [peers[rank].committed(requests[rank]) for rank in range(3)]
        assert [one.refused is not None for one in told] == [False, True, False]


def test_contributions_to_other_tensors_are_compared_among_themselves() -> None:
    store, (peer,), tensor, round = after_usual_rounds(1)
    other = tensor_of(peer.create(sgd("other", zeros=True)).tensors[0])
    assert peer.committed(end(store, peer, round, other, [100.0] * 4)).refused is None
    refused = peer.committed(end(store, peer, round + 1, tensor, [100.0] * 4)).refused
    assert refused is not None
    assert refused.norm == 200.0


def test_a_loss_scale_is_taken_out_of_the_norm() -> None:
    store, (peer,), tensor, round = after_usual_rounds(1)
    scaled = [1024.0 * value for value in USUAL]
    assert peer.committed(end(store, peer, round, tensor, scaled, loss_scale=1024.0)).refused is None


def test_what_is_said_once_for_all_is_said_by_the_first_who_is_not_refused() -> None:
    _, (astray, usual), tensor, round = after_usual_rounds()
    for peer, values, rate in ((astray, [100.0] * 4, 9.0), (usual, USUAL, 0.5)):
        peer.push(tensor, values, round=round)
        told = measured(peer, round, [tensor.id])
        request = peer.commit(round, [tensor.id], measured=told, hypers={0: {"lr": rate}}, average=peer is astray)
    fact = decisions_in(usual.committed(request))[-1]
    assert (fact.hypers[0]["lr"], fact.average) == (0.5, False)


def test_a_worker_that_says_itself_that_its_gradients_are_not_finite_has_the_round_skipped_for_all() -> None:
    store, (first, second), tensor = guarded()
    end(store, first, 1, tensor, USUAL)
    told = second.committed(second.commit(1, [], non_finite=True))
    assert (told.skip, told.refused) == (True, None)


def test_a_refused_commit_that_comes_again_gets_the_same_answer_and_counts_once() -> None:
    store, (peer,), tensor, round = after_usual_rounds(1)
    told = peer.committed(end(store, peer, round, tensor, [100.0] * 4))
    assert peer.committed(peer.commit(round, [tensor.id])).refused == told.refused
    assert store.coordinator.counters(store.now)["rank_refusals"] == "0:1"


def test_nothing_is_measured_of_a_round_without_gradients() -> None:
    _, (peer,), _ = guarded(1)
    assert peer.committed(peer.commit(1)).decision == 1


# ---- what shards say ----


def test_a_commit_that_does_not_bring_what_every_shard_has_measured_is_refused() -> None:
    store = FakeStore(num_workers=1, num_shards=2, refuse_norm=RATIO)
    peer = store.worker(0)
    tensor = tensor_of(peer.create(sgd("w", zeros=True)).tensors[0])
    peer.push(tensor, USUAL, round=1)
    told = measured(peer, 1, [tensor.id])
    with pytest.raises(errors.BadArgument, match="on 1 of 2 shards; this store refuses by norm"):
        peer.answer(peer.commit(1, [tensor.id], measured=told, hypers=RATE))
    far = store.connect(client=peer.client, shard=1, role="worker")
    assert peer.ticket is not None
    far.ask("ATTACH", m.Attach(ticket=peer.ticket))
    both = told + measured(far, 1, [tensor.id])
    assert peer.committed(peer.commit(1, [tensor.id], measured=both, hypers=RATE)).decision == 1


def test_what_was_measured_of_others_or_of_other_tensors_does_not_do() -> None:
    _, (first, second), tensor = guarded()
    other = tensor_of(first.create(sgd("other", zeros=True)).tensors[0])
    for peer in (first, second):
        peer.push(tensor, USUAL, round=1)
    first.push(other, [100.0] * 4, round=1)
    of_less = measured(first, 1, [tensor.id])
    for told in (measured(second, 1, [tensor.id]), of_less):
        failure = failure_of(first, first.commit(1, [tensor.id, other.id], measured=told, hypers=RATE))
        assert isinstance(failure, errors.BadArgument)


def test_what_no_shard_has_said_is_refused() -> None:
    _, (peer, _), tensor = guarded()
    peer.push(tensor, USUAL, round=1)
    (told,) = measured(peer, 1, [tensor.id])
    with pytest.raises(errors.BadSignature):
        peer.answer(peer.commit(1, [tensor.id], measured=[m.Signed(blob=told.blob, mac=bytes(len(told.mac)))]))
    ticket = peer.ticket
    assert ticket is not None
    with pytest.raises(errors.BadSignature, match="no shard says of a contribution"):
        peer.answer(peer.commit(1, [tensor.id], measured=[ticket]))


def test_what_was_measured_counts_though_something_else_is_pushed_afterwards() -> None:
    store, (peer,), tensor = guarded(1)
    peer.push(tensor, USUAL, round=1)
    told = measured(peer, 1, [tensor.id])
    peer.push(tensor, [1e9] * 4, round=1)
    peer.committed(peer.commit(1, [tensor.id], measured=told, hypers=RATE))
    assert value(store, peer, tensor) == [-one for one in USUAL]


def test_only_what_was_pushed_whole_is_measured() -> None:
    _, (peer,), tensor = guarded(1)
    other = tensor_of(peer.create(sgd("other", zeros=True)).tensors[0])
    peer.push(tensor, USUAL, round=1)
    with pytest.raises(errors.BadArgument, match="shard 0 has no gradient from it"):
        measured(peer, 1, [tensor.id, other.id])
    peer.push(other, USUAL, round=1)
    fact = SIGNER.open(measured(peer, 1, [tensor.id, other.id])[0])
    assert isinstance(fact, m.MeasuredFact)
    assert fact.squares == 50.0


def test_what_is_measured_is_the_contribution_of_an_attached_worker() -> None:
    store, _, _ = guarded(1)
    stranger = store.connect(role="worker")
    with pytest.raises(errors.UnexpectedMessage, match="before ATTACH"):
        stranger.ask("ATTEST", m.Attest(round=1, present=((1, 1),)))


def test_early_commits_can_not_be_measured() -> None:
    _, (peer,), tensor = guarded(1)
    with pytest.raises(errors.BadArgument, match="without --refuse-norm"):
        peer.answer(peer.commit(1, [tensor.id], early=True))


# ---- what is remembered ----


def test_a_store_that_goes_on_elsewhere_refuses_what_this_one_would() -> None:
    """A standby's coordinator is the leader's copy; one that begins from a checkpoint knows norms and counts."""
    store, (peer,), tensor, round = after_usual_rounds(1)
    peer.committed(end(store, peer, round, tensor, [100.0] * 4))
    state = store_state(store.coordinator, lineage="a store")
    assert state.workers[0].closed is not None
    assert state.workers[0].closed.refused is not None
    copy, restored = (
        Coordinator(consistency=store.coordinator.consistency, liveness=LIVENESS, num_shards=1, signer=SIGNER)
        for _ in range(2)
    )
    state_copy.load(copy, state_copy.dump(store.coordinator))
    restore_coordinator(restored, state, [tensor], without_value=())
    present = ((tensor.id, tensor.id),)
    for other in (copy, restored):
        guard = other.rounds.norm_guard
        assert (guard.num_refused, list(guard.admitted[present])) == ({0: 1}, [5.0] * FEWEST)
        assert guard.judge(0, present, 50.0) == m.Refusal(rank=0, norm=50.0, median=5.0, limit=15.0)


def test_a_checkpoint_after_a_contribution_that_was_not_finite_can_be_read() -> None:
    store, (peer,), tensor = guarded(1)
    peer.committed(end(store, peer, 1, tensor, [math.nan] * 4))
    state = store_state(store.coordinator, lineage="a store")
    read = msgspec.json.decode(msgspec.json.encode(state), type=StoreState)
    assert read == state


def test_of_many_sets_of_tensors_those_are_forgotten_that_have_had_no_round_for_longest() -> None:
    guard = NormGuard(RATIO, signer=SIGNER, num_shards=1)
    for tensor_id in range(1, 1 + MOST_SETS):
        guard.admit([(((tensor_id, tensor_id),), 1.0)])
    guard.admit([(((1, 1),), 1.0), (((9999, 9999),), 1.0)])
    assert len(guard.admitted) == MOST_SETS
    assert ((1, 1),) in guard.admitted
    assert ((2, 2),) not in guard.admitted
