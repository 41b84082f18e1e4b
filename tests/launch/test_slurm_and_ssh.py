"""The scripts of docs/slurm.md and docs/ssh.md, as they are written, on virtual hosts. What stands in for `srun`,
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
import torch
from bench.virtual_hosts import VirtualHosts, why_not

from tests.docs.test_snippets import side_of
from tests.launch.cluster_tasks import END_S, TRAINING, digests, write_script, write_token
from tests.launch.test_cluster_hosts import digest_of_one_process

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SRUN = """
IFS=, read -ra hosts <<< "$SLURM_JOB_NODELIST"
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


def on_hosts(text: str) -> str:
    """With the names of virtual hosts."""
    return re.sub(r"\bh(?=[$\d])", "host", text)


def script_of(page: str, sign: str) -> str:
    """A side of the page's script: "-", DDP's, or "+", the store's."""
    return on_hosts(side_of(f"docs/{page}", sign))


def training_of_numbers(folder: Path) -> None:
    training = TRAINING.replace("cluster.from_flags()", "psstore.connect(connect_timeout_s=120)")
    write_script(folder, training.replace("from psstore import cluster", "import psstore"))


def training_of_the_docs(folder: Path, sign: str) -> None:
    """A side of the script that both pages speak of."""
    training = side_of("docs/coming_from_ddp.md", sign)
    write_script(folder, training.replace("psstore.connect()", "psstore.connect(connect_timeout_s=120)"))


def run(script: str, hosts: VirtualHosts, folder: Path, **environ: str) -> str:
    """What it prints."""
    on = shlex.join(hosts.on(0, [])).removesuffix("0")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("ssh", SSH)):
        command = folder / name
        command.write_text(f'#!/bin/bash\non() {{ local host=$1; shift; {on}"${{host#host}}" "$@"; }}\n{text}')
        command.chmod(0o755)
    write_token(folder)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **environ, "PATH": path}, capture_output=True, text=True,
        timeout=END_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def batch(num_hosts: int) -> dict[str, str]:
    """What Slurm sets in a batch script, which is a task itself, of no step."""
    nodes = ",".join(f"host{number}" for number in range(num_hosts))
    return {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": str(num_hosts)}


def test_the_batch_script_trains_as_one_process_does(hosts: VirtualHosts, tmp_path: Path) -> None:
    training_of_numbers(tmp_path)
    output = run(script_of("slurm.md", "+"), hosts, tmp_path, **batch(4))
    assert output.count("of 2:") == 2
    assert digests(output) == {digest_of_one_process()}


def test_hosts_that_ssh_reaches_train_as_one_process_does(hosts: VirtualHosts, tmp_path: Path) -> None:
    training_of_numbers(tmp_path)
    output = run(script_of("ssh.md", "+"), hosts, tmp_path)
    assert output.count("of 2:") == 2
    assert digests(output) == {digest_of_one_process()}


@pytest.mark.long
@pytest.mark.timeout(3 * END_S)
@pytest.mark.parametrize("page", ["slurm.md", "ssh.md"])
def test_both_sides_of_a_page_train_to_the_same_weights(
    page: str, hosts: VirtualHosts, tmp_path: Path, repository: Path
) -> None:
    weights = []
    for sign, num_hosts in (("-", 2), ("+", 4)):
        folder = tmp_path / ("store" if sign == "+" else "ddp")
        folder.mkdir()
        training_of_the_docs(folder, sign)
        output = run(script_of(page, sign), hosts, folder, GLOO_SOCKET_IFNAME="eth0", **batch(num_hosts))
        weights.append(torch.load(folder / "model.pt"))
    for line in re.findall(r"^(psstore-server ready.*)$", (repository / "docs" / page).read_text(), re.M):
        assert on_hosts(line) in output
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0.0, atol=1e-6)
