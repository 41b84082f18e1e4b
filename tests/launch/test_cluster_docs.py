"""docs/clusters.md: what can be tried on one machine runs as it is written, and its manifests say what we read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psstore.launch.cluster_sources import find_cluster, read_tf_config
from psstore.server.settings import ServerSettings
from tests.launch.cluster_tasks import END_S, TRAINING, Task, digests, write_script
from tests.support.free_ports import free_ports


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "clusters.md").read_text()


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document, re.DOTALL)


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all its pods."""
    spec = manifest["spec"]
    replicas = spec["tfReplicaSpecs"].values() if "tfReplicaSpecs" in spec else [spec]
    return [container for one in replicas for container in one["template"]["spec"]["containers"]]


def test_the_cluster_on_one_machine_runs_as_it_is_written(document: str, tmp_path: Path) -> None:
    (commands,) = [block for block in blocks(document, "bash") if "localhost:2222" in block]
    for port, free in zip(("2222", "2223"), free_ports(2), strict=True):
        commands = commands.replace(f"localhost:{port}", f"localhost:{free}")
    write_script(tmp_path, TRAINING)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=END_S,
    )  # fmt: skip
    assert done.stdout.count("rank 0 of 2") == done.stdout.count("rank 1 of 2") == 1, done.stderr
    assert len(digests(done.stdout)) == 1


def test_each_role_of_the_classic_command_is_a_task(document: str) -> None:
    lines = blocks(document, "bash")[1].splitlines()
    hosts = re.findall(r"--(\w+)=([\w:,]+)", lines[0])
    roles = [dict(re.findall(r"--(\w+)=(\w+)", line)) for line in lines[1:]]
    tasks = [find_cluster({**dict(hosts), **role}, {}).cluster for role in roles]
    assert [(task.job_name, task.task_index) for task in tasks if task] == [
        ("ps", 0),
        ("ps", 1),
        ("worker", 0),
        ("worker", 1),
    ]


def test_the_tf_config_shown_is_rank_1_of_2(document: str) -> None:
    (text,) = blocks(document, "json")
    parts = read_tf_config(json.dumps(json.loads(text)))
    assert (parts["task_index"], parts["worker_hosts"]) == (1, ("c:2222", "w1:2222"))


def test_variables_in_the_manifests_are_settings(document: str) -> None:
    yaml = pytest.importorskip("yaml")
    manifests = [manifest for block in blocks(document, "yaml") for manifest in yaml.safe_load_all(block)]
    assert [manifest["kind"] for manifest in manifests] == ["TFJob"]
    told = [
        variable["name"]
        for manifest in manifests
        for container in containers(manifest)
        for variable in container["env"]
    ]
    assert told
    settings = {f"PSSTORE_{name.upper()}" for name in ServerSettings.__struct_fields__}
    assert set(told) <= settings


def test_the_example_trains_under_flags(repository: Path) -> None:
    """A loopback cluster of one ps task and one worker."""
    script = str(repository / "examples" / "cluster_flags.py")
    flags = [f"--ps_hosts=localhost:{free_ports(1)[0]}", "--worker_hosts=localhost", "--task_index=0"]
    ps = Task([sys.executable, script, *flags, "--job_name=ps"])
    worker = Task([sys.executable, script, *flags, "--job_name=worker", "--rounds", "40"])
    with ps, worker:
        assert worker.wait() == 0, worker.output()
        assert ps.wait() == 0, ps.output()
        accuracy = re.search(r"accuracy ([\d.]+)%", worker.output())
        assert accuracy is not None
        assert float(accuracy[1]) > 95
