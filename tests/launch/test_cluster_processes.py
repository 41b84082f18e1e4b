"""A cluster's tasks as real processes on loopback: they find each other, train, and end; whatever dies, all end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import psstore
from tests.launch.cluster_tasks import (
    END_S,
    ENDLESS,
    TOKEN,
    TRAINING,
    Cluster,
    Task,
    digest_of_psstore_run,
    digests,
    loopback_hosts,
    wait_for,
    write_script,
    write_token,
)
from tests.support.server_process import StoreProcess, failed_start

PATIENCE_S = 4
LOST, NOT_STARTED = 1, 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two ps tasks and two workers, none of them started."""
    environ = {"PSSTORE_TOKEN_FILE": str(write_token(tmp_path)), "PSSTORE_PATIENCE_S": str(PATIENCE_S)}
    with Cluster(ps_hosts=loopback_hosts(2), worker_hosts="localhost,localhost", environ=environ) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path, TRAINING)


def assert_all_end_well(tasks: list[Task]) -> None:
    statuses = [task.wait() for task in tasks]
    assert statuses == [0] * len(tasks), "\n".join(task.output() for task in tasks)


# ---- they train -------------------------------------------------------------------------------------


def test_a_script_told_by_flags_computes_what_psstore_run_does(cluster: Cluster, script: Path) -> None:
    """Workers first: they wait for the ps tasks."""
    workers = [cluster.script("worker", index, script, "--epochs", "1") for index in range(2)]
    ps = [cluster.script("ps", index, script) for index in (1, 0)]
    assert_all_end_well(workers + ps)
    assert [worker.output().splitlines()[-1][:13] for worker in workers] == ["rank 0 of 2: ", "rank 1 of 2: "]
    (digest,) = digests("".join(worker.output() for worker in workers))
    assert digest == digest_of_psstore_run(script, shards=2, workers=2)


def test_psstore_run_starts_each_role(cluster: Cluster, tmp_path: Path) -> None:
    """The script is one that knows nothing of flags; the ps tasks need none."""
    script = write_script(
        tmp_path,
        """
        import os
        import psstore
        with psstore.connect() as store:
            store.barrier()
            print(store.rank, store.num_workers, store.num_shards, os.environ["LOCAL_RANK"])
        """,
    )
    ps = [cluster.run("ps", index, Path("nowhere.py"), "--mode", "async") for index in range(2)]
    workers = [cluster.run("worker", index, script) for index in range(2)]
    assert_all_end_well(workers + ps)
    assert [worker.output().splitlines()[-1] for worker in workers] == ["0 2 2 0", "1 2 2 1"]
    assert "at ps://127.0.0.1" in ps[1].output()
    assert "(async, 2 workers)" in ps[0].output()


def test_tf_config_starts_each_role(cluster: Cluster, script: Path) -> None:
    hosts = {"ps": loopback_hosts(2).split(","), "chief": ["w0:2222"], "worker": ["w1:2222"]}

    def start(kind: str, index: int, *launcher: str) -> Task:
        config = json.dumps({"cluster": hosts, "task": {"type": kind, "index": index}})
        return cluster.start([sys.executable, *launcher, str(script)], TF_CONFIG=config)

    launcher = ("-m", "psstore.cli.main", "run")
    tasks = [start("ps", 0), start("ps", 1, *launcher), start("chief", 0, *launcher), start("worker", 0)]
    assert_all_end_well(tasks)
    assert "rank 0 of 2" in tasks[2].output()
    assert "rank 1 of 2" in tasks[3].output()
    assert len(digests(tasks[2].output() + tasks[3].output())) == 1


def test_an_evaluator_reads_and_is_not_waited_for(cluster: Cluster, script: Path, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    reader = write_script(
        tmp_path / "reader",
        """
        import time
        from psstore import cluster
        store = cluster.from_flags()
        print("rank", store.rank, "of", store.num_workers, flush=True)
        time.sleep(600)
        """,
    )
    ps = [cluster.script("ps", index, script) for index in range(2)]
    evaluator = cluster.script("evaluator", 0, reader, RANK="1", WORLD_SIZE="9")
    wait_for(evaluator, "rank None of 2")
    workers = [cluster.script("worker", index, script) for index in range(2)]
    assert_all_end_well(workers + ps)


def test_one_ps_task_on_loopback_needs_no_token(tmp_path: Path, script: Path) -> None:
    with Cluster(ps_hosts=loopback_hosts(1), worker_hosts="localhost", environ={}) as cluster:
        assert_all_end_well([cluster.script("ps", 0, script), cluster.script("worker", 0, script)])


# ---- somebody dies ----------------------------------------------------------------------------------


def start_endless(cluster: Cluster, directory: Path) -> dict[str, Task]:
    """Tasks that would go on for ever."""
    script = write_script(directory, ENDLESS)
    roles = [(job, index) for job in ("ps", "worker") for index in range(2)]
    tasks = {f"{job} {index}": cluster.script(job, index, script) for job, index in roles}
    for rank in range(2):
        wait_for(tasks[f"worker {rank}"], "under way")
    return tasks


@pytest.fixture
def under_way(cluster: Cluster, tmp_path: Path) -> dict[str, Task]:
    return start_endless(cluster, tmp_path)


def test_a_killed_worker_is_named_by_everybody(under_way: dict[str, Task]) -> None:
    under_way["worker 1"].signal(signal.SIGKILL)
    assert under_way["worker 0"].wait() == 1
    assert "WorkerLost: " in under_way["worker 0"].output()
    assert "rank 1" in under_way["worker 0"].output().splitlines()[-1]
    for ps in ("ps 0", "ps 1"):
        assert under_way[ps].wait() == LOST
        assert f"nobody came back within {PATIENCE_S} s" in under_way[ps].output()


def test_a_killed_ps_task_ends_the_others_of_its_store(under_way: dict[str, Task]) -> None:
    under_way["ps 1"].signal(signal.SIGKILL)
    for rank in range(2):
        assert under_way[f"worker {rank}"].wait() == 1
        assert "psstore.errors." in under_way[f"worker {rank}"].output()
    assert under_way["ps 0"].wait() == LOST
    assert "error ps task 0" in under_way["ps 0"].output()


def test_a_killed_coordinator_ends_the_other_ps_tasks(under_way: dict[str, Task]) -> None:
    under_way["ps 0"].signal(signal.SIGKILL)
    assert under_way["ps 1"].wait() == LOST
    assert "shard 0 at ps://127.0.0.1" in under_way["ps 1"].output()
    assert "is lost, and the store with it" in under_way["ps 1"].output()
    for rank in range(2):
        assert under_way[f"worker {rank}"].wait() == 1
        assert "psstore.errors." in under_way[f"worker {rank}"].output()


def test_a_ps_task_that_comes_back_empty_is_refused(
    under_way: dict[str, Task], cluster: Cluster, tmp_path: Path
) -> None:
    shards = psutil.Process(under_way["ps 1"].process.pid).children()
    under_way["ps 1"].signal(signal.SIGKILL)
    under_way["ps 1"].wait()
    psutil.wait_procs(shards, timeout=END_S)  # whose port it is
    again = cluster.script("ps", 1, tmp_path / "train.py")
    assert again.wait() == NOT_STARTED
    assert "is in use already: what this shard held of it is gone" in again.output()


def test_a_coordinator_that_is_started_anew_gets_no_shards_of_before(cluster: Cluster, tmp_path: Path) -> None:
    """Its decisions begin at 1 again: a shard that has seen more would take them for old ones."""
    cluster.environ["PSSTORE_PATIENCE_S"] = "600"  # not for being away, then
    tasks = start_endless(cluster, tmp_path)
    shards = psutil.Process(tasks["ps 0"].process.pid).children()
    tasks["ps 0"].signal(signal.SIGKILL)
    psutil.wait_procs(shards, timeout=END_S)
    cluster.script("ps", 0, tmp_path / "train.py")
    assert tasks["ps 1"].wait() == LOST
    assert "was restarted and has lost what it held" in tasks["ps 1"].output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_ps_task_that_waits(cluster: Cluster, script: Path, number: signal.Signals) -> None:
    """One for the coordinator, and the coordinator for its workers."""
    other = cluster.script("ps", 1, script)
    wait_for(other, "waiting for shard 0 at ps://127.0.0.1")
    coordinator = cluster.script("ps", 0, script)
    wait_for(coordinator, "ready: shard 0 of 2")
    wait_for(other, "ready: shard 1 of 2")
    for task in (other, coordinator):
        task.signal(number)
        assert task.wait() == 0


def test_a_signal_ends_a_ps_task_that_has_not_begun(cluster: Cluster, script: Path) -> None:
    task = cluster.script("ps", 1, script)
    wait_for(task, "waiting for shard 0 at ps://127.0.0.1")
    task.signal(signal.SIGTERM)
    assert task.wait() == 0


# ---- what it refuses --------------------------------------------------------------------------------


def test_several_ps_tasks_need_a_token_and_are_told_how_to_make_one(cluster: Cluster, script: Path) -> None:
    task = cluster.script("ps", 0, script, PSSTORE_TOKEN_FILE="")
    assert task.wait() == NOT_STARTED
    assert "secrets.token_hex(32))' > token" in task.output()
    assert "PSSTORE_TOKEN_FILE=$PWD/token" in task.output()


def test_another_token_is_refused_with_a_sentence(cluster: Cluster, script: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    wrong = write_token(tmp_path / "other", TOKEN.upper())
    cluster.script("ps", 0, script)
    ps = cluster.script("ps", 1, script, "--token_file", str(wrong))
    worker = cluster.script("worker", 0, script, "--token-file", str(wrong))
    assert ps.wait() == NOT_STARTED
    assert "different tokens; give every host the same one" in ps.output()
    assert worker.wait() == 1
    assert worker.output().splitlines()[-1].endswith("client and store have different tokens")


def test_ps_tasks_that_were_told_different_things_say_so(cluster: Cluster, script: Path) -> None:
    cluster.run("ps", 0, script)
    ps = cluster.run("ps", 1, script, "--mode", "async")
    assert ps.wait() == NOT_STARTED
    assert "was started for 2 workers, quorum 2, staleness 0, this host for 2 workers, quorum 1" in ps.output()


def test_numbers_of_shards_and_a_cluster_dont_go_together(cluster: Cluster, script: Path) -> None:
    task = cluster.run("worker", 0, script, "--shards", "2")
    assert task.wait() == 2
    assert "--shards and --workers are for a run on one host" in task.output()


def test_a_store_that_never_comes_is_named(cluster: Cluster, tmp_path: Path) -> None:
    script = write_script(tmp_path, "from psstore import cluster\ncluster.from_flags(connect_timeout_s=1.0)")
    worker = cluster.script("worker", 0, script)
    assert worker.wait() == 1
    assert "waiting for the ps task at ps://127.0.0.1" in worker.output()
    assert "did not serve within 1 s" in worker.output().splitlines()[-1]


def test_no_cluster_at_all_is_explained(script: Path) -> None:
    with Task([sys.executable, str(script)], {"PSSTORE_URL": ""}) as task:
        assert task.wait() == 1
        assert "no cluster: give --ps_hosts" in task.output().splitlines()[-1]


# ---- psstore-server as one of several ---------------------------------------------------------------


def test_psstore_server_serves_one_shard_of_several(tmp_path: Path) -> None:
    hosts = loopback_hosts(2)
    flags = ("--shards-at", hosts, "--token-file", str(write_token(tmp_path)))
    first = StoreProcess(*flags, "--shard-index", "0", port=None)
    second = StoreProcess(*flags, "--shard-index", "1", port=None)
    with first, second:
        assert first.url == second.url == f"ps://{hosts.split(',')[0]}"
        assert second.ready["index"] == 1
        assert [address.removeprefix("ps://") for address in second.addresses] == hosts.split(",")


def test_psstore_server_can_end_when_its_workers_are_done() -> None:
    with StoreProcess("--shards", "2", "--workers", "2", "--until-done") as store:
        for rank in (1, 0):
            assert store.process.poll() is None
            psstore.connect(store.url, rank=rank).close()
        assert store.wait() == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--shards-at", "h1:1,h2:1"), "--shards-at and --shard-index go together"),
        (("--shard-index", "0"), "--shards-at and --shard-index go together"),
        (("--shards-at", "h1:1,h2:1", "--shard-index", "2"), "shard_index is 2, but shards_at names 2"),
        (("--shards-at", "h1:1,h2:1", "--shard-index", "0", "--shards", "3"), "leave --shards out"),
        (("--shards-at", "h1:1,h2:1", "--shard-index", "0", "--uds", "x"), "leave --uds and --advertise out"),
        (("--shards-at", "h1:1,h1:1", "--shard-index", "0"), "names 'h1:1' twice"),
        (("--shards-at", "h1:1,h2:1", "--shard-index", "0"), "need a token, the same one everywhere"),
    ],
)
def test_psstore_server_refuses_what_makes_no_store(flags: tuple[str, ...], sentence: str) -> None:
    status, stderr = failed_start(*flags, port=None)
    assert status == NOT_STARTED
    assert sentence in stderr
