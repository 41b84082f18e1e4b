"""A shard among bad peers: each gets the error that says why, and a good client is served as if nothing had been."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

import psstore
from psstore import _core, errors
from psstore.wire import messages as m
from tests.support.raw_client import RawClient, connect_socket, failure_of, slice_table
from tests.support.server_process import StoreProcess, eventually

pytestmark = pytest.mark.sockets

VERSION_AT, NUM_SLICES_AT, BODY_BYTES_AT, PAYLOAD_BYTES_AT, HEADER_CRC_AT = 4, 8, 12, 16, 60
"""Offsets in the header: csrc/wire/header.h draws it."""


@pytest.fixture(scope="module")
def store(loop_name: str) -> Iterator[StoreProcess]:
    with StoreProcess("--shards", "2", "--log-level", "debug") as store:
        yield store
        assert "Traceback" not in store.log()


@pytest.fixture(autouse=True)
def good_client(store: StoreProcess) -> Iterator[RawClient]:
    """Connected before the bad peer came, served after it."""
    with RawClient(store.url) as client:
        client.hello()
        yield client
        assert client.stats()["shard"] == 0


def header(op: str = "HELLO", **fields: int) -> bytearray:
    """A header alone, with its checksum right whatever its fields say."""
    frame = bytearray(_core.encode_frame(_core.OPS[op], request=1))
    for (offset, form), value in zip(
        ((BODY_BYTES_AT, "<I"), (PAYLOAD_BYTES_AT, "<Q")), map(fields.get, ("body", "payload")), strict=True
    ):
        if value is not None:
            struct.pack_into(form, frame, offset, value)
    struct.pack_into("<I", frame, HEADER_CRC_AT, _core.crc32c(frame[:HEADER_CRC_AT]))
    return frame


def wrong_magic() -> bytes:
    return b"HTTP" + header()[4:]


def other_version() -> bytes:
    frame = header()
    frame[VERSION_AT] += 1
    struct.pack_into("<I", frame, HEADER_CRC_AT, _core.crc32c(frame[:HEADER_CRC_AT]))
    return bytes(frame)


def bad_checksum() -> bytes:
    frame = header()
    frame[NUM_SLICES_AT] ^= 1
    return bytes(frame)


BEFORE_HELLO: dict[str, tuple[Callable[[], bytes], type[errors.ProtocolError]]] = {
    "garbage": (lambda: random.Random(1).randbytes(500), errors.BadMagic),
    "an http request": (lambda: b"GET / HTTP/1.1\r\nHost: psstore\r\n\r\n", errors.BadMagic),
    "wrong magic": (wrong_magic, errors.BadMagic),
    "another version": (other_version, errors.BadVersion),
    "corrupted header": (bad_checksum, errors.BadChecksum),
    "body larger than a handshake's": (lambda: bytes(header(body=_core.PRE_AUTH_MAX_BYTES + 1)), errors.FrameTooLarge),
    "payload before the handshake": (lambda: bytes(header("PUSH", payload=1)), errors.FrameTooLarge),
    "request before HELLO": (lambda: _core.encode_frame(_core.OPS["STATS"], request=1), errors.UnexpectedMessage),
    "HELLO that is no message": (
        lambda: _core.encode_frame(_core.OPS["HELLO"], request=1, body=b"\xff"),
        errors.BadBody,
    ),
    "HELLO with another kind of id": (
        lambda: _core.encode_frame(_core.OPS["HELLO"], request=1, body=m.encode_body(m.Hello(client="me"))),
        errors.BadBody,
    ),
}


@pytest.mark.parametrize("case", BEFORE_HELLO)
def test_stranger_is_told_what_is_wrong_and_dropped(store: StoreProcess, case: str) -> None:
    make, expected = BEFORE_HELLO[case]
    with RawClient(store.url) as peer:
        peer.sock.sendall(make())
        frame = peer.receive()
        assert frame is not None
        assert frame.request == 0
        assert type(failure_of(frame)) is expected
        assert peer.closed_by_server()


AFTER_HELLO: dict[str, tuple[Callable[[], bytes], type[errors.ProtocolError]]] = {
    "body too large": (lambda: bytes(header("PUSH", body=_core.MAX_BODY_BYTES + 1)), errors.FrameTooLarge),
    "payload too large": (lambda: bytes(header("PUSH", payload=_core.MAX_PAYLOAD_BYTES + 1)), errors.FrameTooLarge),
    "payload of a request that has none": (lambda: bytes(header("STATS", payload=10)), errors.UnexpectedMessage),
    "second HELLO": (
        lambda: _core.encode_frame(_core.OPS["HELLO"], body=m.encode_body(m.Hello(client="0" * 32))),
        errors.UnexpectedMessage,
    ),
    "a reply": (lambda: _core.encode_frame(_core.OPS["PULLED"], request=1), errors.UnexpectedMessage),
    "unreadable body": (lambda: _core.encode_frame(_core.OPS["JOIN"], request=1, body=b"\xc1"), errors.BadBody),
    "payload that is not the table's": (
        lambda: bytes(header("ASSIGN", payload=10)) + b"0123456789",
        errors.BadHeader,
    ),
}


@pytest.mark.parametrize("case", AFTER_HELLO)
def test_client_that_breaks_the_protocol_is_told_and_dropped(store: StoreProcess, case: str) -> None:
    make, expected = AFTER_HELLO[case]
    with RawClient(store.url) as peer:
        peer.hello()
        peer.sock.sendall(make())
        frame = peer.receive()
        assert frame is not None
        failure = failure_of(frame)
        assert isinstance(failure, expected), failure
        if frame.request == 0:
            assert peer.closed_by_server()


def test_error_arrives_although_the_peer_never_stops_sending(store: StoreProcess) -> None:
    """Closing over unread bytes would reset the connection, and the peer would lose the error."""
    with RawClient(store.url) as peer:
        peer.hello()
        peer.sock.sendall(header("PUSH", payload=_core.MAX_PAYLOAD_BYTES + 1))
        peer.sock.sendall(bytes(8 << 20))
        frame = peer.receive()
        assert frame is not None
        assert isinstance(failure_of(frame), errors.FrameTooLarge)


@pytest.mark.parametrize("sent", [1, 17, 63, 64, 70])
def test_end_in_the_middle_of_a_frame_is_no_incident(store: StoreProcess, sent: int) -> None:
    frame = _core.encode_frame(_core.OPS["HELLO"], body=m.encode_body(m.Hello(client="0" * 32)))
    with RawClient(store.url) as peer:
        peer.sock.sendall(frame[:sent])
        peer.sock.shutdown(socket.SHUT_WR)
        assert peer.closed_by_server()


def test_end_in_the_middle_of_a_payload_leaves_the_value_alone(store: StoreProcess, good_client: RawClient) -> None:
    tensor = good_client.create(name="half", shape=(1000,), rule="assign")
    table = slice_table(tensor, with_bytes=True)
    with RawClient(store.url) as peer:
        peer.hello()
        peer.sock.sendall(_core.encode_frame(_core.OPS["ASSIGN"], sequence=1, table=table, payload_bytes=4000))
        peer.sock.sendall(b"\x01" * 2000)
    good_client.send("PULL", table=slice_table(tensor, with_bytes=False))
    value = bytearray(b"\x02" * 4000)
    good_client.reply("PULLED", destination=_core.Segments([value], writable=True))
    assert value == bytes(4000)


def test_connection_that_is_reset_is_no_incident(store: StoreProcess) -> None:
    peer = RawClient(store.url)
    peer.hello()
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_errors_of_requests_end_nothing(store: StoreProcess, good_client: RawClient) -> None:
    unknown = _core.SliceTable([(1 << 60, 0, _core.DTYPES["float32"])])
    good_client.send("PULL", table=unknown)
    assert good_client.reply("PULLED").table.statuses() == [errors.UnknownKey.code]
    with pytest.raises(errors.NotAWorker):
        good_client.ask("PUSH", "PUSHED", table=_core.SliceTable([]), body=m.Carry())
    with RawClient(store.addresses[1]) as other:
        other.hello()
        with pytest.raises(errors.UnexpectedMessage, match="ask shard 0"):
            other.ask("JOIN", "JOINED", body=m.Join())


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_end_a_connection_and_nothing_else(store: StoreProcess, seed: int) -> None:
    """Half of the seeds are a HELLO and then mutated frames."""
    rng = random.Random(seed)
    with RawClient(store.addresses[seed % 2]) as peer:
        if seed % 2:
            peer.hello()
        data = bytearray()
        for op in rng.choices(list(_core.OPS.values()), k=20):
            data += _core.encode_frame(op, request=rng.randrange(9), body=rng.randbytes(rng.randrange(50)))
        for _ in range(rng.randrange(10)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            peer.sock.sendall(data)
            peer.sock.shutdown(socket.SHUT_WR)
            while not peer.closed_by_server():
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass


def test_many_connections_are_all_served(store: StoreProcess) -> None:
    with contextlib.ExitStack() as ends:
        clients = []
        for address in store.addresses * 150:
            clients.append(ends.enter_context(RawClient(address)))
            clients[-1].hello()  # before the next one comes: strangers have 10 s for it
        assert eventually(lambda: clients[0].stats()["connections"] == 151), "and the good one"


def test_connections_over_the_limit_are_refused_and_those_there_stay() -> None:
    with StoreProcess("--max-connections", "3") as small:
        clients = [RawClient(small.url) for _ in range(3)]
        for client in clients:
            client.hello()
        with RawClient(small.url) as late, pytest.raises(errors.Overloaded):
            late.hello()
        clients.pop().close()
        for client in clients:
            client.stats()
            client.close()
        assert "refused: there are too many connections already" in small.log()


def test_connections_are_limited_by_what_the_system_allows() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with StoreProcess("--max-connections", str(hard)) as store:
        (shard,) = store.shards()
        assert shard.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        assert f"the system allows {hard} open files: connections are limited to" in store.log()


def test_few_open_files_are_shared_out_and_too_few_are_said_to_be() -> None:
    few = ["bash", "-c", 'ulimit -n "$0"; exec "$@"']

    def server(num_files: int) -> list[str]:
        return [*few, str(num_files), sys.executable, "-m", "psstore.cli.server", "--port", "0"]

    with subprocess.Popen(server(64), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        with psstore.connect(url) as store:
            store.create("a", [1.0])
            assert store.pull("a") == [1.0]
        process.terminate()
    ended = subprocess.run(server(40), capture_output=True, text=True)
    assert ended.returncode == 3
    assert "the system allows 40 open files, and a shard needs 48: raise ulimit -n" in ended.stderr


def test_raw_socket_that_says_nothing_is_harmless(store: StoreProcess) -> None:
    silent = [connect_socket(store.url) for _ in range(20)]
    with RawClient(store.url) as client:
        client.hello()
    for sock in silent:
        sock.close()
