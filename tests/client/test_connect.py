"""Finding a store, being refused by one, and letting go of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import psstore
from psstore import _core
from psstore.client.operations import Operations
from psstore.client.store import Backend, Store
from psstore.client.store_status import look_at
from psstore.errors import (
    AuthFailed,
    BadArgument,
    BadBody,
    InternalError,
    NotAWorker,
    PsstoreError,
    RankTaken,
    StoreClosed,
    StoreUnreachable,
    TooManyWorkers,
    UsageError,
)
from psstore.net.client import Reconnector
from psstore.protocol.rounds import ATTEST_EVERY
from psstore.types import TensorSpec
from psstore.wire import messages as m
from tests.support.cluster import MAY_FORK, PATIENCE_S, TRANSPORTS, Cluster, clusters
from tests.support.free_ports import consecutive_ports, free_ports
from tests.support.server_process import StoreProcess, eventually


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(loop_name: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with clusters(request.param) as start:
        yield start(shards=2, workers=2)


# ---- stores that are not there ----------------------------------------------------------------------


@pytest.mark.sockets
def test_unreachable_store_says_where_how_long_and_what_to_do(tmp_path: Path) -> None:
    for url in (f"ps://127.0.0.1:{free_ports(1)[0]}", f"unix://{tmp_path}/none"):
        with pytest.raises(StoreUnreachable, match="psstore-server") as caught:
            psstore.connect(url, connect_timeout_s=0.2)
        assert caught.value.details["address"] == url
        assert 0.2 <= float(str(caught.value.details["tried_s"])) < PATIENCE_S
        assert url in caught.value.message


@pytest.mark.sockets
def test_a_store_that_looks_for_its_shards_leaves_the_programs_random_numbers_alone(tmp_path: Path) -> None:
    """Else a training that draws from them would not be the one that it is where no connection breaks."""
    before = random.getstate()
    with pytest.raises(StoreUnreachable):
        psstore.connect(f"unix://{tmp_path}/nobody", connect_timeout_s=0.3)
    assert random.getstate() == before


def test_a_name_that_cannot_be_a_host_s_is_told() -> None:
    with pytest.raises(StoreUnreachable, match=r"'foo\.\.bar' is no name of a host"):
        psstore.connect("ps://foo..bar:5700", connect_timeout_s=0.3)


def test_what_ends_the_keeping_of_a_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(self: Reconnector) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Reconnector, "_dial", dial)
    with pytest.raises(InternalError, match="can't start new thread"):
        psstore.connect("ps://127.0.0.1:1", connect_timeout_s=60)


def test_a_store_that_is_closed_by_a_future_of_its_own_leaves() -> None:
    with psstore.LocalStore(workers=2) as local, local.connect(role="client") as looking:
        store = local.connect(rank=0)
        store.start_pull_many([]).add_done_callback(lambda _: store.close())
        assert eventually(lambda: looking.stats()[0]["ranks_left"] == "0")


def test_second_connect_of_a_process_is_told_of_the_first() -> None:
    with clusters("tcp") as start:
        cluster = start()
        with psstore.connect(cluster.url):
            for rank, error in ((None, TooManyWorkers), (0, RankTaken)):
                for url in (cluster.url, cluster.url.replace("127.0.0.1", "localhost")):
                    with pytest.raises(error, match=r"this process has rank 0 already, by an earlier connect\(\)"):
                        psstore.connect(url, rank=rank)
        psstore.connect(cluster.url).close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_store_that_is_copied_or_pickled_says_what_to_do(copied: Callable[[object], object]) -> None:
    with psstore.connect("local://") as store, pytest.raises(UsageError, match="connect in each process"):
        copied(store)


@pytest.mark.sockets
def test_peer_that_hangs_up_is_said_to_do_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(StoreUnreachable, match="takes connections and ends them at once"):
            psstore.connect(f"ps://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=2)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.sockets
def test_peer_that_is_no_store_is_told_from_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PsstoreError, match="does not speak psstore's protocol"):
            psstore.connect(f"ps://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=PATIENCE_S)
        thread.join()


@pytest.mark.sockets
def test_peer_that_answers_what_nobody_understands_is_given_up_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"ps://127.0.0.1:{listener.getsockname()[1]}"
        welcome = m.Welcome(
            store="s",
            shard=0,
            addresses=((url,),),
            num_workers=1,
            quorum=1,
            staleness=0,
            version=0,
            last_sequence=0,
        )

        def answer() -> None:
            for _ in range(2):  # the first asks for the shards, the second is for them
                connection, _ = listener.accept()
                with connection:
                    decoder = _core.FrameDecoder()
                    while data := connection.recv(1000):
                        decoder.feed(data)
                        while (frame := decoder.next_frame()) is not None:
                            op, body = frame.op + 1, b"\xc1"
                            if frame.op == _core.OPS["HELLO"]:
                                op, body = _core.OPS["WELCOME"], m.encode_body(welcome)
                            connection.sendall(_core.encode_frame(op, request=frame.request, body=body))

        thread = threading.Thread(target=answer)
        thread.start()
        with psstore.connect(url, role="client", transport="tcp", timeout_s=30.0) as store:
            for _ in range(2):
                with pytest.raises(BadBody, match="body of Statistics"):
                    store.stats()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.sockets
def test_store_that_comes_late_is_waited_for() -> None:
    port = consecutive_ports(2)
    with clusters("unix") as start:
        arriving = threading.Timer(0.3, lambda: started.append(start("--port", str(port))))
        started: list[Cluster] = []
        arriving.start()
        with psstore.connect(f"ps://127.0.0.1:{port}", connect_timeout_s=PATIENCE_S) as store:
            assert store.rank == 0
        arriving.join()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1", "ps://host:port"),
        ("local://?shards=two", "shards is 'two'"),
        ("local://?colour=red", "no option 'colour'"),
        ("local://?mode=maybe", "'maybe'"),
        ("local://?grace_s=soon", "grace_s is 'soon'; expected a number of seconds, or auto"),
        ("local://?workers=2&grace_s=auto", "grace_s is auto, and in mode 'sync' no quorum waits for others"),
        ("local://?refuse_norm=much", "refuse_norm is 'much'; expected a number"),
        ("local://?refuse_norm=0.5", "expected a number above 1"),
        ("local://?workers=2&grace_s=1", "no quorum waits for others"),
        ("local://?shards=0", "at least 1"),
    ],
)
def test_malformed_url_says_what_was_expected(url: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        psstore.connect(url)


def test_no_url_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSSTORE_URL", raising=False)
    with pytest.raises(BadArgument, match="psstore-server"):
        psstore.connect()


@pytest.mark.parametrize("mode", ["sync", "backup", "ssp", "async"])
def test_a_store_says_in_which_mode_it_is(mode: str) -> None:
    with psstore.LocalStore(workers=3, mode=mode) as server, server.connect() as store:
        assert store.consistency.mode == mode


def test_url_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSSTORE_URL", "local://?workers=3")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with psstore.connect() as store:
        assert (store.rank, store.num_workers) == (2, 3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BadArgument, match="4 workers"):
        psstore.connect()
    with psstore.connect("local://") as store:  # this program's own, and no part of that training
        assert (store.rank, store.num_workers) == (0, 1)


# ---- tokens ---------------------------------------------------------------------------------------


@pytest.mark.sockets
def test_token_is_needed_and_has_to_be_right(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sixteen bytes or more")
    token.chmod(0o600)
    with clusters("tcp") as start:
        url = start("--token-file", str(token), shards=2).url
        with pytest.raises(AuthFailed, match="token"):
            psstore.connect(url)
        with pytest.raises(AuthFailed, match="different tokens"):
            psstore.connect(url, token="something quite different")
        with psstore.connect(url, token=token.read_text()) as store:
            store.create("a", [1.0])
            assert store.pull("a") is not None


# ---- ranks ----------------------------------------------------------------------------------------


def test_ranks_are_given_out_and_not_twice(cluster: Cluster) -> None:
    with cluster.connect(rank=1) as first, cluster.connect() as second:
        assert (first.rank, second.rank) == (1, 0)
        with pytest.raises(RankTaken, match="rank 1 is held"):
            cluster.connect(rank=1)
        with pytest.raises(TooManyWorkers, match="--workers"):
            cluster.connect()
        with pytest.raises(BadArgument, match=r"rank 2 is not in \[0, 2\)"):
            cluster.connect(rank=2)


def test_client_that_is_no_worker_reads_and_does_not_train(cluster: Cluster) -> None:
    with cluster.connect(role="client") as store:
        store.create("w", [1.0], rule="sgd", exist="overwrite")
        assert store.rank is None
        with pytest.raises(NotAWorker, match="role='worker'"):
            store.push("w", [1.0])
        with pytest.raises(NotAWorker):
            store.commit()
        with pytest.raises(NotAWorker):
            store.barrier()


def test_worker_that_left_still_reads(cluster: Cluster) -> None:
    with cluster.connect(rank=0) as store:
        store.create("a", [1.0], exist="overwrite")
        store.leave()
        assert store.pull("a") is not None
        with pytest.raises(NotAWorker):
            store.commit()


# ---- decisions ----------------------------------------------------------------------------------------


def decisions_kept(cluster: Cluster) -> int:
    with cluster.connect(role="client") as store:
        return int(store.stats()[0]["decision_log"])


def test_decisions_are_forgotten_where_no_worker_stays_for_a_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psstore.protocol.participation.MANY_DECISIONS", 4)
    with clusters("local") as start:
        cluster = start(shards=2)
        for _ in range(12):
            with cluster.connect() as store:
                store.create("w", shape=(4,), rule="sgd")
                store.push("w", [1.0] * 4)
                store.commit({"lr": 0.1})
        assert decisions_kept(cluster) < 6


def test_decisions_are_forgotten_where_nobody_reads_and_a_shard_has_nothing() -> None:
    with clusters("local") as start:
        cluster = start(shards=2)
        with cluster.connect() as store:
            store.create("w", shape=(4,), rule="sgd")
            for _ in range(3 * ATTEST_EVERY):
                store.push("w", [1.0] * 4)
                store.commit({"lr": 0.1})
            assert decisions_kept(cluster) < 2 * ATTEST_EVERY


# ---- letting go -------------------------------------------------------------------------------------


@pytest.mark.sockets
@pytest.mark.one_loop
def test_a_store_that_is_closed_while_it_connects_anew_is_closed() -> None:
    """By another thread, which has nobody else to end what is there then."""
    with StoreProcess() as process, psstore.connect(process.url, rank=0) as store:
        again = store._again
        assert again is not None

        def close_meanwhile(rank: int | None) -> tuple[Operations, Backend]:
            made = again(rank)
            store.close()
            return made

        store._again = close_meanwhile
        with pytest.raises(StoreClosed):
            store.reconnect()
        assert store.closed
        with psstore.connect(process.url, role="client") as other:
            assert look_at(other).left == (0,)


@pytest.mark.sockets
@pytest.mark.one_loop
@pytest.mark.parametrize("timeout_s", [1e9, 1e12])
def test_a_time_limit_may_be_longer_than_any_system_sleeps(timeout_s: float) -> None:
    with StoreProcess() as process, psstore.connect(process.url, role="client", timeout_s=timeout_s) as store:
        store.create("a", [1.0])
        assert store.start_pull_many(["a"]).result(PATIENCE_S)[0].tolist() == [1.0]  # by its own thread
        assert list(store.keys()) == ["a"]


def test_closed_store_says_so(cluster: Cluster) -> None:
    store = cluster.connect(rank=0)
    store.close()
    store.close()
    with pytest.raises(StoreClosed, match="connect again"):
        store.keys()
    assert "closed" in repr(store)


def test_forgotten_store_lets_go_of_its_thread(cluster: Cluster) -> None:
    others = set(threading.enumerate())
    store = psstore.connect(cluster.url) if cluster.local is None else psstore.connect("local://")
    (own,) = set(threading.enumerate()) - others
    del store
    gc.collect()
    assert eventually(lambda: not own.is_alive())


def test_interrupt_leaves_the_store_usable(cluster: Cluster) -> None:
    with cluster.connect(role="client") as store:
        store.create_many([TensorSpec(name="never", shape=(1,), zeros=False)], offer=False, exist="overwrite")
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.pull("never")
        assert time.monotonic() - started < PATIENCE_S
        timer.join()
        store.create("a", [1.0], exist="overwrite")
        assert store.pull("a") is not None
        store.drop("never")


def test_interrupted_pull_of_deltas_says_nothing_of_its_own(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """What its parts came to is nobody's business any more."""
    with cluster.connect(role="client") as store:
        spec = TensorSpec(name="never", shape=(1,), rule="sgd", zeros=False)
        store.create_many([spec], offer=False, exist="overwrite")
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            store.pull("never", codec="int8")
        timer.join()
        store.drop("never")
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("ending", ["pass", "store.close()", "raise SystemExit(0)", "os._exit(0)"])
def test_program_that_ends_without_closing_ends_cleanly(cluster: Cluster, ending: str) -> None:
    url = cluster.url if cluster.local is None else "local://"
    program = f"import os, psstore; store = psstore.connect({url!r}, role='client'); store.keys(); {ending}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("ending", "flags", "left"),
    [("pass", [], True), ("raise RuntimeError", [], False), ("raise RuntimeError", ["-i"], True)],
    ids=["ended", "died", "went on at a prompt"],
)
def test_worker_that_ends_without_closing_leaves_unless_it_died(
    cluster: Cluster, ending: str, flags: list[str], left: bool
) -> None:
    if cluster.local is not None:
        pytest.skip("a store in the program ends with it: there is nobody to tell")
    program = f"import psstore; store = psstore.connect({cluster.url!r}, rank=1); {ending}"
    command = [sys.executable, *flags, "-c", program]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S)
    with cluster.connect(role="client") as store:
        expected = "ranks_left" if left else "ranks_lost"
        assert eventually(lambda: "1" in str(store.stats()[0][expected]).split(","))


# ---- forks ----------------------------------------------------------------------------------------


def in_child(cluster: Cluster, program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that forks, with `store` connected; a process of its own, as forking pytest is unkind."""
    url = cluster.url if cluster.local is None else "local://"
    prelude = f"import os, sys, psstore\nstore = psstore.connect({url!r}, role='client')\n"
    command = [sys.executable, "-W", MAY_FORK, "-c", prelude + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


FORK = """
store.create("a", [1.0, 2.0], exist="overwrite")
child = os.fork()
if child == 0:
    try:
        store.pull("a")
    except psstore.errors.StoreClosed as error:
        print("child:", error)
    store.close()
    ENDING
status = os.waitpid(child, 0)[1]
print("status:", status)
print("parent:", store.pull("a"), flush=True)
"""


@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.stdout.flush(); os._exit(0)"])
def test_forked_child_is_told_and_the_parent_goes_on(cluster: Cluster, ending: str) -> None:
    ended = in_child(cluster, FORK.replace("ENDING", ending))
    assert ended.stderr == ""
    assert "child: this store was connected before the process forked" in ended.stdout
    assert "status: 0" in ended.stdout
    assert "parent: [1. 2.]" in ended.stdout


def test_forked_child_may_connect_for_itself(cluster: Cluster) -> None:
    if cluster.local is not None:
        pytest.skip("an embedded store is its process's own")
    program = f"""
child = os.fork()
if child == 0:
    with psstore.connect({cluster.url!r}, role="client") as own:
        own.create("child's", [1.0], exist="overwrite")
    sys.exit(0)
os.waitpid(child, 0)
print(store.pull("child's"))
"""
    ended = in_child(cluster, program)
    assert (ended.stdout.strip(), ended.stderr) == ("[1.]", "")


def test_data_loader_workers_do_not_disturb_the_store(cluster: Cluster) -> None:
    program = """
import torch
store.create("a", [0.0], rule="add", exist="overwrite")
data = torch.utils.data.TensorDataset(torch.arange(64.0))
for epoch in range(2):
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
        store.push("a", batch.sum().reshape(1))
print(store.pull("a"))
"""
    ended = in_child(cluster, program)
    assert (ended.stdout.strip(), ended.stderr) == ("[4032.]", "")


@pytest.mark.sockets
def test_forked_children_do_not_keep_a_dead_workers_connection_alive() -> None:
    program = """
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with clusters("tcp") as start:
        cluster = start()
        with cluster.connect(role="client") as observer:
            before = int(observer.stats()[0]["connections"])
            ended = in_child(cluster, "import signal\nstore = psstore.connect(store._url)\n" + program)
            child = psutil.Process(int(ended.stdout))
            try:
                assert eventually(lambda: int(observer.stats()[0]["connections"]) <= before)
                assert child.is_running()
            finally:
                child.kill()


@pytest.mark.sockets
def test_interrupt_while_connecting_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        psstore.connect(f"ps://127.0.0.1:{free_ports(1)[0]}", connect_timeout_s=PATIENCE_S)
    timer.join()
    assert eventually(lambda: threading.active_count() <= threads), "those of former tests may have ended since"


def interrupt_once_waited_for(other: Store) -> None:
    """Once a commit is there that waits."""
    assert eventually(lambda: bool(other.stats()[0]["waited_for"]))
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_commit_may_be_made_again(cluster: Cluster) -> None:
    with cluster.connect(rank=0) as store, cluster.connect(rank=1) as other:
        store.create("w", [1.0], rule="sgd", exist="overwrite")
        store.push("w", [1.0])
        interrupting = threading.Thread(target=interrupt_once_waited_for, args=(other,))
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            store.commit({"lr": 1.0}, average=False)
        interrupting.join()
        other.commit({"lr": 1.0}, average=False)
        store.commit({"lr": 1.0}, average=False)
        assert store.pull("w") == 0.0
