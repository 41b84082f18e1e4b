"""Commits, decisions, quorum and staleness: who is answered what, and when."""

from __future__ import annotations

import math

import pytest

from psstore import errors
from psstore.protocol.decisions import MIN_WEIGHT
from psstore.protocol.membership import Liveness
from psstore.protocol.rounds import ATTEST_EVERY
from psstore.types import UNBOUNDED, TensorSpec
from psstore.wire import messages as m
from tests.protocol.support import LIVENESS, SIGNER, FakeStore, Peer, carrying, decisions_in, failure_of, sgd, tensor_of


def members(fact: m.DecisionFact) -> list[tuple[int, int, int]]:
    return [(member.rank, member.incarnation, member.round) for member in fact.members]


def workers(store: FakeStore, count: int) -> list[Peer]:
    return [store.worker(rank) for rank in range(count)]


# ---- synchronous ----


def test_synchronous_round_closes_with_the_last_commit() -> None:
    store = FakeStore(num_workers=3)
    peers = workers(store, 3)
    requests = [peer.commit(1) for peer in (peers[2], peers[0])]
    assert not peers[2].is_answered(requests[0])
    peers[1].committed(peers[1].commit(1))
    (fact,) = decisions_in(peers[2].committed(requests[0]))
    assert members(fact) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert (fact.number, fact.divisor) == (1, 3.0)


def test_who_waits_for_whom_is_counted_in_seconds() -> None:
    """The rank that the others wait for has waited least."""
    store = FakeStore(num_workers=2)
    quick, slow = workers(store, 2)
    for number in (1, 2):
        waiting = quick.commit(number)
        store.now += 1.5
        counters = store.coordinator.counters(store.now)
        assert counters["commits_waiting"] == 1
        assert counters["rank_waits_s"] == f"0:{1.5 * number:g},1:0", "what waits still counts, too"
        slow.committed(slow.commit(number))
        quick.committed(waiting)
        store.now += 0.25
    counters = store.coordinator.counters(store.now)
    assert counters["commits_waiting"] == 0
    assert (counters["rank_clocks"], counters["rank_waits_s"]) == ("0:2,1:2", "0:3,1:0")


def test_waits_for_staleness_are_counted_and_clocks_show_who_is_ahead() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=1)
    quick, slow = workers(store, 2)
    quick.committed(quick.commit(1))
    waiting = quick.commit(2)
    store.now += 4.0
    assert store.coordinator.counters(store.now)["rank_clocks"] == "0:2,1:0"
    slow.committed(slow.commit(1))
    quick.committed(waiting)
    assert store.coordinator.counters(store.now)["rank_waits_s"] == "0:4,1:0"


def test_commits_are_counted_by_how_far_ahead_of_the_slowest_they_were_answered() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=100)
    quick, slow = workers(store, 2)
    for number in range(1, 6):
        quick.committed(quick.commit(number))
    slow.committed(slow.commit(1))
    assert store.coordinator.counters(store.now)["staleness"] == "0:1,1:1,2:2,4:2"


def test_how_long_nothing_was_heard_of_a_worker_is_told() -> None:
    store = FakeStore(num_workers=2)
    quick, _ = workers(store, 2)
    store.now += 2.5
    quick.commit(1)
    assert store.coordinator.counters(store.now)["rank_silences_s"] == "0:0,1:2.5"


def test_shard_of_the_coordinator_need_not_be_told_what_was_decided() -> None:
    """It knows once it is idle: the step is under way before anybody asks for it."""
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    tensor = tensor_of(peer.create(sgd("w", zeros=True)).tensors[0])
    peer.push(tensor, [1.0] * 4, round=1)
    reader = store.connect()
    reading = reader.pull(tensor, at_least=1, wait_s=10.0)
    assert store.services[0].catch_up(store.now) == []
    peer.committed(peer.commit(1, [tensor.id], hypers={0: {"lr": 1.0}}))
    assert (store.shards[0].version, reader.is_answered(reading)) == (0, False)
    store.carry_out(0, store.services[0].catch_up(store.now))
    assert store.shards[0].version == 1
    assert len(store.coordinator.rounds.log) == 0
    assert reader.pulled(reading) == [-1.0] * 4


def test_worker_that_commits_what_it_has_not_pushed_may_not_go_on() -> None:
    """The others' gradients count, and they hear that they wait for somebody."""
    store = FakeStore(num_workers=2)
    honest, liar = workers(store, 2)
    tensor = tensor_of(honest.create(sgd("w", zeros=True)).tensors[0])
    honest.push(tensor, [1.0] * 4, round=1)
    honest.commit(1, [tensor.id], hypers={0: {"lr": 1.0}})
    liar.committed(liar.commit(1, [tensor.id]))
    assert store.services[0].catch_up(store.now) == []
    assert honest.pulled(honest.pull(tensor)) == [-0.5] * 4
    refusal = failure_of(liar, liar.commit(2))
    assert isinstance(refusal, errors.MissingContribution)
    assert (refusal.details["rank"], refusal.details["round"], refusal.details["shard"]) == (1, 1, 0)
    assert isinstance(failure_of(liar, liar.send("JOIN", m.Join())), errors.MissingContribution)
    successor = store.worker(1)
    waiting = honest.commit(2)
    assert successor.committed(successor.commit(2)).decision == 2
    assert honest.committed(waiting).decision == 2


def test_worker_hears_that_it_was_refused_while_its_commit_waits() -> None:
    store = FakeStore(num_workers=2, num_shards=2)
    honest, liar = workers(store, 2)
    for peer in (honest, liar):
        peer.commit(1)
    waiting = liar.commit(2, applied=[SIGNER.sign(m.AppliedFact(shard=1, decision=1, missing=((1, 1, 1),)))])
    assert isinstance(failure_of(liar, waiting), errors.MissingContribution)
    assert isinstance(failure_of(honest, honest.commit(2)), errors.WorkerLost)


def test_others_hear_of_a_refusal_that_the_refused_one_brings_itself() -> None:
    store = FakeStore(num_workers=2, num_shards=2)
    honest, liar = workers(store, 2)
    for peer in (honest, liar):
        peer.commit(1)
    waiting = honest.commit(2)
    accusation = SIGNER.sign(m.AppliedFact(shard=1, decision=1, missing=((1, 1, 1),)))
    assert isinstance(failure_of(liar, liar.commit(2, applied=[accusation])), errors.MissingContribution)
    assert isinstance(failure_of(honest, waiting), errors.WorkerLost)


def test_refused_worker_that_still_beats_is_one_loss() -> None:
    """Whoever was told of it and commits again waits for another life."""
    store = FakeStore(num_workers=2, num_shards=2, liveness=Liveness(rejoin_s=4.0))
    honest, liar = workers(store, 2)
    for peer in (honest, liar):
        peer.commit(1)
    accusation = SIGNER.sign(m.AppliedFact(shard=1, decision=1, missing=((1, 1, 1),)))
    assert isinstance(failure_of(liar, liar.commit(2, applied=[accusation])), errors.MissingContribution)
    beats = store.connect(client=liar.client, role="heartbeat")
    waiting = honest.commit(2)
    for _ in range(4):
        store.pass_time(1.0)
        beats.send("HEARTBEAT", rank=1, incarnation=1)
    error = failure_of(honest, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert error.details["last_seen_s"] == 4.0
    again = honest.commit(2)
    assert not honest.is_answered(again)
    assert store.worker(1).incarnation == 2


def test_refusal_of_a_worker_that_has_left_is_nobodys_loss() -> None:
    store = FakeStore(num_workers=2, num_shards=2)
    honest, liar = workers(store, 2)
    for peer in (honest, liar):
        peer.commit(1)
    liar.ask("LEAVE")
    accusation = SIGNER.sign(m.AppliedFact(shard=1, decision=1, missing=((1, 1, 1),)))
    assert honest.committed(honest.commit(2, applied=[accusation])).decision == 2


def test_shard_says_signed_what_it_has_applied_and_what_it_misses() -> None:
    store = FakeStore(num_workers=1, num_shards=2)
    peer = store.worker()
    created = peer.create(sgd("w", zeros=True), sgd("v", zeros=True))
    tensors = [tensor_of(one) for one in created.tensors]
    far = store.connect(client=peer.client, shard=1)
    far.ask("DEFINE", m.Define(facts=created.tensors))
    committed = peer.committed(peer.commit(1, [t.id for t in tensors]))
    (there,) = [tensor for tensor in tensors if 1 in tensor.shards]
    assert far.pulled(far.pull(there, decisions=committed.decisions)) == [0.0] * 4
    attested = m.decode_body(m.Attested, far.ask("ATTEST").body)
    assert SIGNER.open(attested.applied) == m.AppliedFact(shard=1, decision=1, missing=((0, 1, 1),))


def test_commit_with_what_no_shard_has_signed_is_refused() -> None:
    store = FakeStore(num_workers=1, num_shards=2)
    fact = m.AppliedFact(shard=1, decision=9)
    for forged in (m.Signed(blob=SIGNER.sign(fact).blob, mac=b"x" * 16), SIGNER.sign(m.DropFact(ids=()))):
        peer = store.worker(0)
        assert isinstance(failure_of(peer, peer.commit(1, applied=[forged])), errors.BadSignature)
    assert store.coordinator.rounds.log.last == 0


def test_one_worker_of_a_round_is_asked_now_and_then_to_have_the_shards_attest() -> None:
    store = FakeStore(num_workers=2, num_shards=2)
    peers = workers(store, 2)
    asked = {0: 0, 1: 0}
    for round in range(1, 4 * ATTEST_EVERY + 1):
        waiting = [peer.commit(round) for peer in peers]
        for rank, peer in enumerate(peers):
            asked[rank] += peer.committed(waiting[rank]).attest
    assert asked == {0: 2, 1: 2}


def test_sum_instead_of_average_divides_by_one() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    (fact,) = decisions_in(peer.committed(peer.commit(1, weight=3.0, average=False)))
    assert (fact.divisor, fact.members[0].weight) == (1.0, 3.0)


def test_one_non_finite_gradient_makes_the_round_a_skip_for_all() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1)
    second.commit(1, non_finite=True)
    (fact,) = decisions_in(first.committed(waiting))
    assert fact.skip


def test_round_closes_without_a_worker_that_leaves() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1)
    second.ask("LEAVE")
    assert members(decisions_in(first.committed(waiting))[0]) == [(0, 1, 1)]


def test_commit_without_tensors_is_a_round_like_any_other() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    committed = peer.committed(peer.commit(1))
    peer.ask("PULL", carrying(decisions=committed.decisions, at_least=1))
    assert store.shards[0].version == 1


def test_repeated_commit_gets_the_first_answer() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1)
    second.commit(1)
    told = first.committed(waiting)
    assert first.committed(first.commit(1)) == told


@pytest.mark.parametrize("round", [0, 2, 7])
def test_round_out_of_order_is_refused(round: int) -> None:
    store = FakeStore(num_workers=1, quorum=1)
    (peer,) = workers(store, 1)
    with pytest.raises(errors.RoundOutOfOrder, match=f"commits round {round}, but it is in round 1"):
        peer.answer(peer.commit(round))
    assert peer.committed(peer.commit(1)).decision == 1


def test_round_before_the_last_one_is_out_of_order_and_not_late() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    for round in (1, 2):
        peer.committed(peer.commit(round))
    with pytest.raises(errors.RoundOutOfOrder):
        peer.answer(peer.commit(1))
    assert not peer.committed(peer.commit(2)).late


def test_commit_stands_after_an_error_and_may_be_waited_for_again() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1, wait_s=2.0)
    first._store.pass_time(3.0)
    assert isinstance(failure_of(first, waiting), errors.DeadlineExceeded)
    second.commit(1)
    assert first.committed(first.commit(1)).decision == 1


def test_deadline_names_who_is_awaited() -> None:
    store = FakeStore(num_workers=3)
    first = store.worker(0)
    second = store.worker(1)
    waiting = first.commit(1, wait_s=4.0)
    store.pass_time(3.0)
    second.send("STATS")
    store.pass_time(1.5)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.DeadlineExceeded)
    assert "rank 0 waited 4 s at the end of round 1 for rank 1 (in round 1, last seen" in str(error)
    assert "rank 2 (has not joined)" in str(error)
    assert error.details["rank"] == 1


def test_wait_of_no_time_ends_at_once() -> None:
    first, _ = workers(FakeStore(), 2)
    waiting = first.commit(1, wait_s=0.0)
    first._store.pass_time(0.0)
    assert isinstance(failure_of(first, waiting), errors.DeadlineExceeded)


def test_replaced_worker_does_its_open_round_again() -> None:
    store = FakeStore()
    first, dead = workers(store, 2)
    dead.commit(1)
    dead.hang_up()
    reborn = store.worker(1)
    waiting = first.commit(1)
    assert not first.is_answered(waiting)
    reborn.commit(1)
    assert members(decisions_in(first.committed(waiting))[0]) == [(0, 1, 1), (1, 2, 1)]


def test_staged_commit_of_a_dead_worker_counts_if_nobody_replaced_it() -> None:
    store = FakeStore()
    first, dead = workers(store, 2)
    dead.commit(1)
    dead.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)
    assert members(decisions_in(first.committed(first.commit(1)))[0]) == [(0, 1, 1), (1, 1, 1)]


# ---- backup workers ----


def test_backup_round_closes_without_the_late_one_which_is_told_so() -> None:
    store = FakeStore(num_workers=3, quorum=2)
    first, second, late = workers(store, 3)
    for round in (1, 2):
        waiting = first.commit(round)
        second.commit(round)
        assert not first.committed(waiting).late
    told = late.committed(late.commit(1))
    assert (told.late, told.decision, told.next_round, told.last) == (True, 1, 3, 2)
    assert late.committed(late.commit(1)) == told
    assert [members(fact) for fact in decisions_in(told)] == [[(0, 1, n), (1, 1, n)] for n in (1, 2)]


def test_backup_round_goes_on_without_a_lost_worker() -> None:
    store = FakeStore(num_workers=3, quorum=2)
    first, second, dead = workers(store, 3)
    dead.hang_up()
    waiting = first.commit(1)
    store.pass_time(LIVENESS.detached_s + 1)
    assert not first.is_answered(waiting)
    second.commit(1)
    assert first.committed(waiting).decision == 1


def test_backup_round_that_lost_too_many_says_who() -> None:
    store = FakeStore(num_workers=3, quorum=2)
    first, *dead = workers(store, 3)
    for peer in dead:
        peer.hang_up()
    waiting = first.commit(1)
    store.pass_time(LIVENESS.detached_s + 1)
    error = failure_of(first, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert error.details["rank"] == 1


# ---- a quorum's grace ----

GRACE_S = 2.0


def patient(count: int = 3) -> tuple[FakeStore, list[Peer]]:
    """A quorum of two, which waits for the others."""
    store = FakeStore(num_workers=count, quorum=2, grace_s=GRACE_S)
    return store, workers(store, count)


def test_quorum_waits_out_its_grace_and_no_longer() -> None:
    store, (first, second, late) = patient()
    waiting = first.commit(1)
    store.pass_time(4 * GRACE_S)
    second.commit(1)
    store.pass_time(GRACE_S - 0.001)
    assert not first.is_answered(waiting)
    store.pass_time(0.001)
    assert members(decisions_in(first.committed(waiting))[0]) == [(0, 1, 1), (1, 1, 1)]
    assert late.committed(late.commit(1)).late


def test_whoever_comes_within_the_grace_counts_and_ends_it_if_all_are_there() -> None:
    store, (first, second, third, fourth) = patient(4)
    waiting = first.commit(1)
    second.commit(1)
    store.pass_time(GRACE_S / 2)
    third.commit(1)
    assert not first.is_answered(waiting)
    fourth.commit(1)
    assert members(decisions_in(first.committed(waiting))[0]) == [(rank, 1, 1) for rank in range(4)]


def test_each_round_has_a_grace_of_its_own() -> None:
    store, (first, second, _) = patient()
    for round in (1, 2):
        waiting = [peer.commit(round) for peer in (first, second)]
        store.pass_time(GRACE_S - 0.001)
        assert not first.is_answered(waiting[0])
        store.pass_time(0.001)
        assert not first.committed(waiting[0]).late
        second.committed(waiting[1])


def test_grace_is_not_for_those_who_have_not_joined_and_ends_when_the_others_are_gone() -> None:
    store = FakeStore(num_workers=4, quorum=2, grace_s=GRACE_S)
    first, second, dead = workers(store, 3)
    waiting = first.commit(1)
    second.commit(1)
    assert not first.is_answered(waiting)
    dead.hang_up()
    store.pass_time(LIVENESS.detached_s)
    assert first.committed(waiting).decision == 1
    waiting = first.commit(2)
    second.commit(2)
    assert first.committed(waiting).decision == 2


def test_quorum_that_ends_has_its_grace_anew() -> None:
    store, (first, second, third) = patient()
    waiting = first.commit(1)
    second.commit(1)
    store.pass_time(GRACE_S - 0.001)
    second.hang_up()
    again = store.worker(1)  # the next life of its rank does the round itself
    store.pass_time(GRACE_S)
    assert not first.is_answered(waiting)
    again.commit(1)
    store.pass_time(GRACE_S - 0.001)
    assert not first.is_answered(waiting)
    third.commit(1)
    assert members(decisions_in(first.committed(waiting))[0]) == [(0, 1, 1), (1, 2, 1), (2, 1, 1)]


def test_worker_that_leaves_makes_a_quorum_of_the_others_who_wait_from_then_on() -> None:
    store = FakeStore(num_workers=3, quorum=2, grace_s=GRACE_S)
    first, second, third = workers(store, 3)
    second.ask("LEAVE")
    waiting = first.commit(1)
    store.pass_time(2 * GRACE_S)
    assert not first.is_answered(waiting)
    third.ask("LEAVE")
    assert first.committed(waiting).decision == 1


# ---- lost workers, and who waits for their replacement ----


def lost_round(wait_s: float = 300.0) -> tuple[FakeStore, Peer]:
    """Rank 0 of two has been told in round 1 that rank 1 is lost."""
    store = FakeStore(num_workers=2)
    first, dead = workers(store, 2)
    dead.hang_up()
    waiting = first.commit(1, wait_s=wait_s)
    store.pass_time(LIVENESS.detached_s + 1)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)
    return store, first


def test_commit_that_comes_again_waits_for_the_next_life_of_who_was_lost() -> None:
    store, first = lost_round()
    waiting = first.commit(1)
    store.pass_time(LIVENESS.silence_s - 1)
    assert not first.is_answered(waiting)
    heir = store.worker(1)
    assert heir.committed(heir.commit(1)).decision == 1
    assert first.committed(waiting).decision == 1


def test_wait_for_a_replacement_ends_with_the_name_of_who_is_lost() -> None:
    store, first = lost_round()
    for _ in range(2):
        waiting = first.commit(1, wait_s=5.0)
        store.pass_time(4.0)
        assert not first.is_answered(waiting)
        store.pass_time(2.0)
        error = failure_of(first, waiting)
        assert isinstance(error, errors.WorkerLost)
        assert "rank 0 waited 5 s for a replacement: round 1 needs rank 1, which is lost" in str(error)
        assert (error.details["rank"], error.details["round"], error.details["waited_s"]) == (1, 1, 5.0)


def test_who_commits_when_somebody_is_lost_already_is_told_at_once() -> None:
    store = FakeStore(num_workers=3)
    first, second, dead = workers(store, 3)
    dead.hang_up()
    told = first.commit(1)
    store.pass_time(LIVENESS.detached_s + 1)
    assert isinstance(failure_of(first, told), errors.WorkerLost)
    waiting = first.commit(1)
    assert isinstance(failure_of(second, second.commit(1)), errors.WorkerLost)
    assert not first.is_answered(waiting), "what another is told is no news to who knows"


def test_another_loss_is_told_to_who_waits_for_a_replacement() -> None:
    store, first = lost_round()
    waiting = first.commit(1)
    heir = store.worker(1)
    heir.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)
    assert isinstance(failure_of(first, waiting), errors.WorkerLost)
    assert not first.is_answered(first.commit(1))


def test_loss_in_a_later_round_is_told_again() -> None:
    store, first = lost_round()
    waiting = first.commit(1)
    heir = store.worker(1)
    heir.committed(heir.commit(1))
    first.committed(waiting)
    heir.hang_up()
    store.pass_time(LIVENESS.detached_s + 1)
    assert isinstance(failure_of(first, first.commit(2)), errors.WorkerLost)


def test_commit_that_is_sent_again_is_told_the_same() -> None:
    """Its first answer may have been lost with a connection."""
    store = FakeStore(num_workers=2)
    first, dead = workers(store, 2)
    dead.hang_up()
    waiting = first.commit(1)
    store.pass_time(LIVENESS.detached_s + 1)
    for _ in range(2):
        assert isinstance(failure_of(first, waiting), errors.WorkerLost)
        first.send("COMMIT", m.Commit(round=1), request=waiting)


# ---- bounded staleness and none ----


def test_ssp_holds_the_fast_worker_at_the_bound_and_not_before() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=2)
    fast, slow = workers(store, 2)
    for round in (1, 2):
        fast.committed(fast.commit(round))
    held = fast.commit(3)
    assert not fast.is_answered(held)
    slow.committed(slow.commit(1))
    told = fast.committed(held)
    assert (told.next_round, told.slowest) == (4, 1)


def test_ssp_does_not_wait_for_the_lost() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=1)
    fast, dead = workers(store, 2)
    dead.hang_up()
    fast.committed(fast.commit(1))
    held = fast.commit(2)
    store.pass_time(LIVENESS.detached_s + 1)
    assert fast.committed(held).decision == 2


def test_ssp_deadline_names_the_slowest() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=1)
    fast, _ = workers(store, 2)
    fast.committed(fast.commit(1))
    held = fast.commit(2, wait_s=2.0)
    store.pass_time(2.5)
    error = failure_of(fast, held)
    assert "for rank 1 (in round 1, last seen 2.0 s ago)" in str(error)


def test_asynchronous_commits_never_wait() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=UNBOUNDED)
    fast, dead = workers(store, 2)
    dead.hang_up()
    for round in range(1, 10):
        assert fast.committed(fast.commit(round)).decision == round
    store.pass_time(60.0)
    assert fast.committed(fast.commit(10)).slowest == 10


def test_asynchronous_commit_that_is_repeated_is_decided_once() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=UNBOUNDED)
    peer, _ = workers(store, 2)
    assert [peer.committed(peer.commit(1)).decision for _ in range(3)] == [1, 1, 1]
    assert store.coordinator.rounds.log.last == 1


# ---- when the coordinator has to wake ----


def test_commits_that_are_answered_leave_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for it looks at every worker and every wait, and the commits of a training go on and on."""
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    wake = store.services[0].next_wake()
    monkeypatch.setattr(store.coordinator, "next_wake", lambda: pytest.fail("it was asked"))
    for round in range(1, 5):
        peer.committed(peer.commit(round))
        assert store.services[0].catch_up(store.now) == []
        store.now += 0.1
        assert store.services[0].next_wake() == wake


def test_a_worker_that_is_refused_brings_it_forward() -> None:
    """For its rank nobody is waited for longer than for another life of a lost one."""
    store = FakeStore(num_workers=1, liveness=Liveness(rejoin_s=0.5))
    (liar,) = workers(store, 1)
    tensor = tensor_of(liar.create(sgd("w", zeros=True)).tensors[0])
    assert store.services[0].next_wake() == store.now + LIVENESS.silence_s
    liar.committed(liar.commit(1, [tensor.id]))
    store.carry_out(0, store.services[0].catch_up(store.now))
    assert store.services[0].next_wake() == store.now + 0.5


def test_a_commit_that_waits_brings_it_forward() -> None:
    store = FakeStore(num_workers=2)
    first, second = workers(store, 2)
    assert store.services[0].next_wake() == store.now + LIVENESS.silence_s
    request = first.commit(1, wait_s=2.0)
    assert store.services[0].next_wake() == store.now + 2.0
    second.committed(second.commit(1))
    first.committed(request)


def test_a_worker_that_was_lost_and_speaks_can_be_lost_again() -> None:
    store = FakeStore(num_workers=1)
    (peer,) = workers(store, 1)
    for round in range(1, 4):
        peer.committed(peer.commit(round))
        store.pass_time(LIVENESS.silence_s + 1.0)
        assert store.coordinator.counters(store.now)["ranks_lost"] == "0"
        peer.committed(peer.commit(round))  # asked again
        assert store.coordinator.counters(store.now)["ranks_lost"] == ""


# ---- the log ----


def test_decisions_are_kept_until_every_shard_has_attested_them() -> None:
    store = FakeStore(num_workers=1, num_shards=2)
    (peer,) = workers(store, 1)
    for round in (1, 2, 3):
        applied = [SIGNER.sign(m.AppliedFact(shard=shard, decision=round - 1 - shard)) for shard in (0, 1)]
        told = peer.committed(peer.commit(round, applied=applied if round == 3 else []))
    assert [fact.number for fact in decisions_in(told)] == [2, 3]
    assert len(store.coordinator.rounds.log) == 2


def test_worker_that_joins_learns_the_decisions_that_some_shard_may_lack() -> None:
    store = FakeStore(num_workers=2, quorum=1, staleness=UNBOUNDED)
    peer = store.worker(0)
    for round in (1, 2):
        peer.committed(peer.commit(round))
    joined = store.connect(role="worker").join(1)
    assert (joined.decision, len(joined.decisions)) == (2, 2)


# ---- hyper-parameters and other fields ----


def test_hyper_parameters_keep_their_last_value() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    peer.create(sgd("w", zeros=True))
    peer.committed(peer.commit(1, hypers={0: {"lr": 0.5}}))
    fact = decisions_in(peer.committed(peer.commit(2, hypers={0: {"momentum": 0.25}})))[-1]
    assert (fact.hypers[0]["lr"], fact.hypers[0]["momentum"]) == (0.5, 0.25)


def test_group_that_gets_another_rule_starts_from_its_defaults() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    peer.create(sgd("w"))
    peer.committed(peer.commit(1, hypers={0: {"lr": 0.5, "momentum": 0.5}}))
    peer.ask("DROP", m.Drop(names=("w",)))
    peer.create(TensorSpec(name="w", shape=(4,), rule="adam"))
    fact = decisions_in(peer.committed(peer.commit(2)))[-1]
    assert fact.hypers[0]["lr"] == 1e-3
    assert "momentum" not in fact.hypers[0]


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": 1e300},
        {"momentum": 1e39},
        {"beta1": 0.9},
        {"nesterov": 1.0},
        {"nesterov": 0.5, "momentum": 0.9},
    ],
    ids=str,
)
def test_hyper_parameters_that_no_shard_would_take_are_refused(hyper: dict[str, float]) -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    peer.create(sgd("w"))
    with pytest.raises(errors.BadHyper):
        peer.answer(peer.commit(1, hypers={0: hyper}))
    assert peer.committed(peer.commit(1)).decision == 1


def test_what_only_float32_can_not_hold_is_for_groups_of_float64() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    peer.create(TensorSpec(name="w", shape=(4,), dtype="float64", rule="sgd"))
    assert peer.committed(peer.commit(1, hypers={0: {"lr": 1e300}})).decision == 1
    peer.create(sgd("v"))
    with pytest.raises(errors.BadHyper, match=r"'lr' is 1e\+301, which is infinite in float32"):
        peer.answer(peer.commit(2, hypers={0: {"lr": 1e301}}))


def test_unknown_group_is_refused_and_the_round_stays_open() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    peer.create(sgd("w"))
    with pytest.raises(errors.BadArgument, match="parameter group 3, and no tensor belongs to it"):
        peer.answer(peer.commit(1, hypers={3: {"lr": 0.1}}))
    assert peer.committed(peer.commit(1)).decision == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, 1e300, 1e-300])
def test_weight_that_float32_can_not_hold_is_refused(weight: float) -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.BadArgument, match="commit weight"):
        peer.answer(peer.commit(1, weight=weight))


def test_a_round_whose_members_have_nothing_to_contribute_is_a_skip() -> None:
    """Their mean would be of that; beside a member that has something it hardly counts, whatever the loss scale."""
    first, second = workers(FakeStore(), 2)
    for round, (weight, skips) in enumerate(((MIN_WEIGHT, True), (0.5, False)), 1):
        waiting = first.commit(round, weight=MIN_WEIGHT, loss_scale=65536.0)
        second.commit(round, weight=weight)
        committed = first.committed(waiting)
        (fact,) = [one for one in decisions_in(committed) if one.number == round]
        assert (fact.skip, committed.skip, committed.empty) == (skips, skips, skips)
    waiting = first.commit(3, weight=MIN_WEIGHT)
    second.commit(3, weight=MIN_WEIGHT, non_finite=True)
    committed = first.committed(waiting)
    assert (committed.skip, committed.empty) == (True, False)


def test_loss_scale_is_taken_out_of_the_weight_and_not_of_the_divisor() -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    (fact,) = decisions_in(peer.committed(peer.commit(1, weight=3.0, loss_scale=1024.0)))
    assert (fact.divisor, fact.members[0].weight) == (3.0, 3.0 / 1024.0)


def test_what_a_sorted_tensor_needs_beside_weights_is_in_the_decision() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1, loss_scale=1024.0, average=False)
    second.commit(1, weight=2.0)
    (fact,) = decisions_in(first.committed(waiting))
    assert (fact.loss_scales, fact.average) == ((1024.0, 1.0), False)


@pytest.mark.parametrize("loss_scale", [0.0, -1.0, math.inf, math.nan, 1e300, 1e-300])
def test_loss_scale_that_float32_can_not_hold_is_refused(loss_scale: float) -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.BadArgument, match="commit loss_scale"):
        peer.answer(peer.commit(1, loss_scale=loss_scale))
    assert peer.committed(peer.commit(1)).decision == 1


def test_answer_says_that_the_round_is_a_skip() -> None:
    first, second = workers(FakeStore(), 2)
    waiting = first.commit(1)
    assert second.committed(second.commit(1, non_finite=True)).skip
    assert first.committed(waiting).skip


@pytest.mark.parametrize("wait_s", [-1.0, math.inf, math.nan])
def test_wait_that_is_no_time_is_a_bad_body(wait_s: float) -> None:
    (peer,) = workers(FakeStore(num_workers=1), 1)
    with pytest.raises(errors.BadBody, match="wait_s"):
        peer.answer(peer.commit(1, wait_s=wait_s))


def test_tensor_created_by_another_meanwhile_is_owed_nothing() -> None:
    store = FakeStore()
    first, second = workers(store, 2)
    known = tensor_of(first.create(sgd("known")).tensors[0])
    for peer in (first, second):
        peer.push(known, [1.0] * 4, round=1)
    waiting = second.commit(1, [known.id])
    unknown = tensor_of(first.create(sgd("new")).tensors[0])
    first.push(unknown, [2.0] * 4, round=1)
    first.commit(1, [known.id, unknown.id])
    committed = second.committed(waiting)
    second.ask("PULL", carrying(decisions=committed.decisions, at_least=1))
    assert store.shards[0].version == 1
