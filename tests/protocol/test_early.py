"""Early commits: the decision before the pushes, how such a round ends, and how it is torn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psstore import errors
from psstore.types import UNBOUNDED, Tensor
from psstore.wire import messages as m
from tests.protocol.support import LIVENESS, FakeStore, Peer, carrying, decisions_in, failure_of, sgd, tensor_of

ZEROS, ONES, TWOS = [0.0] * 4, [1.0] * 4, [2.0] * 4


def workers(store: FakeStore, count: int = 2) -> list[Peer]:
    return [store.worker(rank) for rank in range(count)]


def early_round(store: FakeStore, count: int = 2, **fields: Any) -> list[Peer]:
    """Workers that have all committed round 1 early and were answered."""
    peers = workers(store, count)
    requests = [peer.commit(1, early=True, **fields) for peer in peers]
    for peer, request in zip(peers, requests, strict=True):
        peer.committed(request)
    return peers


def two_tensors(peer: Peer) -> tuple[Tensor, Tensor]:
    first, second = peer.create(sgd("v"), sgd("w")).tensors
    return tensor_of(first), tensor_of(second)


# ---- how a round goes ----


def test_early_round_is_decided_before_anything_is_pushed() -> None:
    first, second = workers(FakeStore())
    waiting = first.commit(1, [7], early=True)
    second.commit(1, [7], early=True)
    (fact,) = decisions_in(first.committed(waiting))
    assert fact.early
    assert fact.members[0].present == ((7, 7),)


def test_finish_is_answered_when_every_member_has_finished() -> None:
    first, second = early_round(FakeStore())
    waiting = first.finish(1)
    assert not first.is_answered(waiting)
    assert second.finished(second.finish(1)).next_round == 2
    assert first.finished(waiting).next_round == 2


def test_who_waits_for_the_others_pushes_waits_for_others() -> None:
    store = FakeStore()
    first, second = early_round(store)
    first.finish(1)
    for waited_s in ("0.5", "1"):
        store.now += 0.5
        assert store.coordinator.counters(store.now)["rank_waits_s"] == f"0:{waited_s},1:0"
    second.finish(1)
    store.now += 0.5
    assert store.coordinator.counters(store.now)["rank_waits_s"] == "0:1,1:0"


def test_repeated_finish_gets_the_first_answer() -> None:
    first, second = early_round(FakeStore())
    first.finish(1)
    again = first.finish(1)
    second.finish(1)
    assert first.finished(again) == first.finished(first.finish(1)) == m.Finished(next_round=2)


def test_round_is_early_if_one_of_its_commits_is() -> None:
    """The other one is answered when all is pushed: what it pushed next would come in place of what slots need."""
    first, second = workers(FakeStore())
    waiting = first.commit(1)
    told = second.committed(second.commit(1, early=True))
    assert decisions_in(told)[0].early
    assert not first.is_answered(waiting)
    second.finished(second.finish(1))
    assert first.committed(waiting).next_round == 2


def test_commit_that_is_repeated_without_early_says_that_all_is_pushed() -> None:
    first, second = early_round(FakeStore())
    again = first.commit(1)
    second.finished(second.finish(1))
    assert first.committed(again).next_round == 2


def test_next_round_needs_the_last_one_finished() -> None:
    (peer,) = early_round(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.RoundOutOfOrder, match="rank 0 commits round 2, but has not finished round 1"):
        peer.answer(peer.commit(2))
    peer.finished(peer.finish(1))
    assert peer.committed(peer.commit(2)).decision == 2


@pytest.mark.parametrize("round", [0, 2])
def test_finish_of_another_round_is_out_of_order(round: int) -> None:
    (peer,) = early_round(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.RoundOutOfOrder, match=f"rank 0 finishes round {round}"):
        peer.answer(peer.finish(round))


def test_finish_before_the_decision_is_out_of_order() -> None:
    first, _ = workers(FakeStore())
    first.commit(1, early=True)
    with pytest.raises(errors.RoundOutOfOrder):
        first.answer(first.finish(1))


def test_finish_deadline_names_who_has_still_to_push_and_finish_may_be_sent_again() -> None:
    store = FakeStore()
    first, second = early_round(store)
    waiting = first.finish(1, wait_s=4.0)
    store.pass_time(3.0)
    second.send("STATS")
    store.pass_time(1.5)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.DeadlineExceeded)
    assert "rank 0 waited 4 s for the pushes that rank 1 (in round 1, last seen" in str(error)
    assert error.details["rank"] == 1
    second.finish(1)
    assert first.finished(first.finish(1)).next_round == 2


def test_deadline_of_a_commit_in_an_early_round_names_who_has_still_to_push() -> None:
    store = FakeStore()
    first, second = workers(store)
    waiting = first.commit(1, wait_s=4.0)
    second.commit(1, early=True)
    store.pass_time(4.5)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.DeadlineExceeded)
    assert error.details["rank"] == 1
    second.finish(1)
    assert first.committed(first.commit(1)).next_round == 2


# ---- what is refused ----


@pytest.mark.parametrize(
    "mode", [{"num_workers": 3, "quorum": 2}, {"quorum": 1, "staleness": 1}, {"quorum": 1, "staleness": UNBOUNDED}]
)
@pytest.mark.parametrize("field", [{"early": True}, {"max_norm": 1.0}], ids=["early", "max_norm"])
def test_what_needs_every_worker_is_refused_unless_rounds_have_them_all(
    mode: dict[str, Any], field: dict[str, Any]
) -> None:
    peer = FakeStore(**mode).worker(0)
    with pytest.raises(errors.BadArgument, match="needs every worker in every round: start the store with --mode sync"):
        peer.answer(peer.commit(1, **field))


def test_early_commit_with_max_norm_is_refused() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.BadArgument, match="an early commit can't have max_norm"):
        peer.answer(peer.commit(1, early=True, max_norm=1.0))


@pytest.mark.parametrize("fields", [({"early": True}, {"max_norm": 1.0}), ({"max_norm": 1.0}, {"early": True})])
def test_round_can_not_be_early_for_one_and_clipped_for_another(fields: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = workers(FakeStore())
    waiting = first.commit(1, **fields[0])
    with pytest.raises(errors.BadArgument, match="no decision can be both, let all workers do the same"):
        second.answer(second.commit(1, **fields[1]))
    second.commit(1)
    assert first.committed(waiting).decision == 1


# ---- torn rounds ----


def leave(store: FakeStore, peer: Peer) -> None:
    peer.ask("LEAVE")


def die(store: FakeStore, peer: Peer) -> None:
    peer.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)


def be_replaced(store: FakeStore, peer: Peer) -> None:
    peer.hang_up()
    reborn = store.connect(role="worker")
    with pytest.raises(errors.TornRound):
        reborn.join(peer.rank)


ENDS = {"left": leave, "was lost": die, "was replaced by a new life": be_replaced}
End = Callable[[FakeStore, Peer], None]


@pytest.mark.parametrize("how", ENDS)
def test_member_that_is_gone_before_it_has_finished_tears_the_round(how: str) -> None:
    store = FakeStore(num_workers=3)
    first, second, gone = early_round(store, 3)
    waiting = [(first, first.finish(1)), (second, second.send("BARRIER", m.Barrier(name="b", count=1)))]
    ENDS[how](store, gone)
    for peer, request in waiting:
        error = failure_of(peer, request)
        assert isinstance(error, errors.TornRound)
        assert f"round 1 is torn: rank 2 {how} after its early commit" in str(error)
        assert (error.details["rank"], error.details["round"]) == (2, 1)


def test_torn_round_is_told_to_a_commit_that_waits_for_it() -> None:
    store = FakeStore()
    first, gone = workers(store)
    waiting = first.commit(1)
    gone.commit(1, early=True)
    leave(store, gone)
    assert isinstance(failure_of(first, waiting), errors.TornRound)


def test_torn_store_takes_no_step_and_no_worker_and_says_so() -> None:
    store = FakeStore()
    first, gone = early_round(store)
    gone.ask("LEAVE")
    first.send("LEAVE")
    late = store.connect(role="worker")
    for peer, op, body in (
        (first, "COMMIT", m.Commit(round=2)),
        (first, "FINISH", m.Finish(round=1)),
        (first, "BARRIER", m.Barrier(name="b", count=1)),
        (late, "JOIN", m.Join()),
    ):
        with pytest.raises(errors.TornRound, match="rank 1 left"):
            peer.ask(op, body)
    counters = m.decode_body(m.Statistics, late.ask("STATS").body).counters
    assert "round 1 is torn: rank 1 left" in str(counters["torn"])


@pytest.mark.parametrize("end", [leave, die], ids=["leaves", "dies"])
def test_member_that_has_finished_may_be_gone(end: End) -> None:
    store = FakeStore()
    first, second = early_round(store)
    second.finish(1)
    end(store, second)
    assert first.finished(first.finish(1)).next_round == 2


def test_member_that_has_finished_is_not_replaced_before_the_others_have() -> None:
    """Its next life would push in place of what slots may still need."""
    store = FakeStore()
    first, second = early_round(store)
    second.finish(1)
    second.hang_up()
    reborn = store.connect(role="worker")
    with pytest.raises(errors.RankTaken, match="rank 1 has finished a round that others have not"):
        reborn.join(1)
    first.finished(first.finish(1))
    assert reborn.join(1).incarnation == 2


def test_worker_that_left_before_the_early_decision_is_no_member() -> None:
    store = FakeStore()
    first, second = workers(store)
    second.commit(1, early=True)
    second.ask("LEAVE")
    (fact,) = decisions_in(first.committed(first.commit(1, early=True)))
    assert [member.rank for member in fact.members] == [0]
    assert first.finished(first.finish(1)).next_round == 2


def test_promise_of_a_lost_worker_is_void_until_it_commits_again() -> None:
    store = FakeStore()
    first, silent = workers(store)
    waiting = silent.commit(1, early=True)
    for _ in range(3):
        store.pass_time(LIVENESS.silence_s / 2)
        first.ask("STATS")
    error = failure_of(silent, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert "its early commit of round 1 is void; commit again" in str(error)
    waiting = first.commit(1, early=True)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)
    silent.committed(silent.commit(1, early=True))
    assert first.committed(first.commit(1, early=True)).decision == 1


# ---- at a shard ----


def test_pull_is_answered_when_the_last_contribution_to_its_slices_arrives() -> None:
    store = FakeStore()
    first, second = workers(store)
    tensors = two_tensors(first)
    waiting = first.commit(1, [tensor.id for tensor in tensors], early=True, hypers={0: {"lr": 1.0}})
    told = second.committed(second.commit(1, [tensor.id for tensor in tensors], early=True))
    first.committed(waiting)
    pulls = [first.pull(tensor, decisions=told.decisions, at_least=1, wait_s=60.0) for tensor in tensors]
    first.push(tensors[1], ONES, round=1)
    second.push(tensors[0], ONES, round=1)
    assert not any(map(first.is_answered, pulls))
    second.push(tensors[1], ONES, round=1)
    assert first.pulled(pulls[1]) == [-1.0] * 4
    assert not first.is_answered(pulls[0])
    first.push(tensors[0], TWOS, round=1)
    assert first.pulled(pulls[0]) == [-1.5] * 4


def test_pull_in_a_torn_round_says_in_time_that_the_decision_is_not_applied() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    tensors = two_tensors(peer)
    told = peer.committed(peer.commit(1, [tensors[0].id], early=True))
    reader = store.connect()
    pull = reader.pull(*tensors, wait_s=2.0)
    assert reader.pulled(pull) == ZEROS * 2
    peer.push(tensors[1], ONES, carrying(decisions=told.decisions), round=1)
    pull = reader.pull(*tensors, wait_s=2.0)
    peer.ask("LEAVE")
    store.pass_time(2.5)
    assert reader.answer(pull).table.statuses() == [errors.NOT_APPLIED, errors.OK]


def test_what_was_not_promised_does_not_count() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    tensors = two_tensors(peer)
    told = peer.committed(peer.commit(1, [tensors[0].id], early=True, hypers={0: {"lr": 1.0}}))
    for tensor in tensors:
        peer.push(tensor, ONES, carrying(decisions=told.decisions), round=1)
    peer.finished(peer.finish(1))
    assert peer.pulled(peer.pull(*tensors)) == [-1.0] * 4 + ZEROS


def test_early_round_that_is_a_skip_waits_for_no_contribution() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    tensors = two_tensors(peer)
    told = peer.committed(peer.commit(1, [tensors[0].id], early=True, non_finite=True))
    assert peer.pulled(peer.pull(tensors[0], decisions=told.decisions, at_least=1)) == ZEROS
    peer.push(tensors[0], ONES, round=1)
    peer.finished(peer.finish(1))
    assert peer.pulled(peer.pull(tensors[0])) == ZEROS


def test_push_looks_at_the_parked_pulls_of_its_slices_alone() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    tensors = [tensor_of(signed) for signed in peer.create(*(sgd(f"layer{i}") for i in range(50))).tensors]
    told = peer.committed(peer.commit(1, [tensor.id for tensor in tensors], early=True))
    pulls = [peer.pull(tensor, decisions=told.decisions, wait_s=60.0) for tensor in tensors]
    parked = store.shards[0].stats()["pulls"]
    for tensor in reversed(tensors):
        peer.push(tensor, ONES, round=1)
    assert all(map(peer.is_answered, pulls))
    assert (parked, store.shards[0].stats()["pulls"]) == (50, 100)
