"""/metrics, /livez and /readyz, of real stores."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import psstore
from psstore.config import NO_CREDENTIALS, Credentials
from psstore.launch import metrics_server, shard_probe
from psstore.launch.metric_names import METRICS
from psstore.launch.metrics_server import Pages, http_server
from psstore.launch.shard_probe import ShardProbe
from psstore.net.user_token import find
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually, failed_start

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

F32 = np.float32

PROMTOOL = shutil.which("promtool")


def get(url: str) -> tuple[int, str]:
    """(status, text)."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(url: str) -> dict[str, float]:
    """Value of each sample, as it is written, without quotes: 'psstore_shard_up{shard=0}'."""
    status, text = get(f"{url}/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in one.labels.items())
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


@contextmanager
def watched(process: StoreProcess, count: int | None = None) -> Iterator[str]:
    """The same pages from this process, where a test can change how patient they are. `count`: of how many shards."""
    probes = [
        ShardProbe(i, address, credentials=Credentials(token=find(address)), clock=time.monotonic)
        for i, address in enumerate(process.addresses[:count])
    ]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = [asyncio.run_coroutine_threadsafe(one.run(), loop) for one in probes]
    server = http_server(socket.create_server(("127.0.0.1", 0)), Pages(probes, credentials=NO_CREDENTIALS))
    answering = threading.Thread(target=server.serve_forever)
    answering.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        answering.join()
        for one in running:
            one.cancel()
        asyncio.run_coroutine_threadsafe(_ended(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _ended() -> None:
    """All other tasks have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


def test_what_trained_is_what_metrics_say() -> None:
    with StoreProcess("--shards", "2", "--workers", "2", "--metrics", "0") as process:
        url = process.ready["metrics"]
        with psstore.connect(process.url, rank=0) as store, psstore.connect(process.url, rank=1) as other:
            store.create("w", np.zeros(300_000, F32), rule="sgd")
            store.create_table('my "items"', dim=2, rule="sgd", group=1, max_rows=64, evict="lru")
            for _ in range(3):
                for one in (store, other):
                    one.push("w", np.ones(300_000, F32))
                waiting = store.start_commit({"lr": 1.0})
                other.commit({"lr": 1.0})
                waiting.result()
            store.pull("w")
            read = [f"psstore_shard_sent_bytes_total{{shard={i}}}" for i in range(2)]
            assert eventually(lambda: all(samples(url).get(one, 0.0) > 0.0 for one in read))
            told = samples(url)
        assert told["psstore_decisions_total"] == 3.0
        assert told["psstore_tensors"] == 2.0
        assert told["psstore_workers{state=live}"] == 2.0
        both = ("0", "1")
        assert (told["psstore_worker_rounds{rank=0}"], told["psstore_worker_staleness{rank=1}"]) == (3.0, 0.0)
        for rank in both:
            assert told[f"psstore_worker_pushed_bytes_total{{rank={rank}}}"] >= 3 * 1_200_000
        assert told["psstore_worker_pulled_bytes_total{rank=0}"] == 1_200_000
        assert told["psstore_commits_total{ahead=0}"] == 6.0
        assert sum(told[f"psstore_shard_received_bytes_total{{shard={i}}}"] for i in both) == (1 + 2 * 3) * 1_200_000
        assert sum(told[f"psstore_shard_sent_bytes_total{{shard={i}}}"] for i in both) == 1_200_000
        assert sum(told[f"psstore_shard_value_bytes{{shard={i}}}"] for i in both) == 1_200_000
        assert [told[f"psstore_shard_up{{shard={i}}}"] for i in both] == [1.0, 1.0]
        assert [told[f'psstore_table_rows{{shard={i},table=my "items"}}'] for i in both] == [0.0, 0.0]
        assert {name.partition("{")[0] for name in told} == {metric.name for metric in METRICS} - {
            "psstore_checkpoint_version"  # there is none
        }


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: apt-get install prometheus")
def test_prometheus_finds_nothing_to_mend_in_metrics() -> None:
    with StoreProcess("--metrics", "0") as process, psstore.connect(process.url) as store:
        store.create_table("items", dim=2, rule="sgd")
        url = process.ready["metrics"]
        assert eventually(lambda: "psstore_table_rows{shard=0,table=items}" in samples(url))
        text = get(f"{url}/metrics")[1]
    checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_checkpoints_are_counted(tmp_path: Path) -> None:
    with StoreProcess("--metrics", "0", "--checkpoint", str(tmp_path)) as process:
        with psstore.connect(process.url) as store:
            store.create("w", np.zeros(3, F32), rule="sgd")
            store.push("w", np.ones(3, F32))
            store.commit({"lr": 1.0})
            store.checkpoint()
        url = process.ready["metrics"]
        assert eventually(lambda: samples(url).get("psstore_checkpoint_version") == 1.0)
        assert samples(url)["psstore_checkpoints_written_total"] == 1.0


def test_the_page_of_the_docs_has_the_same_table(repository: Path) -> None:
    page = (repository / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(psstore_\w+)(?:\{([\w,]+)\})?` \| (counter|gauge) \| (.+?) \|$", page, re.MULTILINE)
    assert rows == [
        (one.name, ",".join(one.labels), "counter" if one.is_counter else "gauge", one.about) for one in METRICS
    ]


# ---- /livez, /readyz ----


def test_a_shard_that_hangs_is_named_and_one_that_goes_on_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections still: what tells is that it answers nothing."""
    monkeypatch.setattr(shard_probe, "HANGS_S", 1.0)
    monkeypatch.setattr(shard_probe, "LOOK_S", 0.1)
    with StoreProcess("--shards", "2") as process, watched(process) as url:
        assert eventually(lambda: get(f"{url}/readyz")[0] == 200)
        psutil.Process(process.shard_pids()[1]).suspend()
        assert eventually(lambda: get(f"{url}/livez")[0] == 503)
        assert "shard 1 runs and has answered nothing for" in get(f"{url}/livez")[1]
        psutil.Process(process.shard_pids()[1]).resume()
        assert eventually(lambda: get(f"{url}/livez")[0] == 200)
        assert eventually(lambda: get(f"{url}/readyz")[0] == 200)


def test_a_shard_that_has_ended_does_not_hang_and_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts it again, or ends with it, is its supervisor."""
    monkeypatch.setattr(shard_probe, "HANGS_S", 0.2)
    monkeypatch.setattr(shard_probe, "LOOK_S", 0.1)
    with StoreProcess() as process, watched(process) as url:
        assert eventually(lambda: get(f"{url}/readyz")[0] == 200)
        assert process.stop() == 0
        assert eventually(lambda: get(f"{url}/readyz")[0] == 503)
        assert eventually(lambda: get(f"{url}/livez")[0] == 200)
        assert re.search("shard 0 has not answered for|no connection to", get(f"{url}/readyz")[1])


def test_ready_is_what_a_client_can_read_from_and_write_to() -> None:
    with StoreProcess("--metrics", "0") as process:
        url = f"{process.ready['metrics']}/readyz"
        assert eventually(lambda: get(url) == (200, "ok: there are no tensors yet\n"))
        with psstore.connect(process.url) as store:
            store.create_table("rows", dim=2, rule="sgd", group=1)
            store.create("large", np.zeros(300_000, F32))
            store.create("small", np.zeros(3, F32))
            assert get(url) == (200, "ok: 'small' was read and written\n")
            store.drop("small")
            assert get(url)[0] == 200
            assert get(url) == (200, "ok: 'large' was read and written\n")
            assert int(store.stats()[0]["duplicates"]) > 0, "it came to where it was left out"
            assert store.version_of("large") == 0, "and changed nothing"


def test_a_store_that_has_gone_back_to_a_checkpoint_is_asked_anew(tmp_path: Path) -> None:
    with StoreProcess("--metrics", "0", "--checkpoint", str(tmp_path), "--restarts", "3") as process:
        url = process.ready["metrics"]
        with psstore.connect(process.url) as store:
            store.create("w", np.zeros(3, F32), rule="sgd")
            store.push("w", np.ones(3, F32))
            store.commit({"lr": 1.0})
            store.checkpoint()
            assert eventually(lambda: samples(url).get("psstore_workers{state=live}") == 1.0)
            psutil.Process(process.shard_pids()[0]).kill()
            assert eventually(lambda: "the store serves again, from version 1 on" in process.log())
            assert eventually(lambda: get(f"{url}/readyz") == (200, "ok: 'w' was read and written\n"))
            assert eventually(lambda: samples(url)["psstore_workers{state=live}"] == 0.0)
            assert samples(url)["psstore_decisions_total"] == 1.0


def test_ready_is_of_the_whole_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other shards are other hosts' to watch, and clients need them as well."""
    monkeypatch.setattr(metrics_server, "CONNECT_S", 0.5)
    with StoreProcess("--shards", "2") as process, psstore.connect(process.url) as store:
        store.create("w", np.zeros(3, F32))
        with watched(process, count=1) as url:
            assert eventually(lambda: get(f"{url}/readyz")[0] == 200)
            psutil.Process(process.shard_pids()[1]).suspend()
            assert eventually(lambda: get(f"{url}/readyz")[0] == 503)
            psutil.Process(process.shard_pids()[1]).resume()


def test_a_shard_that_was_there_before_and_reads_its_checkpoint_does_not_hang(tmp_path: Path) -> None:
    """Who asks is a new process, which has heard nothing of that one's former life."""
    with StoreProcess("--metrics", "0", "--checkpoint", str(tmp_path), "--restarts", "1") as process:
        asking = metrics_process(process)
        with psstore.connect(process.url) as store:
            store.create("w", np.zeros(3, F32), rule="sgd")
            store.checkpoint()
        psutil.Process(process.shard_pids()[0]).kill()
        assert eventually(lambda: "the store serves again" in process.log())
        assert metrics_process(process) != asking


# ---- who asks ----


def test_who_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CLIENTS", 4)
    with StoreProcess() as process, watched(process) as url:
        port = urllib.parse.urlsplit(url).port
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        assert get(f"{url}/livez")[0] == 200
        silent[0].settimeout(PATIENCE_S)
        assert silent[0].recv(1) == b"", "the oldest has gone"
        for sock in silent:
            sock.close()


def test_who_asks_for_the_head_alone_gets_that() -> None:
    with StoreProcess() as process, watched(process) as url:
        asked = urllib.request.Request(f"{url}/metrics", method="HEAD")
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200
            assert int(answer.headers["Content-Length"]) > 0
            assert answer.read() == b""


def test_who_hangs_up_is_no_bug(capfd: pytest.CaptureFixture[str]) -> None:
    with StoreProcess() as process, watched(process) as url:
        port = urllib.parse.urlsplit(url).port
        for request in (b"", b"GET /metrics HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(request)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(f"{url}/livez")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


# ---- its process ----


def metrics_process(process: StoreProcess) -> psutil.Process:
    (one,) = [one for one in process.shards() if "psstore.launch.metrics_server" in one.cmdline()]
    return one


def test_it_is_started_again_and_shards_do_without() -> None:
    with StoreProcess("--metrics", "0") as process:
        url = process.ready["metrics"]
        assert eventually(lambda: get(f"{url}/readyz")[0] == 200)
        metrics_process(process).kill()
        with psstore.connect(process.url) as store:
            assert store.keys() == []
        assert eventually(lambda: "what answers /metrics has ended, and is started again" in process.log())
        assert eventually(lambda: get(f"{url}/readyz")[0] == 200)
        assert process.stop() == 0
        assert f"sync, 1 worker; metrics at {url}/metrics)" in process.output()


def test_a_port_that_is_taken_is_said_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, log = failed_start("--metrics", str(port))
    assert status == 3
    assert f"port {port} is taken by" in log
    assert "use --metrics 0" in log


def test_without_prometheus_client_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None;"
        "from psstore.cli import server; sys.exit(server.run(['--metrics', '0', '--port', '0']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 3
    assert "--metrics needs prometheus-client: pip install 'psstore[metrics]'" in run.stderr
