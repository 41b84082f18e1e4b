"""`psstore run` with real processes: what workers get, how a run ends, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from psstore.launch import job
from psstore.launch.group import Child, ProcessGroup
from psstore.launch.job import Job, run_job
from psstore.launch.output import WRITTEN_BYTES, Line
from psstore.types import Consistency
from tests.support import fork_server
from tests.support.fork_server import TrainingPopen
from tests.support.server_process import eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

RUN_S = 60.0
"""How long a run may take on a machine that does much else."""

SLEEPER = """
    import os, subprocess, sys, time
    import psstore
    store = psstore.connect()
    store.barrier()
    subprocess.Popen(["sleep", "600"])
    print("asleep", flush=True)
    time.sleep(600)
"""
"""A worker with a child of its own, as data loaders have."""


def script(directory: Path, text: str, name: str = "work.py") -> str:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def holds(pipe: IO[bytes], num_bytes: int) -> bool:
    """Whether so much waits to be read."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count) >= num_bytes


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "psstore.cli.main", "run", *arguments]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return fork_server.run(command(*arguments), timeout_s=RUN_S, cwd=cwd)


@pytest.fixture
def asleep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose two workers sleep."""
    with TrainingPopen(
        command("--shards", "2", script(tmp_path, SLEEPER)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        ready = 0
        while ready < 2:
            line = launcher.stdout.readline()
            assert line, "the run ended before its workers slept"
            ready += line.endswith("asleep\n")
        yield launcher
        launcher.kill()


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """2 workers, their 2 children, 2 shards, their supervisor and the reaper."""
    assert len(processes) >= 8, processes
    _, alive = psutil.wait_procs(processes, timeout=RUN_S / 4)
    assert not alive


# ---- what workers get ----


def test_workers_find_their_store_rank_and_arguments(tmp_path: Path) -> None:
    work = script(
        tmp_path,
        """
        import os, sys
        import psstore
        with psstore.connect() as store:
            assert (store.rank, store.num_workers) == (int(os.environ["RANK"]), 3)
            store.barrier()
            print(store.rank, os.environ["LOCAL_RANK"], store.num_shards, *sys.argv[1:])
        """,
    )
    result = run("--shards", "2", "--workers", "3", work, "--lr", "0.1", "--workers", "9")
    assert result.returncode == 0, result.stderr
    expected = [f"[rank {rank}] {rank} {rank} 2 --lr 0.1 --workers 9" for rank in range(3)]
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("[rank")) == expected


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(__name__, *sys.argv[1:])", name="trainer.py")
    result = run("--workers", "1", "-m", "trainer", "-x", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "[rank 0] __main__ -x" in result.stdout.splitlines()


@pytest.mark.parametrize("mode", ["sync", "backup", "ssp", "async"])
def test_modes_reach_the_store(tmp_path: Path, mode: str) -> None:
    """The store says so in its ready line."""
    result = run("--mode", mode, "--workers", "3", script(tmp_path, ""))
    assert result.returncode == 0, result.stderr
    ready = next(line for line in result.stdout.splitlines() if line.startswith("[store]"))
    assert ready.endswith(f"; {mode}, 3 workers)")


# ---- how it ends ----


def test_a_failing_worker_ends_all_and_is_named(tmp_path: Path) -> None:
    work = script(
        tmp_path,
        """
        import os, sys, time
        import psstore
        store = psstore.connect()
        store.barrier()
        if store.rank == 1:
            sys.exit(7)
        time.sleep(600)
        """,
    )
    result = run(work)
    assert result.returncode == 7
    assert result.stderr.splitlines()[-1] == "psstore: rank 1 ended with exit code 7; everything was stopped"


def test_a_traceback_is_shown_before_the_verdict(tmp_path: Path) -> None:
    result = run("--workers", "1", script(tmp_path, "raise RuntimeError('out of luck')"))
    *above, verdict = result.stderr.splitlines()
    assert above[-1] == "[rank 0] RuntimeError: out of luck"
    assert verdict == "psstore: rank 0 ended with exit code 1; everything was stopped"


def test_a_killed_worker_is_named_with_its_signal(asleep: subprocess.Popen[str]) -> None:
    everyone = psutil.Process(asleep.pid).children(recursive=True)
    victim = next(p for p in everyone if p.environ().get("RANK") == "1" and "work.py" in " ".join(p.cmdline()))
    victim.kill()
    _, stderr = asleep.communicate(timeout=RUN_S)
    assert stderr.splitlines()[-1] == "psstore: rank 1 was killed by SIGKILL; everything was stopped"
    assert asleep.returncode == 128 + signal.SIGKILL
    assert_all_gone(everyone)


KILLED = """
    import os, pathlib, signal, sys
    import numpy, psstore
    with psstore.connect() as store:
        store.create("w", shape=(2,), rule="sgd")
        while (step := store.version) < 6:
            if store.rank == 1 and step == 3 and not (mark := pathlib.Path(sys.argv[1])).exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            restarts = int(os.environ.get("PSSTORE_RESTART", "0"))
            assert restarts == (store.rank == 1 and step >= 3)
            store.push("w", numpy.full(2, store.rank + step, numpy.float32))
            store.commit({"lr": 1.0})
        print("ends with", *store.pull("w"), flush=True)
"""
"""Rank 1 is killed once, in the fourth round."""


def test_a_killed_worker_is_started_again_and_the_others_wait(tmp_path: Path) -> None:
    work = script(tmp_path, KILLED)
    result = run("--restarts", "1", work, str(tmp_path / "killed"))
    assert result.returncode == 0, result.stderr
    assert "[run] rank 1 was killed by SIGKILL; it is started again (1 of 1)" in result.stderr.splitlines()
    ends = [line.partition("] ")[2] for line in result.stdout.splitlines() if "ends" in line]
    assert ends == ["ends with -18.0 -18.0"] * 2, "as if nobody had died"


def test_where_workers_come_and_go_the_others_go_on_while_they_are_enough(tmp_path: Path) -> None:
    work = script(
        tmp_path,
        """
        import os, signal, time
        import numpy as np
        import psstore
        with psstore.connect() as store:
            store.create("w", np.zeros(4, np.float32), rule="sgd")
            has_met, left = len(store.members) > 1, 12
            while left:
                store.push("w", np.ones(4, np.float32))
                store.commit({"lr": 1.0})
                has_met |= len(store.members) > 1
                if has_met and store.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= has_met
                time.sleep(0.02)
            print(store.members, store.version + store.pull("w"), flush=True)
        """,
    )
    done = run("--shards", "2", "--workers", "1:2", work)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 was killed by SIGKILL; the others go on without it" in done.stderr + done.stdout
    assert "[rank 0] (0,) [0. 0. 0. 0.]" in done.stdout, "each version is a mean over who was there"
    both = run("--shards", "2", "--workers", "2:2", work)
    assert both.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; everything was stopped" in both.stderr


def test_who_fails_once_more_than_it_may_ends_all(tmp_path: Path) -> None:
    work = script(tmp_path, "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)")
    result = run("--restarts", "2", work)
    assert result.returncode == 7
    assert [line for line in result.stderr.splitlines() if "rank 1" in line] == [
        "[run] rank 1 ended with exit code 7; it is started again (1 of 2)",
        "[run] rank 1 ended with exit code 7; it is started again (2 of 2)",
        "psstore: rank 1 ended with exit code 7; everything was stopped",
    ]


def test_a_worker_is_started_again_once_the_machine_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a machine has as many processes as it may have for a while."""
    lines: list[str] = []
    refused = 0

    async def deliver(line: Line) -> None:
        lines.append(line.text.decode())

    def spawn(self: ProcessGroup, *arguments: Any, environ: Mapping[str, str], **options: Any) -> Child:
        nonlocal refused
        if environ.get("PSSTORE_RESTART") == "1" and refused < 2:
            refused += 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn_one(self, *arguments, environ=environ, **options)

    spawn_one = ProcessGroup.spawn
    monkeypatch.setattr(ProcessGroup, "spawn", spawn)
    monkeypatch.setattr(job, "LOOK_AGAIN_S", 0.01)
    failing_once = [sys.executable, "-c", "import os, sys; sys.exit(3 * ('PSSTORE_RESTART' not in os.environ))"]
    one = Job(
        command=failing_once, num_shards=0, consistency=Consistency(num_workers=1), environ=os.environ, restarts=1
    )
    assert asyncio.run(run_job(one, deliver=deliver)).exit_code == 0
    assert lines == [
        "rank 0 ended with exit code 3; it is started again (1 of 1)",
        "rank 0 can't be started yet, which is tried again: Resource temporarily unavailable",
    ]
    refused = -1000
    monkeypatch.setattr(job, "START_AGAIN_S", 0.05)
    outcome = asyncio.run(run_job(one, deliver=deliver))
    assert outcome.exit_code != 0
    assert outcome.reason is not None
    assert "Resource temporarily unavailable" in outcome.reason


def test_a_task_of_a_cluster_is_started_again_by_others(tmp_path: Path) -> None:
    cluster = ("--ps_hosts=localhost:1", "--worker_hosts=localhost", "--job_name=worker", "--task_index=0")
    result = run("--restarts", "1", *cluster, script(tmp_path, ""))
    assert result.returncode == 2
    assert "PSSTORE_REJOIN_S=60" in result.stderr


def test_a_store_that_dies_ends_the_run(asleep: subprocess.Popen[str]) -> None:
    everyone = psutil.Process(asleep.pid).children(recursive=True)
    supervisor = next(p for p in everyone if "psstore.cli.server" in p.cmdline())
    supervisor.kill()
    _, stderr = asleep.communicate(timeout=RUN_S)
    assert stderr.splitlines()[-1] == "psstore: the store was killed by SIGKILL; everything was stopped"
    assert_all_gone(everyone)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(asleep: subprocess.Popen[str], signum: signal.Signals) -> None:
    everyone = psutil.Process(asleep.pid).children(recursive=True)
    asleep.send_signal(signum)
    _, stderr = asleep.communicate(timeout=RUN_S)
    assert asleep.returncode == 128 + signum
    assert stderr.splitlines()[-1] == f"psstore: interrupted by {signum.name}; everything was stopped"
    assert_all_gone(everyone)


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    work = script(tmp_path, "import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\nprint('goes on')")
    ended = subprocess.run(
        ["nohup", *command("--shards", "1", "--workers", "1", work)], capture_output=True, text=True, timeout=RUN_S
    )
    assert (ended.returncode, "goes on" in ended.stdout) == (0, True), ended.stderr


def test_nothing_outlives_a_launcher_that_is_killed(asleep: subprocess.Popen[str]) -> None:
    everyone = psutil.Process(asleep.pid).children(recursive=True)
    asleep.kill()
    assert_all_gone(everyone)


def test_output_that_cant_be_shown_ends_the_run_and_holds_nobody_up(tmp_path: Path) -> None:
    work = script(tmp_path, "for _ in range(100_000):\n    print('more than a pipe holds')", "talker.py")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command("--workers", "1", work), stdout=full, stderr=subprocess.PIPE, text=True, timeout=RUN_S
        )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == "psstore: can't show what the workers print: No space left on device; everything was stopped"


def test_a_signal_is_heard_while_nobody_reads_the_output(tmp_path: Path) -> None:
    work = script(tmp_path, "for _ in range(100_000):\n    print('more than a pipe holds')", "talker.py")
    errors = tmp_path / "errors"
    with errors.open("w") as err:
        talker = TrainingPopen(command("--workers", "1", work), stdout=subprocess.PIPE, stderr=err)
        assert talker.stdout is not None
        waiting = fcntl.fcntl(talker.stdout, fcntl.F_GETPIPE_SZ) - WRITTEN_BYTES
        assert eventually(partial(holds, talker.stdout, waiting))
        talker.send_signal(signal.SIGTERM)
        assert talker.wait(RUN_S) == 128 + signal.SIGTERM
    talker.stdout.close()
    assert errors.read_text().splitlines()[-1] == "psstore: interrupted by SIGTERM; everything was stopped"


def test_a_worker_that_takes_longer_to_end_than_it_may_is_killed(tmp_path: Path) -> None:
    work = script(
        tmp_path,
        """
        import os, signal, sys, time
        import psstore

        def end(*_):
            print("is asked to end", flush=True)
            time.sleep(60.0)
            print("ends by itself", flush=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        store = psstore.connect()
        store.barrier()
        if store.rank == 0:
            os._exit(5)
        while True:
            time.sleep(0.1)
        """,
    )
    ended = run("--grace-s", "2", work)
    assert ended.returncode == 5
    assert "is asked to end" in ended.stdout
    assert "ends by itself" not in ended.stdout


# ---- what it refuses ----


def test_a_script_that_is_not_there_is_said_before_anything_starts() -> None:
    result = run("nowhere.py")
    assert result.returncode == 2
    assert "there is no script 'nowhere.py'" in result.stderr


def test_a_store_that_cant_start_is_the_reason(tmp_path: Path) -> None:
    """Here because of a token file that is not there; the server's own sentence is shown too."""
    environ = {**os.environ, "PSSTORE_TOKEN_FILE": str(tmp_path / "nothing")}
    result = subprocess.run(command(script(tmp_path, "")), capture_output=True, text=True, timeout=RUN_S, env=environ)
    assert result.returncode == 3
    assert "[store] psstore-server: token file" in result.stderr
    assert "before it was ready" in result.stderr.splitlines()[-1]


TRAINER = """
    import hashlib, os, signal, sys, time
    import torch
    import psstore, psstore.torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    store = psstore.connect()
    optimizer = psstore.torch.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), store, named_parameters=model.named_parameters()
    )
    while store.version < 8:
        draw = torch.Generator().manual_seed(100 * store.version + store.rank)
        data = torch.randn(16, 20, generator=draw)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if store.version == int(sys.argv[1]):
            if store.rank == 0:
                with open("killed_at", "w") as file:
                    print(store.checkpoint(), file=file)
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""
"""Trains to version 8; at the version that it is given it has everything killed."""


def test_a_run_that_was_killed_goes_on_by_the_same_command_to_the_same_bytes(tmp_path: Path) -> None:
    trainer, place = script(tmp_path, TRAINER), ("--checkpoint", str(tmp_path / "run"))
    killed = run("--shards", "2", "--workers", "2", *place, trainer, "5", cwd=tmp_path)
    assert (tmp_path / "killed_at").read_text() == "5\n", killed.stdout + killed.stderr
    resumed = run("--shards", "3", "--workers", "2", *place, trainer, "-1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    never = run("--shards", "2", "--workers", "2", trainer, "-1")
    assert weights_of(resumed.stdout) == weights_of(never.stdout)


def weights_of(output: str) -> set[str]:
    found = {line.rpartition(" ")[2] for line in output.splitlines() if "] weights " in line}
    assert len(found) == 1, output
    return found
