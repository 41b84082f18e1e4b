"""What a shard's port answers by itself, and what it leaves to the service, with time by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from psstore import errors
from psstore.protocol.service import ShardService
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, sgd, table_of, tensor_of

NOTHING = m.Carry()


def left_to_the_service() -> Any:
    """Counts the frames that come out of ports."""
    return mock.patch.object(ShardService, "frame", autospec=True, side_effect=ShardService.frame)


def worker_with_tensor(store: FakeStore) -> tuple[Peer, Tensor]:
    worker = store.worker(0)
    return worker, tensor_of(worker.create(sgd("w")).tensors[0])


def test_desk_answers_plain_writes_and_pulls_without_the_service() -> None:
    store = FakeStore()
    peer = store.connect()
    tensor = tensor_of(peer.create(TensorSpec(name="n", shape=(1,), rule="add")).tensors[0])
    with left_to_the_service() as frame:
        for sequence in (1, 2, 2):
            peer.ask("ADD", values=[5.0], table=table_of(tensor, num_bytes=4), sequence=sequence)
        pulled = peer.ask("PULL", table=table_of(tensor))
        assert frame.call_count == 0
    assert peer.payloads[pulled.request] == b"\x00\x00\x20\x41"


def test_desk_answers_a_push_once_its_body_is_known_to_carry_nothing() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    with left_to_the_service() as frame:
        for count in (2, 2):  # announced and complete, the first time only
            push(worker, tensor, round=1)
            assert frame.call_count == count
    assert store.shards[0].stats()["pushes"] == 2


def test_desk_answers_who_brings_the_decision_that_its_process_has_made() -> None:
    """All workers pull with the same words after a commit, and the shard was told before of what they say."""
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    left = []
    for round in (1, 2):
        push(worker, tensor, round=round)
        committed = worker.committed(worker.commit(round, [tensor.id], since=round - 1))
        store.carry_out(0, store.services[0].catch_up(store.now))
        with left_to_the_service() as frame:
            brought = m.Carry(decisions=committed.decisions[-1:], at_least=round, wait_s=9.0)
            assert worker.ask("PULL", brought, table=table_of(tensor)).sequence == round
            left.append(frame.call_count)
    assert left == [1, 0], "how long they wait it knows from the first"


def test_desk_answers_early_pushes_that_bring_the_decision_that_its_process_has_made() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    committed = worker.committed(worker.commit(1, [tensor.id], early=True))
    store.carry_out(0, store.services[0].catch_up(store.now))
    with left_to_the_service() as frame:
        body = m.Carry(decisions=committed.decisions)
        worker.ask("PUSH", body, values=[1.0] * 4, table=table_of(tensor, num_bytes=16), round=1)
        assert frame.call_count == 0


def test_desk_goes_on_knowing_what_is_said_in_every_round() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    for round in range(1, 40):
        with left_to_the_service() as frame:
            push(worker, tensor, round=round)
            assert frame.call_count == 0
        worker.committed(worker.commit(round, [tensor.id]))
        store.carry_out(0, store.services[0].catch_up(store.now))


def test_desk_leaves_pushes_of_an_older_life_to_the_service() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    store.pass_time(60.0)
    store.worker(0)
    with pytest.raises(errors.StaleIncarnation):
        push(worker, tensor, round=1)


def test_desk_leaves_writes_that_somebody_waits_for_to_the_service() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    push(worker, tensor, round=1)
    reader = store.connect()
    empty = tensor_of(worker.create(TensorSpec(name="v", shape=(4,), rule="assign", zeros=False)).tensors[0])
    waiting = reader.send("PULL", m.Carry(wait_s=9.0), table=table_of(empty))
    worker.ask("ASSIGN", values=[1.0] * 4, table=table_of(empty, num_bytes=16), sequence=1)
    assert reader.answer(waiting).table.statuses() == [0]


def test_desk_of_a_draining_shard_answers_nothing() -> None:
    store = FakeStore(num_workers=1)
    worker, tensor = worker_with_tensor(store)
    store.services[0].drain()
    with pytest.raises(errors.ShuttingDown):
        worker.ask("PULL", table=table_of(tensor))


def push(worker: Peer, tensor: Tensor, *, round: int) -> None:
    worker.ask("PUSH", NOTHING, values=[1.0] * 4, table=table_of(tensor, num_bytes=16), round=round)
