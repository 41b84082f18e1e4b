"""Processes of a store that were forked are as those that were started: in all that the system says of them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import ServedPopen
from tests.support.forked_program import program_of
from tests.support.server_process import StoreProcess, failed_start

FLAGS = ("--shards", "2")

OF_NO_RUN = {"LC_TIME": "C"}
"""A variable of the interpreter's has a process started, since one that is forked has read its own."""

SIGNALS = ("SigBlk", "SigIgn", "SigCgt")


@pytest.fixture(scope="module")
def forked() -> Iterator[StoreProcess]:
    with StoreProcess(*FLAGS) as store:
        yield store


@pytest.fixture(scope="module")
def started() -> Iterator[StoreProcess]:
    with StoreProcess(*FLAGS, environ=OF_NO_RUN) as store:
        yield store


def processes(store: StoreProcess) -> list[int]:
    return [store.process.pid, *store.shard_pids()]


def files(pid: int) -> tuple[list[str], list[str]]:
    """What its first three are, and its others, without the numbers that no two files have in common."""
    links = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda link: int(link.name))
    kinds = [re.sub(r"\d+", "", os.readlink(link)) for link in links]
    return kinds[:3], sorted(kinds[3:])


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def words(pid: int) -> list[str]:
    """Its command line, without the number of the descriptor that readiness is told through."""
    found = psutil.Process(pid).cmdline()
    while found and not found[-1]:
        found.pop()
    return ["N" if before == "--ready-fd" else word for before, word in zip(["", *found], found, strict=False)]


def test_one_store_was_forked_and_the_other_started(forked: StoreProcess, started: StoreProcess) -> None:
    """What the others compare would be the same in any case, if both were."""
    (server,) = {psutil.Process(forked.process.pid).ppid()} - {os.getpid()}
    assert "tests.support.fork_server" in psutil.Process(server).cmdline()
    assert psutil.Process(started.process.pid).ppid() == os.getpid()


def test_a_forked_process_has_the_files_that_it_was_given(forked: StoreProcess, started: StoreProcess) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        assert files(ours) == files(theirs)


def test_a_forked_process_heeds_the_same_signals(forked: StoreProcess, started: StoreProcess) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        found, expected = status(ours), status(theirs)
        assert {name: found[name] for name in SIGNALS} == {name: expected[name] for name in SIGNALS}


def test_a_forked_process_is_shown_by_its_command_line(forked: StoreProcess, started: StoreProcess) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        assert words(ours) == words(theirs)


def test_a_forked_process_has_as_many_threads_and_its_place_among_sessions(
    forked: StoreProcess, started: StoreProcess
) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        assert status(ours)["Threads"] == status(theirs)["Threads"]
        assert os.readlink(f"/proc/{ours}/cwd") == os.readlink(f"/proc/{theirs}/cwd")
        assert (os.getsid(ours) == ours) == (os.getsid(theirs) == theirs)


def test_a_forked_process_ends_with_its_status_and_says_why() -> None:
    assert failed_start("--shards", "0") == failed_start("--shards", "0", environ=OF_NO_RUN)


def test_a_signal_that_ends_a_forked_process_is_told(forked: StoreProcess) -> None:
    with StoreProcess() as store:
        (shard,) = store.shards()
        store.process.kill()
        assert store.wait() == -signal.SIGKILL
        shard.wait()


def test_what_is_none_of_ours_is_started() -> None:
    with ServedPopen([sys.executable, "-c", "import os; print(os.getppid())"], stdout=-1, text=True) as process:
        assert process.communicate()[0].strip() == str(os.getpid())
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        (["python", "-m", "psstore.cli.server"], {}),
        ([sys.executable, "-W", "error", "-m", "psstore.cli.server"], {}),
        ([sys.executable, "-m", "http.server"], {}),
        ([sys.executable, "-m", "psstore.cli.server", "--uds", "x" * 9000], {}),
        ([sys.executable, "-m", "psstore.cli.server"], {"PYTHONHASHSEED": "1"}),
    ],
    ids=["another interpreter", "its flags", "another module", "a command line that is too long", "a variable"],
)
def test_no_fork_becomes(command: list[str], environ: dict[str, str]) -> None:
    assert program_of(command, {**os.environ, **environ}) is None
