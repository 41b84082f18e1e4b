"""Ranks, incarnations and who is live: the coordinator's answers, request by request."""

from __future__ import annotations

import pytest

from psstore import errors
from psstore.protocol.membership import Liveness
from psstore.types import UNBOUNDED
from psstore.wire import messages as m
from tests.protocol.support import LIVENESS, NONCE, FakeStore, failure_of, sgd, tensor_of

CLIENT = "c" * 32


def test_ranks_are_given_out_from_the_lowest() -> None:
    store = FakeStore(num_workers=3)
    assert [store.worker().rank for _ in range(3)] == [0, 1, 2]


def test_rank_of_a_live_worker_is_taken() -> None:
    store = FakeStore()
    store.worker(1)
    with pytest.raises(errors.RankTaken, match="rank 1 is held by client"):
        store.worker(1)


def test_no_rank_is_free_when_all_workers_live() -> None:
    store = FakeStore(num_workers=1)
    store.worker()
    with pytest.raises(errors.TooManyWorkers, match="all 1 ranks are taken"):
        store.worker()


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(errors.BadArgument, match=r"not in \[0, 2\)"):
        FakeStore().worker(rank)


def test_worker_that_believes_in_another_group_is_refused() -> None:
    peer = FakeStore(num_workers=2).connect()
    with pytest.raises(errors.BadArgument, match="believes in 3 workers, the store was started for 2"):
        peer.join(0, num_workers=3)


def test_client_is_one_worker_and_not_two() -> None:
    peer = FakeStore().worker(0)
    with pytest.raises(errors.BadArgument, match="rank 0 already"):
        peer.join(1)


def test_join_that_is_repeated_is_the_same_life() -> None:
    store = FakeStore()
    store.worker(0, client=CLIENT)
    again = store.connect(client=CLIENT, role="worker")
    assert again.join(0).incarnation == 1


def test_rank_whose_connections_are_gone_gets_a_new_life() -> None:
    store = FakeStore()
    first = store.worker(0)
    first.hang_up()
    second = store.worker(0)
    assert (first.incarnation, second.incarnation) == (1, 2)


def test_who_was_with_another_leader_may_be_looking_for_this_one_as_long_as_it_may_be_silent() -> None:
    store = FakeStore(num_workers=2)
    for rank in range(2):
        store.worker(rank)
    store.coordinator.all_went(store.now)
    store.pass_time(LIVENESS.silence_s - 0.1)
    assert not store.coordinator.membership.lost()
    assert store.worker(1).incarnation == 2, "whoever takes the place of one that is gone with the leader need not wait"
    store.pass_time(0.2)
    assert [worker.rank for worker in store.coordinator.membership.lost()] == [0]


def test_older_life_is_refused_at_the_coordinator() -> None:
    store = FakeStore()
    store.worker(0, client=CLIENT).hang_up()
    store.worker(0)
    older = store.connect(client=CLIENT, role="worker")
    with pytest.raises(errors.StaleIncarnation, match="a newer life took its rank"):
        older.answer(older.commit(1))


def test_older_life_is_refused_at_the_shards() -> None:
    store = FakeStore()
    older = store.worker(0, client=CLIENT)
    tensor = tensor_of(older.create(sgd("w")).tensors[0])
    ticket = older.ticket
    assert ticket is not None
    older.hang_up()
    store.worker(0)
    older = store.connect(client=CLIENT)
    with pytest.raises(errors.StaleIncarnation, match="lives on as incarnation 2"):
        older.ask("ATTACH", m.Attach(ticket=ticket))
    with pytest.raises(errors.NotAWorker):
        older.push(tensor, [1.0] * 4, rank=0, incarnation=1, round=1)


def test_life_that_attached_before_its_successor_can_not_push_after_it() -> None:
    store = FakeStore()
    older = store.worker(0)
    tensor = tensor_of(older.create(sgd("w")).tensors[0])
    store.pass_time(LIVENESS.silence_s + 1)  # silent, but its connection stands
    store.worker(0)
    with pytest.raises(errors.StaleIncarnation):
        older.push(tensor, [1.0] * 4, round=1)


def test_heartbeats_keep_a_silent_worker_alive() -> None:
    store = FakeStore()
    worker = store.worker(0, client=CLIENT)
    beats = store.connect(client=CLIENT, role="heartbeat")
    for _ in range(30):
        store.pass_time(1.0)
        beats.send("HEARTBEAT", rank=worker.rank, incarnation=worker.incarnation)
    with pytest.raises(errors.RankTaken):
        store.worker(0)


def test_heartbeat_of_an_older_life_counts_for_nobody() -> None:
    store = FakeStore()
    store.worker(0, client=CLIENT).hang_up()
    store.worker(0)
    beats = store.connect(client=CLIENT, role="heartbeat")
    for _ in range(12):
        store.pass_time(1.0)
        beats.send("HEARTBEAT", rank=0, incarnation=1)
    assert [worker.rank for worker in store.coordinator.membership.lost()] == [0]


def test_heartbeat_of_another_client_counts_for_nobody() -> None:
    store = FakeStore(num_workers=2)
    worker = store.worker(0, client=CLIENT)
    beats = store.connect(role="heartbeat")
    for _ in range(20):
        beats.send("HEARTBEAT", rank=worker.rank, incarnation=worker.incarnation)
        store.pass_time(1.0)
    assert [lost.rank for lost in store.coordinator.membership.lost()] == [0]


def test_heartbeat_connection_is_for_heartbeats_alone() -> None:
    beats = FakeStore().connect(role="heartbeat")
    with pytest.raises(errors.UnexpectedMessage, match="heartbeat"):
        beats.ask("CREATE", m.Create(specs=()))


def test_lost_worker_that_speaks_again_is_live() -> None:
    store = FakeStore()
    worker = store.worker(0)
    store.pass_time(LIVENESS.silence_s + 1)
    assert store.coordinator.membership.lost()
    worker.commit(1)
    assert not store.coordinator.membership.lost()


def test_worker_that_left_is_no_worker() -> None:
    worker = FakeStore().worker(0)
    worker.ask("LEAVE")
    with pytest.raises(errors.NotAWorker, match="rank 0 has left"):
        worker.answer(worker.commit(1))
    worker.ask("LEAVE")  # once more is no error


def test_next_group_starts_when_all_have_left() -> None:
    store = FakeStore(num_workers=1, quorum=1)
    for incarnation in (1, 2):
        worker = store.worker()
        assert (worker.rank, worker.incarnation) == (0, incarnation)
        worker.committed(worker.commit(incarnation))
        worker.ask("LEAVE")


def test_lives_that_go_on_when_all_have_left_wait_for_nobody_and_change_nothing() -> None:
    """Their former ones died on their way out: the others do not come again."""
    store = FakeStore(num_workers=2)
    gone = [store.worker(rank) for rank in range(2)]
    requests = [(peer, peer.commit(1)) for peer in gone]
    assert [peer.committed(request).decision for peer, request in requests] == [1, 1]
    for peer in gone:
        peer.ask("LEAVE")
    again = []
    for rank in (1, 0):
        again.append(store.connect(role="worker"))
        joined = again[-1].joined(again[-1].send("JOIN", m.Join(rank=rank, goes_on=True)))
        assert (joined.rank, joined.incarnation, joined.round, joined.stop) == (rank, 2, 2, True)
        committed = again[-1].committed(again[-1].commit(2))
        assert (committed.late, committed.decision) == (True, 1)
    requests = [(peer, peer.send("BARRIER", m.Barrier(name="b", count=1))) for peer in again]
    assert all(peer.is_answered(request) for peer, request in requests)


def test_a_life_that_goes_on_waits_for_nobody_where_workers_come_and_go() -> None:
    store = FakeStore(num_workers=3, fewest=2)
    gone = [store.connect(role="worker") for _ in range(2)]
    requests = [(peer, peer.send("JOIN", m.Join())) for peer in gone]
    for peer, request in requests:
        peer.joined(request)
        peer.ask("LEAVE")
    again = store.connect(role="worker")
    assert again.joined(again.send("JOIN", m.Join(rank=0, goes_on=True))).stop


def test_a_life_that_goes_on_waits_no_longer_once_the_others_have_left() -> None:
    store = FakeStore(num_workers=3, fewest=2)
    gone = [store.connect(role="worker") for _ in range(2)]
    requests = [(peer, peer.send("JOIN", m.Join())) for peer in gone]
    for peer, request in requests:
        peer.joined(request)
    again, new = store.connect(role="worker"), store.connect(role="worker")
    asked = again.send("JOIN", m.Join(rank=2, goes_on=True))
    for peer in gone:
        assert not again.is_answered(asked)
        peer.ask("LEAVE")
    assert again.joined(asked).stop
    request = new.send("JOIN", m.Join())
    assert not new.is_answered(request)


@pytest.mark.parametrize("fewest", [1, None])
@pytest.mark.parametrize("had_ended", [False, True])
def test_a_group_whose_last_one_was_lost_before_its_end_has_not_ended(fewest: int | None, *, had_ended: bool) -> None:
    """Whoever is started again in its place trains on."""
    liveness = Liveness(lost="drop", rejoin_s=0.0)
    store = FakeStore(num_workers=1, fewest=fewest, liveness=liveness)
    lost = store.connect(role="worker")
    lost.joined(lost.send("JOIN", m.Join(rank=0)))
    lost.committed(lost.commit(1))
    lost.ask("STOP", m.Stop(version=1 if had_ended else 3))
    store.pass_time(2 * liveness.silence_s)
    again = store.connect(role="worker")
    joined = again.joined(again.send("JOIN", m.Join(rank=0, goes_on=True)))
    assert (joined.stop, joined.decision) == (had_ended, 1)
    committed = again.committed(again.commit(2))
    assert (committed.late, committed.decision) == (had_ended, 1 if had_ended else 2)


def test_a_life_that_goes_on_while_others_train_is_one_of_them() -> None:
    store = FakeStore(num_workers=2)
    left, other = (store.worker(rank) for rank in range(2))
    left.ask("LEAVE")
    again = store.connect(role="worker")
    assert not again.joined(again.send("JOIN", m.Join(rank=0, goes_on=True))).stop
    requests = [(peer, peer.commit(1)) for peer in (again, other)]
    assert [peer.committed(request).decision for peer, request in requests] == [1, 1]


def test_client_that_never_joined_is_no_worker() -> None:
    stranger = FakeStore().connect()
    with pytest.raises(errors.StaleIncarnation, match="never joined"):
        stranger.answer(stranger.commit(1))
    with pytest.raises(errors.StaleIncarnation, match="never joined"):
        stranger.ask("BARRIER", m.Barrier(count=1))


def test_newest_connection_of_a_client_is_the_one_that_speaks() -> None:
    """A commit that an older connection brings late must not take the answer away."""
    store = FakeStore()
    first = store.worker(0, client=CLIENT)
    second = store.connect(client=CLIENT, role="worker")
    assert first.closed_because == "its client has a newer connection"
    waiting = second.commit(1)
    other = store.worker(1)
    other.committed(other.commit(1))
    assert second.committed(waiting).decision == 1


def test_connection_whose_hello_comes_after_its_successors_is_closed() -> None:
    store = FakeStore()
    late = store.dial(client=CLIENT)
    store.connect(client=CLIENT)
    late.send("HELLO", m.Hello(client=CLIENT, nonce=NONCE))
    assert late.closed_because == "its client has a newer connection"


def test_new_life_joins_at_the_slowest_clock_when_rounds_are_each_workers_own() -> None:
    store = FakeStore(num_workers=3, quorum=1, staleness=UNBOUNDED)
    fast, slow, dead = (store.worker(rank) for rank in range(3))
    for worker, rounds in ((fast, 5), (slow, 3), (dead, 4)):
        for round in range(1, rounds + 1):
            worker.committed(worker.commit(round))
    dead.hang_up()
    store.pass_time(LIVENESS.detached_s + 0.5)
    assert store.connect(role="worker").join(2).round == 4


def test_worker_lost_error_names_rank_round_and_when_it_was_seen() -> None:
    store = FakeStore()
    alive, dead = store.worker(0), store.worker(1)
    dead.hang_up()
    waiting = alive.commit(1)
    store.pass_time(LIVENESS.detached_s + 1)
    error = failure_of(alive, waiting)
    assert isinstance(error, errors.WorkerLost)
    assert str(error) == "round 1 needs rank 1, which is lost: last seen 3.0 s ago, its last round was 0"
    assert error.details["rank"] == 1
    assert error.details["round"] == 1
