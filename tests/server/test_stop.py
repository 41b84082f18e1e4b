"""psstore-server ends: drained, killed or bereft of a shard, it leaves no process and no socket behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import psstore
from psstore import errors
from tests.support.raw_client import RawClient
from tests.support.server_process import END_S, StoreProcess, eventually

pytestmark = pytest.mark.sockets


def assert_gone(shards: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(shards, timeout=END_S)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with StoreProcess("--shards", "2", "--uds", str(tmp_path / "store")) as store:
        shards = store.shards()
        assert len(shards) == 2
        port = int(store.ready["shards"][0][1].rpartition(":")[2])
        store.signal(number)
        assert store.wait() == 0
        assert_gone(shards)
        assert list(tmp_path.iterdir()) == []
        assert store.log() == ""
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_under_nohup_a_store_outlives_its_terminal() -> None:
    server = ["nohup", sys.executable, "-m", "psstore.cli.server", "--port", "0"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)  # if the first one were seen to, the next would find it draining
        with psstore.connect(url) as store:
            assert store.keys() == []
        process.terminate()
        assert process.wait(END_S) == 0


def test_drain_tells_clients_and_lets_go_of_them() -> None:
    with StoreProcess() as store, RawClient(store.url) as client:
        client.hello()
        store.signal(signal.SIGTERM)
        with pytest.raises(errors.ShuttingDown):
            client.reply("STATISTICS")
        assert client.closed_by_server()
        client.close()
        assert store.wait() == 0


def test_another_store_may_have_the_unix_socket_as_soon_as_this_one_drains(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreProcess("--uds", str(path), port=None) as store, RawClient(store.url) as client:
        client.hello()
        store.signal(signal.SIGTERM)
        with pytest.raises(errors.ShuttingDown):
            client.reply("STATISTICS")
        assert not path.exists(), "what comes there may have the same inode"
        with StoreProcess("--uds", str(path), port=None) as next_one, RawClient(next_one.url) as other:
            client.close()
            assert store.wait() == 0
            other.hello()
            assert path.is_socket()


def test_drain_is_bounded_by_clients_that_do_not_close() -> None:
    with StoreProcess() as store, RawClient(store.url) as client:
        client.hello()
        assert store.stop() == 0
        assert "killing" not in store.log()


def test_second_signal_does_not_wait_for_anybody() -> None:
    with StoreProcess() as store, RawClient(store.url) as client:
        client.hello()
        store.signal(signal.SIGTERM)
        with pytest.raises(errors.ShuttingDown):
            client.reply("STATISTICS")
        store.signal(signal.SIGTERM)
        assert store.wait() == 0
        assert "killing shard 0" in store.log(), "a connection may linger for 5 s"


def test_signal_while_starting_ends_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "uvloop.py").write_text(f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)")
    store = StoreProcess("--loop", "uvloop", environ={"PYTHONPATH": str(tmp_path)})
    try:
        deadline = time.monotonic() + END_S
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert store.stop() == 0
    finally:
        store.end()


def test_killed_supervisor_takes_its_shards_along(tmp_path: Path) -> None:
    with StoreProcess("--shards", "2", "--uds", str(tmp_path / "store"), port=None) as store:
        shards = store.shards()
        store.signal(signal.SIGKILL)
        assert_gone(shards)
        assert list(tmp_path.iterdir()) == []
        assert store.log().count("the supervisor is gone; shutting down") == 2


def test_killed_supervisor_takes_along_what_asks_silent_shards_for_checkpoints(tmp_path: Path) -> None:
    def is_writer(process: psutil.Process) -> bool:
        return "psstore.launch.checkpointing" in process.cmdline()

    with StoreProcess("--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "1") as store:
        assert eventually(lambda: any(is_writer(one) for one in store.shards()))
        started = store.shards()
        writers = [one for one in started if is_writer(one)]
        shards = [one for one in started if one not in writers]
        with psstore.connect(store.url, role="client") as client:
            assert eventually(lambda: client.stats()[0]["connections"] == 2), "it asks"
        for shard in shards:
            shard.suspend()
        try:
            store.signal(signal.SIGKILL)
            assert_gone(writers)
        finally:
            for shard in shards:
                shard.resume()
        assert_gone(shards)


def test_killed_shard_is_named_and_ends_the_store(tmp_path: Path) -> None:
    with StoreProcess("--shards", "3", "--uds", str(tmp_path / "store"), port=None) as store:
        shards = store.shards()
        shards[1].kill()
        assert store.wait() == 1
        assert_gone(shards)
        assert list(tmp_path.iterdir()) == []
        (line,) = [line for line in store.log().splitlines() if "supervisor" in line]
        assert "error supervisor [-] shard " in line
        assert "was killed by signal 9 (SIGKILL); the store is lost, stopping the other shards" in line


def test_shards_are_named_in_the_process_list() -> None:
    """Operators look there; secrets must not be there."""
    with StoreProcess() as store:
        (shard,) = store.shards()
        assert "psstore.server.shard" in shard.cmdline()
