"""`psstore bench`: what it measures of a running store, and that it leaves nothing there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner, Result

import psstore
from psstore.cli.main import app
from psstore.errors import StoreUnreachable
from psstore.net.address import TcpAddress
from psstore.net.baseline import RawLinks, listen, peer_here, serve
from tests.support.cluster import StartCluster, clusters

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

FEW = ("--megabytes", "1", "--rounds", "1")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(params=["tcp", "unix"])
def start(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    with clusters(request.param) as start:
        yield start


@contextmanager
def serving() -> Iterator[TcpAddress]:
    """What `--serve` runs, in a thread."""
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=[listener], daemon=True).start()
        yield TcpAddress("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which closing would not


def rows(result: Result) -> dict[str, dict[str, float]]:
    assert result.exit_code == 0, result.output
    return {row["what"]: row for row in json.loads(result.stdout)["rows"]}


def test_bench_measures_the_store_and_plain_sockets_over_the_same_transport(start: StartCluster) -> None:
    measured = rows(bench(start(shards=2).url, "--json", *FEW))
    assert list(measured) == ["push model", "pull model", "push 1 KiB", "pull 1 KiB"]
    for row in measured.values():
        for times in (row["store"], row["raw"]):
            assert isinstance(times, dict)
            assert 0 < times["min_s"] <= times["median_s"] <= times["p99_s"]


def test_bench_shares_no_memory_with_a_store_that_it_holds_against_sockets(
    start: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would have used more of the network than that carries."""
    cluster, connect = start(), psstore.connect
    transports: list[str] = []

    def noted(*arguments: Any, transport: Any, **options: Any) -> psstore.Store:
        transports.append(transport)
        return connect(*arguments, transport=transport, **options)

    monkeypatch.setattr(psstore, "connect", noted)
    assert rows(bench(cluster.url, "--json", *FEW))
    assert transports == [cluster.transport]


def test_bench_leaves_the_store_and_a_round_under_way_as_they_were(start: StartCluster) -> None:
    cluster = start()
    worker = cluster.connect(rank=0)
    worker.create("w", np.zeros(4, np.float32), rule="sgd")
    worker.push("w", np.ones(4, np.float32))
    assert bench(cluster.url, *FEW).exit_code == 0
    assert worker.keys() == ["w"]
    worker.commit({"lr": 1.0})
    assert worker.pull("w").tolist() == [-1.0] * 4


def test_bench_shows_a_table_and_what_the_network_carries(start: StartCluster) -> None:
    shown = bench(start().url, *FEW).stdout
    assert "push model" in shown
    assert "The network carries" in " ".join(shown.split())


def test_bench_takes_a_url_with_the_place_of_a_standby() -> None:
    with clusters("tcp") as start:
        assert rows(bench(f"{start().url},127.0.0.1:1", "--json", *FEW))


def test_bench_says_that_a_model_is_too_large_for_the_store_or_for_this_machine(
    start: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start()
    refused = bench(cluster.url, "--megabytes", "1000000")
    assert (refused.exit_code, "the store may use" in refused.output) == (3, True), refused.output
    monkeypatch.setattr(np, "ones", no_memory)
    refused = bench(cluster.url, *FEW)
    assert (refused.exit_code, "no memory here" in refused.output) == (1, True), refused.output
    assert cluster.connect(rank=0).keys() == []


def no_memory(*_: object) -> None:
    raise MemoryError


def test_bench_takes_a_peer_that_runs_elsewhere(start: StartCluster) -> None:
    with serving() as peer:
        assert rows(bench(start().url, "--json", "--raw", str(peer), *FEW))["push model"]["raw"]


def test_bench_says_what_to_do_without_a_store_or_a_peer() -> None:
    nobody = "ps://127.0.0.1:1"
    assert "expected ps://host:port" in bench("local://").output
    assert "one of resnet50, vgg16, gpt2" in bench(nobody, "--model", "alexnet").output
    with clusters("tcp") as start:
        unreachable = bench(start().url, "--raw", nobody, *FEW)
    assert unreachable.exit_code == 3
    assert "psstore bench --serve" in unreachable.output


def test_bench_says_that_a_peer_is_none(start: StartCluster) -> None:
    url = start().url
    wrong = bench(url, "--raw", url, *FEW)
    assert wrong.exit_code == 3
    assert f"what is at {url} is no peer, or has ended" in wrong.output


def test_a_peer_that_was_told_to_end_leaves_no_socket_behind(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    command = [sys.executable, "-m", "psstore.cli.main", "bench", "--serve", f"unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline().startswith(b"moving bytes")
        assert path.is_socket()
        peer.terminate()
    assert (peer.returncode, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request"])
def test_raw_links_say_that_a_peer_answers_otherwise(answer: bytes) -> None:
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        peer = TcpAddress("127.0.0.1", listener.getsockname()[1])
        with closing(RawLinks(peer, 1)) as links:
            connection, _ = listener.accept()
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            with connection, pytest.raises(StoreUnreachable, match="is no peer, or has ended"):
                links.up(memoryview(b"1234"))


def test_the_peer_here_hears_no_ctrl_c_and_ends_with_who_started_it() -> None:
    with peer_here(TcpAddress("127.0.0.1", 0)) as peer, closing(RawLinks(peer, 1)) as links:
        links.up(memoryview(b"1234"))  # it runs
        (process,) = [one for one in psutil.Process().children() if "psstore.net.baseline" in one.cmdline()]
        assert os.getsid(process.pid) != os.getsid(0)
    assert not process.is_running()
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "psstore.net.baseline", str(listener.fileno())]
        left_alone = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    left_alone.communicate(timeout=60)
    assert left_alone.returncode == 0


def test_raw_links_move_what_does_not_divide_evenly() -> None:
    with serving() as peer, closing(RawLinks(peer, 3)) as links:
        links.up(memoryview(bytes(200_000)))
        into = bytearray(b"x" * 200_000)
        links.down(memoryview(into))
        assert not any(into)
