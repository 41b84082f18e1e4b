"""The server's log: which lines there are at which level, in which form, and what each line always says."""

from __future__ import annotations

import json
import math
import os
import re
import signal

import pytest

import psstore
from psstore import errors
from psstore.protocol.norm_guard import NormGuard
from psstore.protocol.signing import Signer
from psstore.server.refusal_log import RefusalLog
from psstore.wire import messages as m
from tests.support.cluster import PATIENCE_S
from tests.support.raw_client import RawClient
from tests.support.server_process import StoreProcess, eventually

pytestmark = pytest.mark.sockets

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (debug|info|warning|error) (shard \d+|supervisor) \[.+\] .+")


def test_text_lines_say_when_how_important_who_and_about_whom() -> None:
    with StoreProcess("--log-level", "debug") as store:
        with RawClient(store.url) as client:
            client.hello()
            client.join()
            with pytest.raises(errors.BadArgument):
                client.ask("JOIN", "JOINED", body=m.Join(rank=7))
            client.ask("LEAVE", "LEFT")
        assert eventually(lambda: "] closed" in store.log())
        lines = store.log().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    said = "\n".join(lines)
    name = client.client[:8]
    assert "debug shard 0 [a client before its HELLO at 127.0.0.1:" in said
    assert f"info shard 0 [client {name}] rank 0 (incarnation 1) has joined" in said
    assert "answered BadArgument: rank 7 is not in [0, 1)" in said
    assert f"info shard 0 [client {name}] rank 0 (incarnation 1) has left after round 0" in said


@pytest.mark.one_loop
def test_connections_are_not_logged_at_info() -> None:
    with StoreProcess() as store:
        with RawClient(store.url) as client:
            client.hello()
        assert store.stop() == 0
        assert store.log() == ""


@pytest.mark.one_loop
def test_a_reader_that_waits_for_the_next_version_is_not_logged_at_info_and_a_worker_that_waits_is() -> None:
    """A relay asks every few seconds, for as long as nobody trains."""
    with StoreProcess("--workers", "2") as store, psstore.connect(store.url, wait_s=0.1) as worker:
        worker.create("w", [1.0])
        with psstore.follow(store.url, wait_s=PATIENCE_S) as reader:
            reader.next()
            for _ in range(2):
                with pytest.raises(errors.DeadlineExceeded):
                    reader.next(timeout_s=0.1)
        with pytest.raises(errors.DeadlineExceeded):
            worker.commit()
        assert eventually(lambda: "DeadlineExceeded" in store.log())
        (line,) = [line for line in store.log().splitlines() if "DeadlineExceeded" in line]
    assert "answered DeadlineExceeded: rank 0 waited 0.1 s at the end of round 1 for rank 1" in line


@pytest.mark.one_loop
def test_lost_worker_is_a_warning_and_so_is_its_return() -> None:
    with StoreProcess("--heartbeat-s", "0.1", "--silence-s", "0.5") as store, RawClient(store.url) as client:
        client.hello()
        client.join()
        assert eventually(lambda: "is lost" in store.log())
        client.ask("JOIN", "JOINED", body=m.Join())
        assert eventually(lambda: "is back" in store.log())
        lost, back = [line for line in store.log().splitlines() if " warning " in line][:2]
    assert re.search(r"rank 0 \(incarnation 1\) is lost in round 1: last seen \d+\.\d s ago", lost)
    assert back.endswith("rank 0 (incarnation 1) is back")


def test_shard_that_is_stopped_is_a_warning_and_so_is_that_it_goes_on() -> None:
    with StoreProcess("--shards", "2") as store:
        pid = store.shard_pids()[1]
        for _ in range(2):
            before = store.log()
            os.kill(pid, signal.SIGSTOP)
            assert eventually(lambda before=before: "stands still" in store.log()[len(before) :])  # type: ignore[misc]
            os.kill(pid, signal.SIGCONT)
            assert eventually(lambda before=before: "goes on" in store.log()[len(before) :])  # type: ignore[misc]
        lines = store.log().splitlines()
        assert all(" warning supervisor [-] shard 1 " in line for line in lines)
        assert lines[0].endswith(f"stands still, stopped by SIGSTOP: whoever asks it waits (kill -CONT {pid})")
        assert len(lines) == 4
        assert store.stop() == 0


def test_store_with_a_shard_that_stands_still_ends_all_the_same() -> None:
    with StoreProcess("--shards", "2") as store:
        os.kill(store.shard_pids()[0], signal.SIGSTOP)
        assert eventually(lambda: "stands still" in store.log())
        store.signal(signal.SIGTERM)
        store.signal(signal.SIGTERM)  # at once, and not after the time that shards have to drain
        assert store.wait() == 0
        assert "killing shard 0" in store.log()


@pytest.mark.one_loop
def test_no_worker_is_called_lost_when_the_store_ends() -> None:
    """It is silent for longer than it may be, in the 5 s in which the store waits for it to close its connection."""
    with StoreProcess("--heartbeat-s", "0.1", "--silence-s", "2") as store, RawClient(store.url) as client:
        client.hello()
        client.join()
        assert store.stop() == 0
        assert "is lost" not in store.log()


@pytest.mark.one_loop
def test_json_lines_have_the_same_facts() -> None:
    with StoreProcess("--log-format", "json") as store:
        with RawClient(store.url) as client:
            client.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            client.receive()
        assert store.stop() == 0
        (line,) = map(json.loads, store.log().splitlines())
    assert line["level"] == "info"
    assert line["process"] == "shard 0"
    assert line["peer"].startswith("a client before its HELLO at 127.0.0.1:")
    assert line["message"].startswith("closing the connection: ")
    assert isinstance(line["time"], float)


def test_a_rank_that_is_refused_again_and_again_is_told_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    guard = NormGuard(2.0, signer=Signer(b"a key of the store's own"), num_shards=1)
    log = RefusalLog(guard)
    for count in range(1, 6):
        guard.refused([m.Refusal(rank=3, norm=50.0 + count, median=5.0, limit=10.0)])
        if count == 1:
            guard.refused([m.Refusal(rank=1, norm=math.inf)])
        log.update()
    assert caplog.messages == [
        "the contribution of rank 3 was refused: its norm is 51 and may be 10 at most; the median of the last ones that"
        " counted is 5 (of this rank so far: 1)",
        "the contribution of rank 1 was refused: its norm is inf and has to be finite (of this rank so far: 1)",
        "the contribution of rank 3 was refused: its norm is 52 and may be 10 at most; the median of the last ones that"
        " counted is 5 (of this rank so far: 2)",
        "the contribution of rank 3 was refused: its norm is 54 and may be 10 at most; the median of the last ones that"
        " counted is 5 (of this rank so far: 4)",
    ]
