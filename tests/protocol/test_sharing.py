"""Values that lie in shared memory: when a frame may say so, how long they stay, and what becomes of lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from psstore import _core
from psstore.errors import BadHeader, UnexpectedMessage
from psstore.protocol import sharing
from psstore.protocol.connection import Connection
from psstore.types import Tensor
from psstore.wire import messages as m
from tests.protocol.support import F32, OPS, FakeStore, Peer, carrying, sgd, tensor_of

LARGE = 1 << 15  # elements of 128 KiB
SHARED = _core.FLAG_SHARED


class OpenHanded:
    """Gives each connection its arena as soon as it asks."""

    def __init__(self) -> None:
        self.on_shared: Callable[[Connection, _core.PushArena], None] = lambda connection, arena: None
        self.values = _core.ValueArena()
        self.latest: _core.PushArena

    def offer(self, connection: Connection, asked: m.Share) -> m.Shared:
        self.latest = _core.PushArena(1 << 20)
        connection.protocol.share(self.latest)
        return m.Shared()

    own_file = None

    def lend(self, standby: Connection, *, owner: Connection | None, file: int, mapped: Callable[[], None]) -> m.Shared:
        raise AssertionError("nobody follows")

    def withdraw(self, connection: Connection) -> None:
        pass

    def memory(self) -> _core.ClientMemory:
        pushes, control = self.latest.filenos()
        return _core.ClientMemory(values=self.values.fileno(), pushes=pushes, control=control)


class Sharer(NamedTuple):
    """A worker, and what its connection shares with the shard."""

    peer: Peer
    memory: _core.ClientMemory

    def ask_for(self, tensor: Tensor, **fields: Any) -> _core.Frame:
        table = _core.SliceTable([(tensor.key(0), 0, F32)])
        return self.peer.ask("PULL", carrying(**fields), table=table, flags=SHARED)

    def read(self, answer: _core.Frame) -> float:
        """The value that all elements have."""
        values = np.empty(LARGE, np.float32)
        self.memory.read(answer.table, _core.Segments([values], writable=True))
        (value,) = set(values.tolist())
        return float(value)

    def write(self, tensor: Tensor, value: float, request: int) -> _core.SliceTable:
        table = _core.SliceTable([(tensor.key(0), 4 * LARGE, F32)])
        values = _core.Segments([np.full(LARGE, value, np.float32)])
        written = self.memory.write(table, values, request)
        assert written is not None
        return written

    def push(self, tensor: Tensor, value: float, round_: int) -> None:
        request = 1000 + round_
        where = self.write(tensor, value, request)
        parts: Any = {"table": where, "payload_bytes": where.payload_bytes, "flags": SHARED, "round": round_}
        answer = self.peer.ask("PUSH", m.Carry(), request=request, **parts)
        assert answer.table.statuses() == [0]

    def step(self, tensor: Tensor, round_: int) -> m.Committed:
        commit = self.peer.commit(round_, present=[tensor.id], hypers={0: {"lr": 1.0}})
        return self.peer.committed(commit)


@pytest.fixture
def lender() -> OpenHanded:
    return OpenHanded()


def share(store: FakeStore, lender: OpenHanded, rank: int = 0) -> Sharer:
    peer = store.worker(rank)
    peer.ask("SHARE")
    return Sharer(peer, lender.memory())


def store_with(lender: OpenHanded, num_workers: int = 1, max_leased_bytes: int = sharing.MAX_LEASED_BYTES) -> FakeStore:
    return FakeStore(num_workers=num_workers, arena=lender.values, lender=lender, max_leased_bytes=max_leased_bytes)


def created(peer: Peer, name: str = "w", size: int = LARGE) -> Tensor:
    return tensor_of(peer.create(sgd(name, size)).tensors[0])


def train_once(worker: Sharer, tensor: Tensor, round_: int, gradient: float) -> _core.Frame:
    """Pushes, commits, and pulls what comes of it."""
    worker.push(tensor, gradient, round_)
    decisions = worker.step(tensor, round_).decisions
    return worker.ask_for(tensor, decisions=decisions)


def applied(store: FakeStore) -> tuple[int, int]:
    stats = store.shards[0].stats()
    return stats["applied_in_place"], stats["applied_out_of_place"]


def test_gradients_and_values_are_read_where_they_lie(lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    tensor = created(worker.peer)
    answer = train_once(worker, tensor, 1, 3.0)
    assert answer.shared
    assert answer.payload_bytes == 4 * LARGE
    assert worker.read(answer) == -3.0


def test_small_answers_come_over_the_stream(lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    tensor = created(worker.peer, size=4)
    assert not worker.ask_for(tensor).shared


def test_who_did_not_ask_for_it_gets_bytes(lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    tensor = created(worker.peer)
    assert worker.peer.pulled(worker.peer.pull(tensor)) == [0.0] * LARGE


def test_lent_values_stay_what_they_are_until_they_are_released(lender: OpenHanded) -> None:
    store = store_with(lender)
    worker = share(store, lender)
    tensor = created(worker.peer)
    first = train_once(worker, tensor, 1, 1.0)
    second = train_once(worker, tensor, 2, 1.0)
    assert (worker.read(first), worker.read(second)) == (-1.0, -2.0)
    assert applied(store) == (1, 1)
    for answer in (first, second):
        worker.peer.send("RELEASE", request=answer.request)
    assert worker.read(train_once(worker, tensor, 3, 1.0)) == -3.0
    assert applied(store) == (2, 1)


def test_what_a_closed_connection_was_lent_is_released(lender: OpenHanded) -> None:
    store = store_with(lender, num_workers=1)
    worker, reader = share(store, lender), share_as_reader(store, lender)
    tensor = created(worker.peer)
    assert reader.ask_for(tensor).shared
    reader.peer.hang_up()
    train_once(worker, tensor, 1, 1.0)
    assert applied(store) == (1, 0)


def share_as_reader(store: FakeStore, lender: OpenHanded) -> Sharer:
    peer = store.connect()
    peer.ask("SHARE")
    return Sharer(peer, lender.memory())


def test_release_of_what_was_not_lent_is_ignored(lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    worker.peer.send("RELEASE", request=99)
    assert worker.peer.closed_because is None


def test_client_that_releases_nothing_gets_bytes_in_the_end(lender: OpenHanded) -> None:
    worker = share(store_with(lender, max_leased_bytes=4 * LARGE + 1), lender)
    tensor = created(worker.peer)
    answers = [worker.ask_for(tensor) for _ in range(3)]
    assert [answer.shared for answer in answers] == [True, True, False]


def test_client_that_scribbles_changes_its_own_gradient_alone(lender: OpenHanded) -> None:
    store = store_with(lender, num_workers=2)
    honest = share(store, lender, 0)
    hasty = share(store, lender, 1)
    tensor, other = created(honest.peer), created(honest.peer, "other")
    for worker in (honest, hasty):
        worker.push(tensor, 1.0, 1)
    Sharer(hasty.peer, lender.memory()).write(tensor, 9.0, 2)  # a second mapping knows of nothing under way
    commits = [
        worker.peer.commit(1, present=[tensor.id], hypers={0: {"lr": 1.0}}, average=False) for worker in (honest, hasty)
    ]
    decisions = honest.peer.committed(commits[0]).decisions
    assert honest.read(honest.ask_for(tensor, decisions=decisions)) == -10.0
    assert honest.read(honest.ask_for(other)) == 0.0


# ---- lies ----


def test_payload_in_shared_memory_needs_some(lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    tensor = created(worker.peer)
    where = worker.write(tensor, 1.0, 7)
    stranger = FakeStore(num_workers=1).worker()
    with pytest.raises(UnexpectedMessage, match="in no memory that its connection shares"):
        stranger.ask("PUSH", m.Carry(), table=where, payload_bytes=where.payload_bytes, flags=SHARED, round=1)
    assert stranger.closed_because


def test_payload_that_is_not_in_the_arena_ends_its_connection_alone(lender: OpenHanded) -> None:
    store = store_with(lender, num_workers=2)
    liar, other = share(store, lender, 0), share(store, lender, 1)
    tensor = created(liar.peer)
    behind_the_end = _core.SliceTable([(tensor.key(index), 1 << 20, F32) for index in range(2)])
    with pytest.raises(BadHeader, match="one after the other"):
        liar.peer.ask("PUSH", m.Carry(), table=behind_the_end, payload_bytes=2 << 20, flags=SHARED, round=1)
    assert liar.peer.closed_because
    assert other.ask_for(tensor).shared


@pytest.mark.parametrize("op", ["PULL", "STATS", "LEAVE"])
def test_requests_without_payload_have_none_in_shared_memory(op: str, lender: OpenHanded) -> None:
    worker = share(store_with(lender), lender)
    tensor = created(worker.peer)
    where = worker.write(tensor, 1.0, 7)
    with pytest.raises(UnexpectedMessage, match=f"operation {OPS[op]} .* can't have a payload"):
        worker.peer.ask(op, table=where, payload_bytes=where.payload_bytes, flags=SHARED)
