"""A cluster whose tasks have a host of their own each: virtual ones, joined by a network of their own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bench.virtual_hosts import VirtualHosts, why_not

from psstore.client.local import LocalStore
from tests.launch.cluster_tasks import (
    ENDLESS,
    TOKEN,
    TRAINING,
    Cluster,
    Task,
    digests,
    wait_for,
    write_script,
    write_token,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PATIENCE_S = 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    """host0 and host1 serve, host2 and host3 train."""
    with VirtualHosts(4) as hosts:
        yield hosts


class HostedCluster(Cluster):
    """Each task on its own host."""

    def __init__(self, hosts: VirtualHosts, token: Path) -> None:
        environ = {"PSSTORE_TOKEN_FILE": str(token), "PSSTORE_PATIENCE_S": str(PATIENCE_S)}
        super().__init__(ps_hosts="host0:2222,host1:2222", worker_hosts="host2,host3", environ=environ)
        self._hosts = hosts

    def task(self, job_name: str, index: int, script: Path, **environ: str) -> Task:
        role = [f"--job_name={job_name}", f"--task_index={index}"]
        command = [sys.executable, str(script), *self.flags, *role]
        return self.start(self._hosts.on(index if job_name == "ps" else 2 + index, command), **environ)


@pytest.fixture
def cluster(hosts: VirtualHosts, tmp_path: Path) -> Iterator[HostedCluster]:
    with HostedCluster(hosts, write_token(tmp_path)) as cluster:
        yield cluster


def digest_of_one_process(rounds: int = 5) -> str:
    """What TRAINING prints, computed here by a store and two workers in this process."""
    shapes = {"a": (300, 1000), "b": (70, 70), "c": (600, 1000)}
    with LocalStore(1, workers=2) as local, ThreadPoolExecutor() as pool:
        workers = [local.connect(rank=rank) for rank in range(2)]
        random = [np.random.default_rng(rank) for rank in range(2)]
        for name, shape in shapes.items():
            workers[0].create(name, np.ones(shape, "f4"), rule="sgd")
            workers[1].create(name, np.ones(shape, "f4"), rule="sgd")
        for _ in range(rounds):
            for name, shape in shapes.items():
                for worker, numbers in zip(workers, random, strict=True):
                    worker.push(name, numbers.standard_normal(shape, "f4"))
            for committed in [pool.submit(worker.commit, {"lr": 0.1, "momentum": 0.9}) for worker in workers]:
                committed.result()
        return hashlib.sha256(b"".join(workers[0].pull(name).tobytes() for name in sorted(shapes))).hexdigest()


def test_hosts_train_over_a_network_as_one_process_does(cluster: HostedCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING)
    tasks = [cluster.task(job, index, script) for job in ("worker", "ps") for index in range(2)]
    assert [task.wait() for task in tasks] == [0, 0, 0, 0], "\n".join(task.output() for task in tasks)
    assert digests("".join(task.output() for task in tasks)) == {digest_of_one_process()}


def test_hosts_with_another_token_are_refused_with_a_sentence(cluster: HostedCluster, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    wrong = str(write_token(tmp_path / "other", TOKEN.upper()))
    script = write_script(tmp_path, TRAINING)
    cluster.task("ps", 0, script)
    ps = cluster.task("ps", 1, script, PSSTORE_TOKEN_FILE=wrong)
    worker = cluster.task("worker", 0, script, PSSTORE_TOKEN_FILE=wrong)
    assert ps.wait() == 3
    assert "shard 0 at ps://host0:2222" in ps.output()
    assert worker.wait() == 1
    assert worker.output().splitlines()[-1].endswith("client and store have different tokens")


def test_hosts_without_a_token_are_told_how_to_make_one(cluster: HostedCluster, tmp_path: Path) -> None:
    task = cluster.task("ps", 0, write_script(tmp_path, TRAINING), PSSTORE_TOKEN_FILE="")
    assert task.wait() == 3
    assert "secrets.token_hex(32))' > token" in task.output()


def test_a_coordinator_cut_off_from_the_network_is_missed_by_all(
    cluster: HostedCluster, hosts: VirtualHosts, tmp_path: Path
) -> None:
    """No connection is closed: only silence tells. Its own side misses the workers."""
    script = write_script(tmp_path, ENDLESS)
    tasks = {f"{job} {index}": cluster.task(job, index, script) for job in ("ps", "worker") for index in range(2)}
    for rank in range(2):
        wait_for(tasks[f"worker {rank}"], "under way")
    with hosts.unplugged(0):
        assert tasks["ps 1"].wait() == 1
        assert "shard 0 at ps://host0:2222" in tasks["ps 1"].output()
        for rank in range(2):
            assert tasks[f"worker {rank}"].wait() == 1
            assert "psstore.errors." in tasks[f"worker {rank}"].output()
        assert tasks["ps 0"].wait() == 1
