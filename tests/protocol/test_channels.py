"""Several connections of one client to one shard: what each of them may say, and what they share."""

from __future__ import annotations

import pytest

from psstore import errors
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m
from tests.protocol.support import FakeStore, Peer, sgd, table_of, tensor_of

CLIENT = "c" * 32


def channels(store: FakeStore, count: int = 2) -> list[Peer]:
    return [store.connect(client=CLIENT, role="worker", channel=channel) for channel in range(count)]


def created(peer: Peer, spec: TensorSpec) -> Tensor:
    return tensor_of(peer.create(spec).tensors[0])


def test_channels_stand_side_by_side_and_each_has_its_newest_connection() -> None:
    store = FakeStore()
    first, second = channels(store)
    newer = store.connect(client=CLIENT, role="worker", channel=1)
    assert first.closed_because is None
    assert second.closed_because == "its client has a newer connection"
    newer.ask("STATS")


@pytest.mark.parametrize("channel", [-1, 64])
def test_channel_that_there_can_not_be_is_a_bad_body(channel: int) -> None:
    with pytest.raises(errors.BadBody, match="there are 0 to 63"):
        FakeStore().connect(channel=channel)


def test_each_channel_numbers_its_own_writes() -> None:
    store = FakeStore()
    first, second = channels(store)
    sums = [created(first, TensorSpec(name=name, shape=(4,), rule="add")) for name in ("a", "b")]
    for peer, tensor in zip((first, second), sums, strict=True):
        for sequence in (1, 2, 2):  # the last again
            peer.ask("ADD", values=[1.0] * 4, table=table_of(tensor, num_bytes=16), sequence=sequence)
    again = store.dial(client=CLIENT)
    welcome = again.control("HELLO", m.Hello(client=CLIENT, role="worker", channel=1), m.Welcome)
    assert welcome.last_sequence == 2
    assert [first.pulled(first.pull(tensor)) for tensor in sums] == [[2.0] * 4] * 2


def test_pushes_of_one_worker_come_over_all_of_its_channels() -> None:
    store = FakeStore(num_workers=1)
    first, second = channels(store)
    joined = first.join()
    second.ask("ATTACH", m.Attach(ticket=joined.ticket))
    tensors = [created(first, sgd(name, zeros=True)) for name in ("a", "b")]
    for peer, tensor in zip((first, second), tensors, strict=True):
        peer.rank, peer.incarnation = joined.rank, joined.incarnation
        peer.push(tensor, [1.0] * 4, round=1)
    committed = first.committed(first.commit(1, [tensor.id for tensor in tensors], hypers={0: {"lr": 1.0}}))
    for tensor in tensors:
        assert second.pulled(second.pull(tensor, decisions=committed.decisions)) == [-1.0] * 4


def test_coordinator_is_spoken_to_on_the_first_channel() -> None:
    store = FakeStore()
    _, second = channels(store)
    with pytest.raises(errors.UnexpectedMessage, match="channel 0"):
        second.ask("JOIN", m.Join(rank=0, num_workers=2))
    assert second.closed_because


def test_worker_is_there_as_long_as_its_first_channel_is() -> None:
    store = FakeStore(num_workers=1)
    first, second = channels(store)
    first.join()
    second.hang_up()
    store.pass_time(5.0)
    assert store.coordinator.counters(store.now)["workers_live"] == 1
    first.hang_up()
    store.pass_time(60.0)
    assert store.coordinator.counters(store.now)["workers_lost"] == 1
