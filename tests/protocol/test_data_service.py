"""What a shard's compiled data service answers by itself, and what comes out for policy, with time by hand."""

from __future__ import annotations

import math
import struct
from typing import Any
from unittest import mock

import pytest

from psstore import _core, errors
from psstore.protocol.service import ShardService
from psstore.protocol.shard_facts import ShardFacts
from psstore.protocol.signing import Signer
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, carrying, sgd, table_of, tensor_of

NOTHING = m.Carry()


def left_to_the_service() -> Any:
    """Counts the frames that come out of ports."""
    return mock.patch.object(ShardService, "frame", autospec=True, side_effect=ShardService.frame)


def worker_with_tensor(store: FakeStore) -> tuple[Peer, Tensor]:
    worker = store.worker(0)
    return worker, tensor_of(worker.create(sgd("w")).tensors[0])


def test_plain_writes_and_pulls_are_answered_without_the_service() -> None:
    store = FakeStore()
    peer = store.connect()
    tensor = tensor_of(peer.create(TensorSpec(name="n", shape=(1,), rule="add")).tensors[0])
    with left_to_the_service() as frame:
        for sequence in (1, 2, 2):
            peer.ask("ADD", values=[5.0], table=table_of(tensor, num_bytes=4), sequence=sequence)
        pulled = peer.ask("PULL", table=table_of(tensor))
        assert frame.call_count == 0
    assert peer.payloads[pulled.request] == b"\x00\x00\x20\x41"


def test_pushes_that_carry_nothing_are_answered_without_the_service() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    with left_to_the_service() as frame:
        push(worker, tensor, round=1)
        push(worker, tensor, round=1)
        assert frame.call_count == 0
    assert store.shards[0].stats()["pushes"] == 2


def test_a_decision_comes_out_once_and_its_request_goes_back() -> None:
    """A shard other than the coordinator's hears of the decision from the first who brings it."""
    store = FakeStore(num_workers=1, num_shards=2)
    worker = store.worker(0)
    elsewhere = store.connect(client=worker.client, shard=1, role="worker")
    assert worker.ticket is not None
    elsewhere.ask("ATTACH", m.Attach(ticket=worker.ticket))
    committed = worker.committed(worker.commit(1))
    for expected in (1, 0):
        with left_to_the_service() as frame:
            brought = carrying(decisions=committed.decisions, at_least=1, wait_s=9.0)
            assert elsewhere.ask("PULL", brought).sequence == 1
            assert frame.call_count == expected


@pytest.mark.parametrize("early", [False, True])
def test_decision_that_its_own_process_has_made_is_no_news(early: bool) -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    if not early:
        push(worker, tensor, round=1)
    committed = worker.committed(worker.commit(1, [tensor.id], early=early))
    store.carry_out(0, store.services[0].catch_up(store.now))
    with left_to_the_service() as frame:
        body = carrying(decisions=committed.decisions)
        if early:
            worker.ask("PUSH", body, values=[1.0] * 4, table=table_of(tensor, num_bytes=16), round=1)
        else:
            assert worker.ask("PULL", body, table=table_of(tensor)).sequence == 1
        assert frame.call_count == 0


def test_body_that_announces_more_than_it_brings_ends_the_connection() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    committed = worker.committed(worker.commit(1))
    with pytest.raises(errors.BadBody, match="newest is 7, and its decisions end at 1"):
        worker.ask("PULL", m.Carry(decisions=committed.decisions, newest=7), table=table_of(tensor))
    assert worker.closed_because


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"x" * 39, "expected 40 bytes or more, got 39"),
        (struct.pack("<QQQdd", 0, 0, 0, -1.0, 1.0), "wait_s is -1"),
        (struct.pack("<QQQdd", 0, 0, 0, math.nan, 1.0), "wait_s is"),
        (struct.pack("<QQQdd", 0, 0, 1, 0.0, 1.5), "factor is 1.5"),
        (struct.pack("<QQQdd", 5, 0, 0, 0.0, 1.0), "newest is 5, and decisions are 0 bytes"),
        (struct.pack("<QQQdd", 0, 0, 0, 0.0, 1.0) + b"x", "newest is 0, and decisions are 1 bytes"),
        (struct.pack("<QQQdd", 5, 0, 0, 0.0, 1.0) + b"x", "body of"),
    ],
)
def test_bodies_that_are_none_end_the_connection(body: bytes, match: str) -> None:
    store = FakeStore(num_workers=1)
    peer = store.connect()
    with pytest.raises(errors.BadBody, match=match):
        peer.ask("PULL", body)
    assert peer.closed_because


def test_push_that_brings_a_decision_without_room_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    committed = worker.committed(worker.commit(1, since=0))
    monkeypatch.setattr(ShardFacts, "take", mock.Mock(side_effect=errors.OutOfMemory("no room")))
    body = carrying(decisions=committed.decisions)
    with pytest.raises(errors.OutOfMemory):
        worker.ask("PUSH", body, values=[1.0] * 4, table=table_of(tensor, num_bytes=16), round=2)
    assert worker.closed_because is None
    worker.ask("PULL", table=table_of(tensor))


def test_push_of_an_older_life_is_refused() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    store.pass_time(60.0)
    store.worker(0)
    with pytest.raises(errors.StaleIncarnation):
        push(worker, tensor, round=1)


def test_stats_bring_back_what_they_are_sent() -> None:
    peer = FakeStore().connect()
    told = peer.control("STATS", m.Stats(padding="." * 20_000), m.Statistics)
    assert told.padding == "." * 20_000
    assert told.counters["shard"] == 0


def test_what_workers_move_and_how_long_their_reads_wait_is_counted_by_rank() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    waiting = worker.pull(tensor, at_least=1, wait_s=9.0)
    for waited_s in (0.5, 1.0):
        store.now += 0.5
        assert store.services[0].data.traffic(store.now)[0][-1] == waited_s
    committed = worker.committed(worker.commit(1, [tensor.id], hypers={0: {"lr": 1.0}}))
    worker.pulled(worker.pull(tensor, decisions=committed.decisions))
    worker.pulled(waiting)
    store.now += 0.5
    assert store.services[0].data.traffic(store.now) == {0: (16, 2 * 16, 0.0, 0.0, 1.0)}


def test_write_answers_the_read_of_another_connection_that_waits_for_it() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    reader = store.connect()
    empty = tensor_of(worker.create(TensorSpec(name="v", shape=(4,), rule="assign", zeros=False)).tensors[0])
    waiting = reader.send("PULL", m.Carry(wait_s=9.0), table=table_of(empty))
    worker.ask("ASSIGN", values=[1.0] * 4, table=table_of(empty, num_bytes=16), sequence=1)
    assert reader.answer(waiting).table.statuses() == [0]


def test_draining_shard_answers_nothing() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    store.services[0].drain()
    with pytest.raises(errors.ShuttingDown):
        worker.ask("PULL", table=table_of(tensor))


def push(worker: Peer, tensor: Tensor, *, round: int) -> None:
    worker.ask("PUSH", NOTHING, values=[1.0] * 4, table=table_of(tensor, num_bytes=16), round=round)


# ---- readers that hold decisions ----


def read_at(peer: Peer, tensor: Tensor, *, reader: int, at: int) -> bytes:
    pulled = peer.ask("PULL", m.Carry(at_least=at), table=table_of(tensor), round=at, sequence=reader)
    return bytes(peer.payloads[pulled.request])


def train(store: FakeStore, worker: Peer, tensor: Tensor, *, round: int) -> None:
    push(worker, tensor, round=round)
    worker.committed(worker.commit(round))
    store.carry_out(0, store.services[0].catch_up(store.now))


def test_a_reader_holds_the_version_that_the_shard_was_at() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    reader = store.connect()
    with left_to_the_service() as frame:
        assert reader.ask("HOLD", sequence=5).sequence == 0
        assert frame.call_count == 0
    before = read_at(reader, tensor, reader=5, at=0)
    train(store, worker, tensor, round=1)
    assert read_at(reader, tensor, reader=5, at=0) == before
    other = store.connect()
    assert read_at(other, tensor, reader=5, at=0) == before, "over another connection of its client"
    assert reader.ask("FREE", sequence=5).op == _core.OPS["FREED"]
    with pytest.raises(errors.VersionGone, match="version 0 is not kept on shard 0, which is at 1"):
        read_at(reader, tensor, reader=5, at=0)


def test_who_reads_nothing_for_a_minute_holds_nothing() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    reader = store.connect()
    reader.ask("HOLD", sequence=5)
    store.pass_time(50.0)
    train(store, worker, tensor, round=1)
    read_at(reader, tensor, reader=5, at=0)
    store.pass_time(50.0)
    read_at(reader, tensor, reader=5, at=0)
    store.pass_time(61.0)
    assert store.services[0].data.num_holds == 0
    with pytest.raises(errors.VersionGone):
        read_at(reader, tensor, reader=5, at=0)


def test_the_end_of_its_connection_ends_what_a_reader_holds() -> None:
    store = FakeStore(num_workers=1)
    reader = store.connect()
    reader.ask("HOLD", sequence=5)
    assert store.services[0].data.num_holds == 1
    reader.hang_up()
    assert store.services[0].data.num_holds == 0


def test_readers_have_numbers_and_there_are_not_too_many() -> None:
    store = FakeStore(num_workers=1)
    reader = store.connect()
    with pytest.raises(errors.BadArgument, match="sequence"):
        reader.ask("HOLD")
    for number in range(1, 257):
        reader.ask("HOLD", sequence=number)
    with pytest.raises(errors.Overloaded, match="256 readers"):
        reader.ask("HOLD", sequence=257)
    reader.ask("HOLD", sequence=256)
    reader.ask("FREE", sequence=1)
    reader.ask("HOLD", sequence=257)


# ---- what a shard writes ----


def test_a_shard_writes_what_the_coordinator_has_signed_and_nothing_else() -> None:
    store = FakeStore(num_workers=1)
    stranger = store.connect()
    fact = m.SaveFact(url="/etc", version=0, attempt="0", reader=1, tensors=())
    forged = Signer(b"k" * 32).sign(fact)
    with pytest.raises(errors.PsstoreError) as told:
        stranger.ask("SAVE", m.Save(fact=forged))
    assert isinstance(told.value, (errors.BadSignature, errors.BadArgument))
