"""Heartbeat: beats while Python computes, and ends with its connection, its owner and its process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from psstore import _core
from psstore.errors import BadArgument

FRAME = _core.encode_frame(_core.OPS["HEARTBEAT"], rank=3, incarnation=7)

INTERVAL_S = 0.005
NEVER_S = 3600.0

TIMEOUT_S = 10.0
"""Of every wait: much longer than any of them takes."""

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """(the worker's, the shard's)"""
    ours, peers = socket.socketpair()
    peers.settimeout(TIMEOUT_S)
    with ours, peers:
        yield ours, peers


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            return data
        data += more
    return data


def wait_until_dead(heartbeat: _core.Heartbeat) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while heartbeat.alive:
        assert time.monotonic() < deadline, "the heartbeat did not notice"


def test_it_sends_whole_frames_at_intervals(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, INTERVAL_S)
    assert heartbeat.alive
    decoder = _core.FrameDecoder()
    decoder.feed(receive(peers, 3 * len(FRAME)))
    for _ in range(3):
        frame = decoder.next_frame()
        assert frame is not None
        assert (frame.op, frame.rank, frame.incarnation) == (_core.OPS["HEARTBEAT"], 3, 7)
    heartbeat.stop()


def test_it_needs_no_gil(ends: Ends) -> None:
    """The main thread never gives the GIL up while at least ten beats are due, and some of them come."""
    ours, peers = ends
    before = sys.getswitchinterval()
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, INTERVAL_S)
    receive(peers, len(FRAME))
    sys.setswitchinterval(1000)
    try:
        end = time.monotonic() + 40 * INTERVAL_S
        while time.monotonic() < end:
            pass
        peers.setblocking(False)
        beats = peers.recv(100 * len(FRAME))
    finally:
        sys.setswitchinterval(before)
    assert len(beats) >= 4 * len(FRAME)
    heartbeat.stop()


def test_stop_is_prompt_and_lets_the_connection_end(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, NEVER_S)
    receive(peers, len(FRAME))
    begin = time.monotonic()
    heartbeat.stop()
    heartbeat.stop()
    assert time.monotonic() - begin < TIMEOUT_S
    assert not heartbeat.alive
    ours.close()
    assert peers.recv(1) == b""


def test_it_owns_a_duplicate_of_the_socket(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, INTERVAL_S)
    ours.close()
    assert receive(peers, 2 * len(FRAME)) == 2 * FRAME
    heartbeat.stop()


def test_it_ends_when_it_is_collected(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, NEVER_S)
    receive(peers, len(FRAME))
    del heartbeat
    gc.collect()
    ours.close()
    assert peers.recv(1) == b""


def test_it_is_dead_when_the_peer_is_gone(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, INTERVAL_S)
    peers.close()
    wait_until_dead(heartbeat)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_peer_that_does_not_read_blocks_nobody(ends: Ends, blocking: bool) -> None:
    ours, peers = ends
    ours.setblocking(blocking)
    heartbeat = _core.Heartbeat(ours.fileno(), bytes(4 << 20), INTERVAL_S)
    receive(peers, 1)
    assert heartbeat.alive
    heartbeat.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_heartbeat_and_holds_no_connection(ends: Ends) -> None:
    ours, peers = ends
    heartbeat = _core.Heartbeat(ours.fileno(), FRAME, INTERVAL_S)
    receive(peers, len(FRAME))
    released_read, released_write = os.pipe()
    child = os.fork()
    if child == 0:
        was_alive = heartbeat.alive
        heartbeat.stop()
        del heartbeat
        ours.close()
        os.write(released_write, b"1" if was_alive else b"0")
        signal.pause()
    try:
        assert os.read(released_read, 1) == b"0"
        assert receive(peers, len(FRAME)) == FRAME  # the parent's goes on
        heartbeat.stop()
        ours.close()
        while peers.recv(1 << 16):
            pass  # to the end of the stream, which the living child does not delay
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(released_read)
        os.close(released_write)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_interval_that_makes_no_sense_is_refused(ends: Ends, interval_s: float) -> None:
    with pytest.raises(BadArgument, match="interval"):
        _core.Heartbeat(ends[0].fileno(), FRAME, interval_s)


def test_what_is_no_stream_socket_is_refused(ends: Ends) -> None:
    with pytest.raises(BadArgument, match="not a stream socket"):
        _core.Heartbeat(-1, FRAME, 1.0)
    read, write = os.pipe()
    with pytest.raises(BadArgument, match="not a stream socket"):
        _core.Heartbeat(write, FRAME, 1.0)
    os.close(read)
    os.close(write)
    with pytest.raises(BadArgument, match="empty"):
        _core.Heartbeat(ends[0].fileno(), b"", 1.0)
