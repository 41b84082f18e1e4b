"""The pace of a shard: slow readers, stalled senders, idle work, and bugs that must stay where they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

import psstore
from psstore import _core, errors
from psstore.config import Transport
from psstore.net.limits import ServerLimits
from psstore.net.server import Server
from psstore.partition.slicing import SLICE_BYTES
from psstore.protocol import connections
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.frames import Output
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.service import ShardService
from psstore.types import Tensor
from psstore.wire import messages as m
from psstore.wire.ranges import to_ranges
from tests.support.cluster import TO_SHARDS
from tests.support.raw_client import RawClient, slice_table
from tests.support.server_process import StoreProcess, eventually
from tests.support.server_thread import make_service, serving

pytestmark = pytest.mark.sockets

LARGE_ELEMS = 4 << 20
"""A value of 16 MiB: more than the sockets between a server and its reader hold."""


def assign(client: RawClient, tensor: Tensor, value: bytes, *, sequence: int = 1) -> None:
    client.send("ASSIGN", sequence=sequence, table=slice_table(tensor, with_bytes=True), payload=[value])
    assert set(client.reply("ASSIGNED").table.statuses()) == {0}


# ---- a peer that does not read ----------------------------------------------------------------------


def test_reader_that_does_not_read_costs_no_memory_and_gets_all_when_it_does() -> None:
    """The value changes after each of its requests: replies that wait would hold every one of them."""
    num_pulls, nbytes = 100, 16 * SLICE_BYTES
    with StoreProcess() as store, RawClient(store.url) as reader, RawClient(store.url) as other:
        (shard,) = store.shards()
        reader.hello()
        other.hello()
        tensor = reader.create(name="w", shape=(nbytes // 4,), rule="assign")
        assign(reader, tensor, bytes(nbytes))
        before = shard.memory_info().rss
        for number in range(1, num_pulls + 1):
            reader.send("PULL", table=slice_table(tensor, with_bytes=False))
            assign(other, tensor, bytes([number]) * nbytes, sequence=number)
        assert shard.memory_info().rss - before < 8 * nbytes

        out = bytearray(nbytes)
        slices = [memoryview(out)[begin : begin + SLICE_BYTES] for begin in range(0, nbytes, SLICE_BYTES)]
        seen = []
        for _ in range(num_pulls):
            reader.reply("PULLED", destination=_core.Segments(slices, writable=True))
            assert out[0] == out[-1], "half of one value and half of another"
            seen.append(out[0])
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0, num_pulls)
        assert shard.memory_info().rss - before < 8 * nbytes


def pulls_of(client: RawClient) -> int | float | str:
    return client.stats()["pulls"]


def test_requests_wait_while_the_reply_before_them_is_not_read() -> None:
    """Small requests that arrived in one read are not all answered at once."""
    service = make_service()
    with serving(service) as address, RawClient(address) as reader, RawClient(address) as other:
        reader.hello()
        other.hello()
        tensor = reader.create(name="w", shape=(LARGE_ELEMS,), rule="assign")
        table, num_pulls = slice_table(tensor, with_bytes=False), 64
        for _ in range(num_pulls):
            reader.send("PULL", table=table)
        assert eventually(lambda: pulls_of(other) == pulls_of(other))  # it does nothing more
        assert 0 < int(pulls_of(other)) < num_pulls * len(table)
        for _ in range(num_pulls):
            reader.reply("PULLED")
        assert int(pulls_of(other)) == num_pulls * len(table)


def test_reader_that_goes_away_while_it_is_waited_for_is_forgotten() -> None:
    service = make_service()
    with serving(service) as address, RawClient(address) as other:
        other.hello()
        with RawClient(address) as reader:
            reader.hello()
            tensor = reader.create(name="w", shape=(LARGE_ELEMS,), rule="assign")
            for _ in range(32):
                reader.send("PULL", table=slice_table(tensor, with_bytes=False))
            assert other.stats()["connections"] == 2
        assert eventually(lambda: other.stats()["connections"] == 1)


def test_reader_that_reads_nothing_is_cut_and_what_it_was_owed_is_free_again() -> None:
    with serving(make_service(), unread_s=0.3) as address, RawClient(address) as reader, RawClient(address) as other:
        reader.hello()
        other.hello()
        tensor = reader.create(name="w", shape=(LARGE_ELEMS,), rule="assign")
        reader.send("PULL", table=slice_table(tensor, with_bytes=False))
        assert eventually(lambda: other.stats()["connections"] == 1)
        before = other.stats()["memory_bytes"]
        assign(other, tensor, bytes(4 * LARGE_ELEMS))
        assert other.stats()["memory_bytes"] == before, "nobody keeps the value that was replaced"


def test_reader_that_reads_a_little_is_not_cut() -> None:
    """Twice the limit in all."""
    with serving(make_service(), unread_s=1.0) as address, RawClient(address) as reader:
        reader.hello()
        tensor = reader.create(name="w", shape=(LARGE_ELEMS,), rule="assign")
        reader.send("PULL", table=slice_table(tensor, with_bytes=False))
        pause = threading.Event()
        left = 4 * LARGE_ELEMS
        for _ in range(16):
            left -= len(reader.sock.recv(1 << 20, socket.MSG_WAITALL))
            pause.wait(0.15)
        while left > 0:
            received = len(reader.sock.recv(1 << 20))
            assert received, "it was cut"
            left -= received


def test_request_that_gets_no_memory_is_refused_and_the_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: object, **__: object) -> None:
        raise MemoryError

    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "handle", hungry)
            with pytest.raises(errors.OutOfMemory, match="no memory from its system"):
                client.ask("DESCRIBE", "DESCRIBED", body=m.Describe())
        client.ask("DESCRIBE", "DESCRIBED", body=m.Describe())


def test_push_that_does_not_fit_is_refused_and_the_server_goes_on() -> None:
    value = bytes(16 << 20)
    with StoreProcess("--max-memory", "40MiB") as store, RawClient(store.url) as client:
        client.hello()
        assert client.stats()["max_memory_bytes"] == 40 << 20
        tensor = client.create(name="w", shape=(LARGE_ELEMS,), rule="assign")
        client.create(name="other", shape=(LARGE_ELEMS,), rule="assign")
        with pytest.raises(errors.OutOfMemory, match="raise --max-memory"):
            client.create(name="huge", shape=(1 << 36,), rule="assign")
        with pytest.raises(errors.OutOfMemory, match="raise --max-memory"):
            assign(client, tensor, value)
        dropped = m.decode_body(m.Dropped, client.ask("DROP", "DROPPED", body=m.Drop(names=("other",))).body)
        client.ask("DEFINE", "DEFINED", body=m.Define(facts=dropped.facts))
        assign(client, tensor, value, sequence=2)  # the first number was used


@pytest.mark.parametrize("transport", TO_SHARDS)
def test_a_write_that_does_not_fit_leaves_its_client_as_it_was(transport: Transport, tmp_path: Path) -> None:
    flags = ("--max-memory", "40MiB", "--host", "127.0.0.1", "--uds", str(tmp_path / "socket"))
    with StoreProcess(*flags) as process, psstore.connect(process.url, transport=transport) as store:
        store.create("small", np.zeros(4, np.float32), rule="add")
        huge, small = np.ones(100 << 10, np.float32), np.ones(4, np.float32)
        store.create("huge", huge, rule="add")
        for size in (8 << 20, 1 << 20, 128 << 10, 32 << 10):  # until there is no room
            with contextlib.suppress(errors.OutOfMemory):
                for number in range(40):
                    store.create(f"{size} {number}", np.zeros(size // 4, np.float32), rule="assign")
        for _ in range(3):
            with pytest.raises(errors.OutOfMemory):
                store.push("huge", huge)
            store.push("small", small)

        async def push_on_the_way() -> None:
            """Further writes are on their way while one is refused."""
            async with await psstore.connect_async(process.url, transport=transport, role="client") as client:
                pushes = [client.push(name, value) for name, value in (("huge", huge), ("small", small)) * 4]
                outcomes = await asyncio.gather(*pushes, return_exceptions=True)
                assert [type(outcome) for outcome in outcomes[::2]] == [errors.OutOfMemory] * 4
                assert not any(isinstance(outcome, Exception) for outcome in outcomes[1::2])

        asyncio.run(push_on_the_way())
        assert store.pull("small").tolist() == [7.0] * 4


def test_pulls_that_wait_are_limited_per_connection() -> None:
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        for _ in range(_core.MAX_PENDING_READS + 1):
            client.send("PULL", body=m.Carry(at_least=1, wait_s=60.0), table=_core.SliceTable([]))
        with pytest.raises(errors.Overloaded, match="1024 reads of this connection wait already"):
            client.reply("PULLED")
        client.stats()


def test_pull_that_waits_at_its_port_ends_when_its_time_is_over() -> None:
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        tensor = client.create(name="w", shape=(4,), rule="assign", zeros=False)
        for _ in range(2):  # the second time nobody else sees it before
            client.send("PULL", body=m.Carry(wait_s=0.05), table=slice_table(tensor, with_bytes=False))
            assert client.reply("PULLED").table.statuses() == [_core.ERROR_CODES["NOT_INITIALISED"]]


# ---- a peer that does not send ----------------------------------------------------------------------


def test_stranger_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
        with RawClient(address) as silent:
            with pytest.raises(errors.HandshakeTimeout):
                silent.reply("WELCOME")
            assert silent.closed_by_server()
        client.stats()


@pytest.mark.parametrize("sent", [1, 64, 65, 100, 3000])
def test_client_that_stops_in_the_middle_of_a_frame_is_dropped(sent: int) -> None:
    """In the header, in the table, in the body, in the payload."""
    with serving(make_service(), stalled_frame_s=0.2) as address, RawClient(address) as client:
        client.hello()
        tensor = client.create(name="w", shape=(1000,), rule="assign")
        table = slice_table(tensor, with_bytes=True)
        head = _core.encode_frame(
            _core.OPS["ASSIGN"], request=1, sequence=1, table=table, body=b"x" * 20, payload_bytes=4000
        )
        with RawClient(address) as stalled:
            stalled.hello()
            stalled.sock.sendall((head + bytes(4000))[:sent])
            with pytest.raises(errors.HandshakeTimeout, match="begun and not continued"):
                stalled.reply("ASSIGNED")
            assert stalled.closed_by_server()
        client.stats()


def test_client_that_sends_slowly_is_waited_for() -> None:
    """Each byte buys time: twice the limit in all, and no frame is lost."""
    with serving(make_service(), stalled_frame_s=1.0) as address, RawClient(address) as client:
        frame = _core.encode_frame(_core.OPS["HELLO"], body=m.encode_body(m.Hello(client=client.client)))
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pause = threading.Event()
        for index in range(0, len(frame), 5):
            client.sock.sendall(frame[index : index + 5])
            pause.wait(0.1)
        client.reply("WELCOME")


def test_stalled_frames_are_not_blamed_on_a_client_that_we_keep_waiting() -> None:
    """Half a request lies in our buffer while its sender does not read the replies to those before it."""
    with serving(make_service(), stalled_frame_s=0.2) as address, RawClient(address) as client:
        client.hello()
        tensor = client.create(name="w", shape=(2 * LARGE_ELEMS,), rule="assign")
        table = slice_table(tensor, with_bytes=False)
        request = _core.encode_frame(_core.OPS["PULL"], request=7, table=table)
        client.sock.sendall(request * 2 + request[:50])
        threading.Event().wait(0.6)  # three times the limit
        client.reply("PULLED")
        client.sock.sendall(request[50:])
        client.reply("PULLED")
        client.reply("PULLED")


@pytest.mark.parametrize("what", ["stops in the middle of a frame", "reads nothing"])
def test_a_standby_gives_up_a_shard_that(what: str) -> None:
    async def follow() -> Exception | None:
        loop, (mine, other) = asyncio.get_running_loop(), socket.socketpair()
        server = Server(make_service(), loop=loop, limits=ServerLimits(stalled_frame_s=0.2, unread_s=0.2))
        given_up: asyncio.Future[Exception | None] = loop.create_future()
        server.leader.on_lost = given_up.set_result
        mine.setblocking(False)
        server.leader.follow(mine, client=ClientIdentity(client="a" * 32, role="standby"), address="there")
        with other:
            if what == "reads nothing":
                server.poller.send(0, [bytes(LARGE_ELEMS)])
            else:
                other.sendall(_core.encode_frame(_core.OPS["WELCOME"], body=bytes(100))[:80])
            error = await asyncio.wait_for(given_up, 30.0)
        await server.drain()
        return error

    assert asyncio.run(follow()) is None


# ---- time and idle work -----------------------------------------------------------------------------


def test_waits_end_when_their_time_is_over() -> None:
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        client.send("PULL", body=m.Carry(at_least=1, wait_s=0.2), table=_core.SliceTable([]))
        with pytest.raises(errors.DeadlineExceeded, match=r"version 1 did not come within 0\.2 s"):
            client.reply("PULLED")


def test_decision_is_carried_out_when_there_is_time() -> None:
    """Nobody pulls; the slots are brought up to date all the same, some per turn of the loop."""
    num_slots = 100
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        joined = client.join()
        tensor = client.create(name="w", shape=(num_slots * SLICE_BYTES // 4,), rule="sgd")
        table = slice_table(tensor, with_bytes=True)
        half = len(table) // 2
        for part in (table.select(range(half)), table.select(range(half, len(table)))):
            worker = {"round": 1, "rank": joined.rank, "incarnation": joined.incarnation}
            client.send("PUSH", table=part, body=m.Carry(), payload=[bytes(part.payload_bytes)], **worker)
            client.reply("PUSHED")
        committed = m.decode_body(
            m.Committed, client.ask("COMMIT", "COMMITTED", body=m.Commit(round=1, present=to_ranges([tensor.id]))).body
        )
        client.ask("PULL", "PULLED", body=m.Carry(decisions=committed.decisions, newest=committed.last, at_least=1))
        assert eventually(lambda: client.stats()["applied_in_place"] == len(table))
        assert client.stats()["staged_bytes"] == 0


# ---- our own bugs -----------------------------------------------------------------------------------


class BrokenService:
    """Breaks `method` of the service once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._works = getattr(ShardService, method)
        self._patch, self._method = monkeypatch, method
        monkeypatch.setattr(ShardService, method, self._break)

    def _break(self, *_: object) -> list[Output]:
        self._patch.setattr(ShardService, self._method, self._works)
        raise RuntimeError("a bug of ours")


def test_bug_ends_one_connection_with_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(make_service()) as address, RawClient(address) as other, RawClient(address) as client:
        other.hello()
        client.hello()
        BrokenService(monkeypatch, "_dispatch")
        with pytest.raises(errors.InternalError, match="a bug of ours"):
            client.stats()
        assert client.closed_by_server()
        other.stats()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert client.client[:8] in record.__dict__["peer"]


def test_bug_in_the_timer_delays_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psstore.net.server.RETRY_S", 0.1)
    with serving(make_service()) as address, RawClient(address) as client:
        client.hello()
        BrokenService(monkeypatch, "tick")
        client.send("PULL", body=m.Carry(at_least=1, wait_s=0.1), table=_core.SliceTable([]))
        with pytest.raises(errors.DeadlineExceeded):
            client.reply("PULLED")
    assert "what was waited for may be late" in caplog.text


def test_bug_in_the_coordinator_ends_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(Coordinator, "handle", broken)
    with serving(make_service()) as address, RawClient(address) as other, RawClient(address) as client:
        client.hello()
        other.hello()
        with pytest.raises(errors.InternalError):
            client.ask("JOIN", "JOINED", body=m.Join())
        other.stats()


def test_server_uses_no_threads() -> None:
    with StoreProcess() as store, RawClient(store.url) as client:
        client.hello()
        assert [psutil.Process(shard.pid).num_threads() for shard in store.shards()] == [1]
