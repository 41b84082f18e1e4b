"""Processes of a store that were forked are as those that were started: in all that the system says of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fork_server import ServedPopen
from tests.support.forked_program import ABOVE, program_of
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


def test_a_forked_process_is_shown_with_its_variables(forked: StoreProcess, started: StoreProcess) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        assert psutil.Process(ours).environ() | OF_NO_RUN == psutil.Process(theirs).environ()


def test_a_forked_process_has_as_many_threads_and_its_place_among_sessions(
    forked: StoreProcess, started: StoreProcess
) -> None:
    for ours, theirs in zip(processes(forked), processes(started), strict=True):
        assert status(ours)["Threads"] == status(theirs)["Threads"]
        assert os.readlink(f"/proc/{ours}/cwd") == os.readlink(f"/proc/{theirs}/cwd")
        assert (os.getsid(ours) == ours) == (os.getsid(theirs) == theirs)


SAYS_THE_NUMBERS = """
import os, sys
for number in sys.argv[1:]:
    os.write(int(number), number.encode())
"""


def test_a_forked_process_has_files_where_others_are_put_aside_meanwhile(tmp_path: Path) -> None:
    script = tmp_path / "numbers.py"
    script.write_text(SAYS_THE_NUMBERS)
    with contextlib.ExitStack() as opened:
        read = {}
        for _ in range(6):
            ours, theirs = os.pipe()
            read[fcntl.fcntl(theirs, fcntl.F_DUPFD, ABOVE)] = opened.enter_context(os.fdopen(ours, "rb"))
            os.close(theirs)
        process = ServedPopen([sys.executable, str(script), *map(str, read)], pass_fds=list(read))
        for number in read:
            os.close(number)
        assert process.wait(60.0) == 0
        assert {number: int(file.read()) for number, file in read.items()} == {number: number for number in read}


def test_a_forked_process_ends_with_its_status_and_says_why() -> None:
    assert failed_start("--shards", "0") == failed_start("--shards", "0", environ=OF_NO_RUN)


def test_a_signal_that_ends_a_forked_process_is_told() -> None:
    with StoreProcess() as store:
        store.process.kill()
        assert store.wait() == -signal.SIGKILL


FACTS = """
import atexit, json, os, random, signal, sys
import numpy
atexit.register(print, "at its end")
facts = {
    "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
    "arguments": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "environ": dict(os.environ),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "read": sys.stdin.read(),
    "streams": [[one.encoding, one.errors, one.line_buffering] for one in (sys.stdin, sys.stdout, sys.stderr)],
    "tests": [name for name in sys.modules if name.partition(".")[0] == "tests"],
    "at": os.getcwd(),
}
print(json.dumps([facts, os.getppid(), [random.random(), numpy.random.random()]]))
sys.exit("ended")
"""


STOPPED = """
import os, signal, subprocess, sys
from tests.support import forked_program

forked_program._show = lambda start: os.kill(os.getpid(), signal.SIGSTOP)
child = forked_program.ForkingPopen([sys.executable, "-m", "this"])
child.kill()
sys.exit(child.wait() != -signal.SIGKILL)
"""


def test_who_forks_does_not_wait_for_a_child_that_stands_still_as_soon_as_it_is_seen(repository: Path) -> None:
    assert subprocess.run([sys.executable, "-c", STOPPED], cwd=repository, timeout=30.0).returncode == 0


def test_a_script_that_was_forked_finds_what_one_that_was_started_does(tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    command = [sys.executable, "-u", "facts.py", "an argument"]

    def found(popen: type[subprocess.Popen[str]]) -> list[Any]:
        environ = dict(os.environ)  # without what readline has put beside, which pytest imports
        with popen(command, cwd=tmp_path, env=environ, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
            stdout, stderr = process.communicate("a line", timeout=60.0)
        lines = stdout.splitlines()
        return [*json.loads(lines[0]), lines[1:], stderr, process.returncode]

    started, forked, again = found(subprocess.Popen), found(ServedPopen), found(ServedPopen)
    assert started[0] == forked[0]
    assert started[3:] == forked[3:] == [["at its end"], "ended\n", 1]
    assert os.getpid() == started[1] != forked[1] == again[1]
    assert all(one != other for one, other in zip(forked[2], again[2], strict=True)), "each draws numbers of its own"


def test_what_is_none_of_ours_is_started() -> None:
    with ServedPopen([sys.executable, "-c", "import os; print(os.getppid())"], stdout=-1, text=True) as process:
        assert process.communicate()[0].strip() == str(os.getpid())
    assert process.returncode == 0


def test_what_has_other_variables_of_the_interpreter_is_started() -> None:
    program = "import os, sys; print(os.getppid(), sys.flags.hash_randomization)"
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    with ServedPopen([sys.executable, "-c", program], env=environ, stdout=-1, text=True) as process:
        assert process.communicate()[0].split() == [str(os.getpid()), "0"]


def test_nothing_is_forked_where_imports_start_threads(tmp_path: Path) -> None:
    """As in a program of these folders that somebody starts, who sets no variable for that."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.getppid())")
    program = (
        "import os, sys; from tests.support.fork_server import run; "
        "ran = run(sys.argv[1:], timeout_s=30.0); sys.exit(ran.stdout != f'{os.getpid()}\\n')"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", program, sys.executable, str(script)], env=environ, check=True)


def test_who_forks_first_may_be_anywhere(repository: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.getcwd())")
    program = (
        "import os, sys; from tests.support.fork_server import ServedPopen, run; os.chdir(sys.argv[1]); "
        "print(run(sys.argv[2:], timeout_s=30.0, popen=ServedPopen).stdout, end='')"
    )
    command = [sys.executable, "-c", program, str(tmp_path), sys.executable, str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, cwd=repository, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said == f"{tmp_path}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "psstore.cli.server"],
        [sys.executable, "-W", "error", "-m", "psstore.cli.server"],
        [sys.executable, "-m", "psstore.cli.server", "--uds", "x" * 17000],
        [sys.executable, "-c", "print()"],
        [sys.executable, "-m"],
        [sys.executable],
    ],
    ids=["another interpreter", "its flags", "too long a command line", "a program's text", "no module", "nothing"],
)
def test_no_fork_becomes(command: list[str]) -> None:
    assert program_of(command) is None
