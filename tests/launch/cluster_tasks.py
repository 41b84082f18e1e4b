"""The tasks of a cluster as processes under test, all on this machine or each on a virtual host of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tests.support.fork_server import TrainingPopen, run
from tests.support.free_ports import free_ports
from tests.support.server_process import eventually

END_S = 120.0
"""How long a task that is to end may take on a machine that does much else."""

TOKEN = "correct horse battery staple"

TRAINING = """
    import hashlib
    import numpy as np
    from psstore import cluster

    SHAPES = {"a": (300, 1000), "b": (70, 70), "c": (600, 1000)}
    with cluster.from_flags() as store:
        random = np.random.default_rng(store.rank)
        for name, shape in SHAPES.items():
            store.create(name, np.ones(shape, "f4"), rule="sgd")
            store.pull(name)
        for _ in range(5):
            for name, shape in SHAPES.items():
                store.push(name, random.standard_normal(shape, "f4"))
            store.commit({"lr": 0.1, "momentum": 0.9})
            values = [store.pull(name).tobytes() for name in sorted(SHAPES)]
        print(f"rank {store.rank} of {store.num_workers}:", hashlib.sha256(b"".join(values)).hexdigest())
"""
"""Prints a digest of all values, which are the same for the same gradients summed in the same order."""

ENDLESS = """
    import numpy as np
    from psstore import cluster

    with cluster.from_flags(timeout_s=5.0, wait_s=10.0) as store:
        store.create("w", np.ones((2, 300_000), "f4"), rule="sgd")
        store.pull("w")
        while True:
            store.push("w", np.ones((2, 300_000), "f4"))
            store.commit({"lr": 0.1})
            store.pull("w")
            if store.round == 3:
                print("under way", flush=True)
"""


def write_script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def write_token(directory: Path, token: str = TOKEN) -> Path:
    path = directory / "token"
    path.write_text(token)
    path.chmod(0o600)
    return path


def loopback_hosts(count: int) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in free_ports(count))


class Task:
    """One process. `with` ends it; its output can be read at any time."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as this object; `__exit__` closes it)
        base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TF_CONFIG")}
        self.process = TrainingPopen(
            list(command), stdout=self._output, stderr=subprocess.STDOUT, env={**base, **(environ or {})}
        )

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()

    def output(self) -> str:
        file = self._output.fileno()  # read in place: the process writes at the position that a seek would move
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def wait(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {END_S:g} s:\n{self.output()}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


C = TypeVar("C", bound="Cluster")


class Cluster:
    """Starts tasks of one cluster; `with` ends all that still run."""

    def __init__(self, *, ps_hosts: str, worker_hosts: str, environ: Mapping[str, str]) -> None:
        self.flags = [f"--ps_hosts={ps_hosts}", f"--worker_hosts={worker_hosts}"]
        self.environ = dict(environ)
        self._tasks = contextlib.ExitStack()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.close()

    def start(self, command: Sequence[str], **environ: str) -> Task:
        return self._tasks.enter_context(Task(command, {**self.environ, **environ}))

    def script(self, job_name: str, index: int, script: Path, *flags: str, **environ: str) -> Task:
        """The script itself, told by its flags."""
        role = [f"--job_name={job_name}", f"--task_index={index}"]
        return self.start([sys.executable, str(script), *self.flags, *role, *flags], **environ)

    def run(self, job_name: str, index: int, script: Path, *flags: str, **environ: str) -> Task:
        """`psstore run` with these flags."""
        role = [f"--job_name={job_name}", f"--task_index={index}"]
        command = [sys.executable, "-m", "psstore.cli.main", "run", *self.flags, *role, *flags, str(script)]
        return self.start(command, **environ)


def wait_for(task: Task, pattern: str) -> None:
    """Until the task has printed it. Its output is a file, for which there is no event to wait on."""

    def is_there() -> bool:
        return re.search(pattern, task.output()) is not None

    assert eventually(lambda: is_there() or task.process.poll() is not None, END_S), task.output()
    assert is_there(), task.output()


def digests(output: str) -> set[str]:
    """What the workers of TRAINING printed."""
    return set(re.findall(r"[0-9a-f]{64}", output))


def digest_of_psstore_run(script: Path, *, shards: int, workers: int) -> str:
    command = [sys.executable, "-m", "psstore.cli.main", "run", "--shards", str(shards), "--workers", str(workers)]
    done = run([*command, str(script)], timeout_s=END_S)
    assert done.returncode == 0, done.stderr
    (digest,) = digests(done.stdout)
    return digest
