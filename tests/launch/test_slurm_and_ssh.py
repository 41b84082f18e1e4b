"""docs/clusters.md's scripts for Slurm and for ssh, as they are written, on virtual hosts. What stands in for `srun`,
`scontrol` and `ssh` sets what these set, and runs commands on the hosts that they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.virtual_hosts import VirtualHosts, why_not

from tests.launch.cluster_tasks import END_S, TRAINING, digests, write_script, write_token
from tests.launch.test_cluster_hosts import digest_of_one_process

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SRUN = """
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && IFS=, read -ra hosts <<< "${1#*=}"
    shift
done
for task in "${!hosts[@]}"; do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_NTASKS=${#hosts[@]} SLURM_STEP_ID=0 on "${hosts[task]}" "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""

SCONTROL = """
[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<< "$3"
"""

SSH = """
on "$1" bash -c "$2"
"""
"""Its environment is this machine's, where the real one has the remote host's."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(5) as hosts:
        yield hosts


def script_in(document: str, section: str) -> str:
    found = re.search(rf"^## {section}\n.*?```bash\n(.*?)```", document, re.DOTALL | re.MULTILINE)
    assert found is not None, section
    return found[1]


def run(script: str, hosts: VirtualHosts, folder: Path, **environ: str) -> str:
    """What it prints."""
    on = shlex.join(hosts.on(0, [])).removesuffix("0")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("ssh", SSH)):
        command = folder / name
        command.write_text(f'#!/bin/bash\non() {{ local host=$1; shift; {on}"${{host#host}}" "$@"; }}\n{text}')
        command.chmod(0o755)
    write_token(folder)
    training = TRAINING.replace("cluster.from_flags()", "psstore.connect(connect_timeout_s=120)")
    write_script(folder, training.replace("from psstore import cluster", "import psstore"))
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **environ, "PATH": path}, capture_output=True, text=True,
        timeout=END_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_batch_script_trains_as_one_process_does(hosts: VirtualHosts, tmp_path: Path, repository: Path) -> None:
    script = script_in((repository / "docs" / "clusters.md").read_text(), "Slurm")
    # a batch script is a task itself, of no step
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    output = run(script, hosts, tmp_path, SLURM_JOB_NODELIST="host0,host1,host2,host3", **batch)
    assert output.count("of 2:") == 2
    assert digests(output) == {digest_of_one_process()}


def test_hosts_that_ssh_reaches_train_as_one_process_does(
    hosts: VirtualHosts, tmp_path: Path, repository: Path
) -> None:
    script = script_in((repository / "docs" / "clusters.md").read_text(), "Plain ssh")
    output = run(re.sub(r"\bh(?=[$\d])", "host", script), hosts, tmp_path)
    assert output.count("of 2:") == 2
    assert digests(output) == {digest_of_one_process()}
