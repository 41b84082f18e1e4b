"""Workers that come and go: when they take part, who is told, and how few will do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from psstore import _core
from psstore.checkpoint.state import MembersRecord, StoreState
from psstore.errors import BadArgument, DeadlineExceeded, NotAWorker, RankTaken, TornRound
from psstore.protocol import roster
from psstore.protocol.membership import Liveness
from psstore.protocol.shares import Shares
from psstore.protocol.stops import NEVER
from psstore.server.job_state import JobState, Verdict
from psstore.server.store_state import restore_coordinator, store_state
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, failure_of, sgd

LIVENESS = Liveness()
LOST_AFTER_S = LIVENESS.detached_s + 0.5


def elastic(*, fewest: int = 1, most: int = 4, rejoin_s: float = 0.0) -> FakeStore:
    return FakeStore(num_workers=most, fewest=fewest, liveness=Liveness(lost="drop", rejoin_s=rejoin_s))


def arrive(store: FakeStore, rank: int | None = None, *, wait_s: float = 300.0) -> tuple[Peer, int]:
    """A worker that has asked to join, and the number of its request."""
    peer = store.connect(role="worker")
    return peer, peer.send("JOIN", m.Join(rank=rank, wait_s=wait_s))


def joined(peer: Peer, request: int) -> m.Joined:
    return peer.joined(request)


def arrived(store: FakeStore, rank: int | None = None) -> Peer:
    peer, request = arrive(store, rank)
    joined(peer, request)
    return peer


def members_of(store: FakeStore) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    log = store.coordinator.roster.log
    return [(one.version, m.members_after((), log[:number]), one.absent) for number, one in enumerate(log, 1)]


def test_one_that_comes_takes_part_from_the_next_round_on() -> None:
    store = elastic()
    one = arrived(store)
    late, request = arrive(store)
    assert not late.is_answered(request)
    first = one.commit(1, members=1)
    assert one.committed(first).members == (m.Members(version=1, came=(1,)),)
    told = joined(late, request)
    assert (told.rank, told.round, told.decision) == (1, 2, 1)
    assert told.members == (m.Members(version=0, came=(0,)), m.Members(version=1, came=(1,)))
    second = one.commit(2, members=2)
    assert not one.is_answered(second), "the other is waited for"
    late.commit(2, members=2)
    assert one.committed(second).members == ()


def test_one_that_leaves_is_missing_in_the_round_that_it_was_in() -> None:
    store = elastic()
    one = arrived(store)
    late, request = arrive(store)
    one.committed(one.commit(1))
    joined(late, request)
    late.ask("LEAVE")
    told = one.committed(one.commit(2, members=2)).members
    assert told == (m.Members(version=2, went=(1,), absent=(1,)),)


def test_one_that_is_lost_is_dropped_when_nobody_came_in_its_place() -> None:
    store = elastic(rejoin_s=5.0)
    one = arrived(store)
    other, request = arrive(store)
    one.committed(one.commit(1))
    joined(other, request)
    waiting = one.commit(2)
    other.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert not one.is_answered(waiting)
    store.pass_time(5.0)
    assert one.committed(waiting).members[-1].absent == (1,)
    back = store.connect(client=other.client, role="worker")
    with pytest.raises(NotAWorker, match="the others went on without it"):
        back.ask("COMMIT", m.Commit(round=2))


def test_a_lost_ones_place_is_taken_at_once() -> None:
    """It is waited for."""
    store = elastic(rejoin_s=60.0)
    one = arrived(store)
    other, request = arrive(store)
    one.committed(one.commit(1))
    joined(other, request)
    waiting = one.commit(2, members=2)
    other.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert store.coordinator.membership.lost()
    again = arrived(store)
    again.commit(2)
    assert one.committed(waiting).members == ()
    assert members_of(store) == [(0, (0,), ()), (1, (0, 1), ())]


def test_no_round_is_decided_without_the_fewest() -> None:
    store = elastic(fewest=2)
    (one, request_of_one), (two, request_of_two) = arrive(store), arrive(store)
    joined(one, request_of_one)
    joined(two, request_of_two)
    two.ask("LEAVE")
    waiting = one.commit(1)
    assert not one.is_answered(waiting), "it is alone, and two are the fewest"
    three, request = arrive(store)
    assert one.committed(waiting).members[-1] == m.Members(version=1, came=(2,), went=(1,), absent=(1,))
    assert joined(three, request).rank == 2


def test_a_first_round_waits_for_the_fewest() -> None:
    store = elastic(fewest=3)
    peers = [arrive(store) for _ in range(2)]
    assert not any(peer.is_answered(request) for peer, request in peers)
    peers.append(arrive(store))
    assert [joined(peer, request).rank for peer, request in peers] == [0, 1, 2]
    assert members_of(store) == [(0, (0, 1, 2), ())]


def test_whoever_waits_too_long_hears_for_what() -> None:
    store = elastic(fewest=2)
    alone, request = arrive(store, wait_s=7.0)
    store.pass_time(8.0)
    error = failure_of(alone, request)
    assert isinstance(error, DeadlineExceeded)
    assert "rank 0 waited 7 s for 2 workers to be there" in error.message


def test_whoever_waits_too_long_for_the_open_round_hears_who_keeps_it_open() -> None:
    store = elastic(fewest=2)
    (one, request_of_one), (two, request_of_two) = arrive(store), arrive(store)
    joined(one, request_of_one)
    joined(two, request_of_two)
    late, request = arrive(store, wait_s=7.0)
    store.pass_time(5.0)
    two.commit(1, members=1)
    store.pass_time(3.0)
    error = failure_of(late, request)
    assert isinstance(error, DeadlineExceeded)
    assert "rank 2 waited 7 s for rank 0 (in round 1, last seen 7.0 s ago) to end the open round" in error.message
    assert error.details["rank"] == 0


def test_whoever_waits_and_is_gone_is_not_let_in() -> None:
    store = elastic()
    one = arrived(store)
    late, _ = arrive(store, rank=2)
    late.hang_up()
    assert one.committed(one.commit(1, members=1)).members == ()
    again, request = arrive(store, rank=2)
    one.committed(one.commit(2))
    assert joined(again, request).rank == 2


def test_ranks_are_one_workers_each() -> None:
    store = elastic(most=2)
    arrived(store, rank=1)
    arrive(store, rank=0)
    with pytest.raises(RankTaken, match="waits for its first round"):
        store.connect(role="worker").control("JOIN", m.Join(rank=0), m.Joined)
    with pytest.raises(BadArgument, match=r"rank 2 is not in \[0, 2\)"):
        store.connect(role="worker").control("JOIN", m.Join(rank=2), m.Joined)


def test_newcomers_are_told_when_the_round_before_is_done() -> None:
    """What an early commit has promised may not come."""
    store = elastic()
    one = arrived(store)
    one.create(sgd("w"))
    late, request = arrive(store)
    one.committed(one.commit(1, present=[1], early=True))
    assert not late.is_answered(request)
    one.ask("LEAVE")
    assert isinstance(failure_of(late, request), TornRound)


def test_whoever_asks_again_before_the_round_is_done_is_one_worker() -> None:
    store = elastic()
    one = arrived(store)
    one.create(sgd("w"))
    late, _ = arrive(store)
    one.committed(one.commit(1, present=[1], early=True))
    late.hang_up()
    other, request_of_other = arrive(store)
    again = store.connect(client=late.client, role="worker")
    request = again.send("JOIN", m.Join())
    one.finished(one.finish(1))
    assert again.joined(request).rank == 1
    assert not other.is_answered(request_of_other)
    assert members_of(store)[-1] == (1, (0, 1), ())


# ---- a log that becomes long ----


def comings_and_goings(count: int) -> list[m.Members]:
    """A thousand workers, one of which is another one after each decision."""
    log = [m.Members(version=0, came=tuple(range(1000)))]
    for version in range(1, count):
        gone, came = (version - 1) % 1000, (version - 2) % 1000
        log.append(m.Members(version=version, came=(came,) if version > 1 else (), went=(gone,), absent=(gone,)))
    return log


def test_a_change_is_few_bytes_however_many_workers_there_are() -> None:
    log = comings_and_goings(10_000)
    assert len(m.members_after((), log)) == 999
    assert max(len(m.encode_body(one)) for one in log[1:]) < 20
    record = MembersRecord(version=123_456, went=(999,), absent=(999,))
    assert len(msgspec.json.encode(record)) < 60


def test_whoever_joins_asks_for_what_one_answer_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_TOLD", 50 * (roster.NUMBERS + 3))
    store = elastic(most=2000)
    log = comings_and_goings(500)[1:]
    store.coordinator.roster.restore(log)
    peer, request = arrive(store)
    known: list[m.Members] = []
    told = joined(peer, request)
    while told.more:
        known += told.members
        told = joined(peer, peer.send("JOIN", m.Join(members=len(known))))
    assert [*known, *told.members] == store.coordinator.roster.log
    assert peer.incarnation == 1, "it is one worker"
    assert joined(peer, peer.send("JOIN", m.Join(members=len(known) + len(told.members)))).members == ()


def test_one_answer_has_room_for_what_it_tells() -> None:
    """Of numbers that are as long as they can be."""
    store = elastic()
    store.coordinator.roster.restore([m.Members(version=(1 << 40) + n, went=((1 << 32) - 1,)) for n in range(300_000)])
    told = store.coordinator.roster.since(0)
    assert 100_000 < len(told) < 300_000
    assert len(m.encode_body(m.Committed(round=1, decision=1, next_round=2, decisions=(), last=1, members=told))) < (
        _core.MAX_BODY_BYTES // 2
    )


class Counted(list[m.Members]):
    """A log that counts how often its entries are read."""

    num_read = 0

    def __iter__(self) -> Iterator[m.Members]:
        for one in super().__iter__():
            self.num_read += 1
            yield one

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_long_log_is_read_once() -> None:
    log = Counted(comings_and_goings(1000))
    shares = Shares(10_000_000, (), batch_size=8)
    shares.advance(999, log)
    assert len(shares.of(500)) == 8
    assert log.num_read < 50 * len(log)


# ---- checkpoints ----


def restored(
    state: StoreState, *, most: int = 4, fewest: int | None = 1, rejoin_s: float = 0.0, goes_on: bool = False
) -> FakeStore:
    store = FakeStore(num_workers=most, fewest=fewest, liveness=Liveness(lost="drop", rejoin_s=rejoin_s))
    read = msgspec.json.decode(msgspec.json.encode(state), type=StoreState)
    restore_coordinator(store.coordinator, read, [], without_value=(), goes_on=goes_on)
    return store


def of_two(store: FakeStore) -> tuple[Peer, Peer]:
    """Workers that have ended their second round."""
    one = arrived(store)
    late, request = arrive(store)
    one.committed(one.commit(1))
    joined(late, request)
    for peer, commit in [(peer, peer.commit(2, members=2)) for peer in (one, late)]:
        peer.committed(commit)
    return one, late


def test_who_was_there_when_the_store_went_back_is_waited_for() -> None:
    store = elastic()
    of_two(store)
    again = restored(store_state(store.coordinator, lineage="a store"), goes_on=True)
    again.coordinator.all_went(again.now)  # another process leads already
    again.pass_time(1000.0)  # as long as nobody is there who would wait for them
    first = arrived(again, rank=0)
    waiting = first.commit(3, members=2)
    again.pass_time(LIVENESS.silence_s - 1.0)
    assert not first.is_answered(waiting)
    second = arrived(again, rank=1)
    second.commit(3, members=2)
    assert first.committed(waiting).members == ()


def test_who_does_not_come_back_to_a_store_that_went_back_is_lost() -> None:
    store = elastic()
    of_two(store)
    again = restored(store_state(store.coordinator, lineage="a store"), goes_on=True, rejoin_s=5.0)
    again.pass_time(1000.0)
    newcomer, request = arrive(again, rank=3)
    first = arrived(again, rank=0)
    waiting = first.commit(3, members=2)
    for seconds in (LIVENESS.silence_s - 1.0, 1.5, 4.0):
        again.pass_time(seconds)
        first.ask("STOP", m.Stop(version=NEVER))  # it is there
        assert not first.is_answered(waiting)
    assert [worker.rank for worker in again.coordinator.membership.lost()] == [1]
    again.pass_time(1.0)
    assert first.committed(waiting).members == (m.Members(version=3, came=(3,), went=(1,), absent=(1,)),)
    assert joined(newcomer, request).round == 4


def test_who_had_left_before_the_store_went_back_is_not_waited_for() -> None:
    store = elastic()
    _, late = of_two(store)
    late.ask("LEAVE")
    again = restored(store_state(store.coordinator, lineage="a store"), goes_on=True)
    job_state = JobState(num_workers=4, patience_s=60.0, elastic=True)
    assert job_state.update(again.coordinator.counters(again.now), again.now) is None, "the job is not done"
    first = arrived(again, rank=0)
    told = first.committed(first.commit(3, members=2)).members
    assert told == (m.Members(version=3, went=(1,), absent=(1,)),)


def reason_of(verdict: Verdict | None) -> str:
    """Why the job failed."""
    assert verdict is not None
    assert verdict.reason is not None
    return verdict.reason


@pytest.mark.parametrize("fewest", [1, None], ids=["come and go", "a fixed number"])
def test_a_job_of_whose_workers_nobody_returns_to_a_store_that_went_back_fails(fewest: int | None) -> None:
    store = FakeStore(num_workers=2, fewest=fewest)
    first, second = arrived(store, rank=0), arrive(store, rank=1)
    first.commit(1)
    joined(*second)
    state = store_state(store.coordinator, lineage="a store")
    again = restored(state, goes_on=True, most=2, fewest=fewest)
    job_state = JobState(num_workers=2, patience_s=60.0, elastic=fewest is not None)

    def verdict(*, may_come: bool = True) -> Verdict | None:
        return job_state.update(again.coordinator.counters(again.now), again.now, may_come=may_come)

    assert verdict(may_come=False) is None
    again.pass_time(60.0)
    assert verdict(may_come=False) is None, "another shard is not there yet"
    again.pass_time(59.0)
    assert verdict() is None
    again.pass_time(1.0)
    assert reason_of(verdict()).startswith("ranks 0, 1 went without leaving, and nobody came back within 60 s")


def test_a_job_whose_last_worker_was_lost_in_the_middle_of_it_is_not_done() -> None:
    store, job_state = elastic(), JobState(num_workers=4, patience_s=60.0, elastic=True)

    def verdict() -> Verdict | None:
        return job_state.update(store.coordinator.counters(store.now), store.now)

    first, second = of_two(store)
    second.ask("LEAVE")
    first.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert verdict() is None
    assert job_state.reminder(store.coordinator.counters(store.now), store.now) == "waiting for rank 0 (lost)"
    store.pass_time(59.0)
    again = arrived(store, rank=0)
    assert verdict() is None, "it is there again"
    again.hang_up()
    store.pass_time(LOST_AFTER_S)
    assert verdict() is None
    store.pass_time(60.0)
    assert reason_of(verdict()).startswith("rank 0 went without leaving, and nobody came back within 60 s")


def test_who_was_let_in_by_the_decision_that_the_store_goes_back_to_is_waited_for() -> None:
    store = elastic()
    one = arrived(store)
    arrive(store, rank=2)
    cuts: list[StoreState] = []
    hand_ins = store.coordinator.rounds.hand_ins
    hand_ins.want_next(0, on_made=lambda: cuts.append(store_state(store.coordinator, lineage="a store")))
    one.committed(one.commit(1))
    again = restored(cuts[0], goes_on=True)
    first = arrived(again, rank=0)
    waiting = first.commit(2, members=2)
    assert not first.is_answered(waiting)
    second = arrived(again, rank=2)
    second.commit(2, members=2)
    assert first.committed(waiting).members == ()


def test_a_store_that_goes_on_knows_who_came_and_went() -> None:
    store = elastic()
    one = arrived(store)
    late, request = arrive(store)
    one.committed(one.commit(1))
    joined(late, request)
    late.ask("LEAVE")
    one.committed(one.commit(2))
    again = restored(store_state(store.coordinator, lineage="a store"))
    assert again.coordinator.roster.log == store.coordinator.roster.log
    two, request_of_two = arrive(again, rank=3)
    assert joined(two, request_of_two).members[-1] == m.Members(version=2, came=(3,), went=(0,))


def test_a_checkpoint_that_lists_all_members_of_each_change_is_read() -> None:
    """As they did once."""
    state = store_state(elastic().coordinator, lineage="a store")
    written = b'[{"absent":[],"members":[0,1],"version":0},{"absent":[1],"members":[0,2],"version":7}]'
    records = msgspec.json.decode(written, type=tuple[MembersRecord, ...])
    store = restored(replace(state, decision=9, members=records))
    assert store.coordinator.roster.log == [
        m.Members(version=0, came=(0, 1)),
        m.Members(version=7, came=(2,), went=(1,), absent=(1,)),
    ]
    assert members_of(store) == [(0, (0, 1), ()), (7, (0, 2), (1,))]


def test_workers_come_and_go_in_a_store_that_had_a_fixed_number_of_them() -> None:
    """All of them took part until then, for whoever comes later, too."""
    fixed = FakeStore(num_workers=2)
    one, two = fixed.worker(0), fixed.worker(1)
    requests = one.commit(1), two.commit(1)
    for peer, request in zip((one, two), requests, strict=True):
        peer.committed(request)
    store = restored(store_state(fixed.coordinator, lineage="a store"))
    first = arrived(store, rank=2)
    first.committed(first.commit(2))
    assert members_of(store) == [(0, (0, 1), ()), (1, (2,), ())]
    late, request = arrive(store)
    first.committed(first.commit(3))
    shares = Shares(12, (), batch_size=2)
    shares.advance(3, joined(late, request).members)
    assert (shares.epoch, shares.of(2)) == (0, [10, 11])


def test_a_store_whose_number_of_workers_is_fixed_for_a_while_tells_who_took_part_then() -> None:
    store = elastic()
    of_two(store)
    fixed = restored(store_state(store.coordinator, lineage="a store"), most=3, fewest=None)
    peers = [fixed.connect(role="worker") for _ in range(3)]
    told = [peer.joined(peer.send("JOIN", m.Join(rank=rank))).members for rank, peer in enumerate(peers)]
    for peer, request in [(peer, peer.commit(3, members=3)) for peer in peers]:
        assert peer.committed(request).members == ()
    so_far = [(0, (0,), ()), (1, (0, 1), ()), (2, (0, 1, 2), ())]
    assert members_of(fixed) == so_far
    assert set(told) == {tuple(fixed.coordinator.roster.log)}
    last = restored(store_state(fixed.coordinator, lineage="a store"))
    arrived(last, rank=3)
    assert members_of(last) == [*so_far, (3, (3,), ())]


def test_a_store_whose_fixed_number_of_workers_stays_has_no_log() -> None:
    fixed = FakeStore(num_workers=2)
    for peer, request in [(peer, peer.commit(1)) for peer in (fixed.worker(0), fixed.worker(1))]:
        peer.committed(request)
    again = restored(store_state(fixed.coordinator, lineage="a store"), most=2, fewest=None)
    assert again.coordinator.roster.log == []
