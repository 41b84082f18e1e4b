"""A program of ours run in a process that was forked from one which has imported it: importing is nine tenths of what a
store takes that a test starts, asks something and ends.

`subprocess.Popen` is the standard library's here but for how a process begins; it is a child, which is waited for and
signalled as any. What its program finds is what it would find if it had been started: its files and no others, its
arguments, which others see as its command line, signals as `exec` leaves them, a log that nobody has configured. Only
seeds differ: texts hash as they do in the process that it was forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "psstore.cli.server",
    "psstore.server.shard",
    "psstore.launch.checkpointing",
    "psstore.launch.metrics_server",
    "psstore.launch.resharding",
)
"""What is run so. Anything else is started."""

OF_A_RUN = ("PSSTORE_", "PYTEST_CURRENT_TEST")
"""Variables that are looked at as a program runs. Where others differ from those of what would be forked, a process
is started: an interpreter and libraries read theirs as they begin."""

ROOM_BYTES = 8192
"""For a command line: a process can't make more for its own than it was started with."""

ROOM = "." * ROOM_BYTES

ABOVE = 512
"""Where descriptors are put aside, beyond any that has to be at a place of its own."""

BROKE = 70
"""Exit status of a process that did not become the program."""

Popen = subprocess.Popen
"""As it was before any of these was put in its place."""


@dataclass(frozen=True)
class Program:
    """A module of MODULES with its arguments, as a command line names it."""

    command: tuple[str, ...]
    module: str
    arguments: tuple[str, ...]


def program_of(command: object, env: Mapping[str, str] | None) -> Program | None:
    """What a forked process can become in place of what is to be started; None: it has to be started."""
    if not isinstance(command, (list, tuple)) or not all(isinstance(word, str) for word in command):
        return None
    python, *words = command
    if words[:1] == ["-P"]:  # no place of ours to find modules at is added anyhow
        words = words[1:]
    if python != sys.executable or words[:1] != ["-m"] or words[1] not in MODULES:
        return None
    if env is not None and lasting(env) != lasting(os.environ):
        return None
    if sum(len(os.fsencode(word)) + 1 for word in command) > ROOM_BYTES:
        return None
    return Program(tuple(command), words[1], tuple(words[2:]))


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that may have been looked at already."""
    return {name: value for name, value in environ.items() if not name.startswith(OF_A_RUN)}


def num_threads() -> int:
    """Of this process, those that no Python knows of included."""
    return len(os.listdir("/proc/self/task"))


class ForkingPopen(subprocess.Popen[Any]):
    """Forks this process where it can become what is to be run, and starts a process elsewhere."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        start = Start.of(args, rest)
        if start is None or num_threads() > 1:
            return super()._execute_child(args, *rest)  # type: ignore[misc,no-any-return]
        files = {place: file for place, file in enumerate(start.files) if file != -1}
        sys.stdout.flush()
        with _no_signals():
            self.pid = os.fork()
            if not self.pid:
                become(start, {**{place: place for place in (0, 1, 2)}, **files, **{file: file for file in start.kept}})
        self._child_created = True
        self._close_pipe_fds(*start.pipes)  # type: ignore[attr-defined]
        return None


@dataclass(frozen=True)
class Start:
    """What `Popen` is told of a process, as far as ours are told anything."""

    program: Program
    cwd: str | None
    env: dict[str, str] | None
    kept: tuple[int, ...]
    """Descriptors that it has as this process has them."""
    pipes: tuple[int, ...]
    """Both ends of stdin's, stdout's and stderr's; -1: none."""
    is_session: bool

    @classmethod
    def of(cls, args: object, rest: Sequence[Any]) -> Start | None:
        """None: a process is started as it was to be."""
        executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *others = rest
        pipes, (restore_signals, gid, gids, uid, umask, is_session, *group) = others[:6], others[6:]
        told = (executable, preexec_fn, gid, gids, uid, *(number for number in group if number != -1))
        if any(one is not None for one in told) or shell or not close_fds or not restore_signals or umask != -1:
            return None
        program = program_of(args, env)
        if program is None:
            return None
        whole = None if env is None else dict(env)
        where = None if cwd is None else os.fspath(cwd)
        return cls(program, where, whole, tuple(sorted(pass_fds)), tuple(pipes), bool(is_session))

    @property
    def files(self) -> tuple[int, int, int]:
        """Its ends of those pipes; -1: this process' file."""
        return self.pipes[0], self.pipes[3], self.pipes[5]


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """What comes meanwhile comes afterwards: a child would otherwise do with it what its parent does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_kept: list[object] = []
"""Objects of the process before, which are not to be taken apart: they would write, and close what is others' now."""


def become(start: Start, files: Mapping[int, int]) -> NoReturn:
    """Runs the program in this process, which was just forked, and ends with it. `files`: which of this process'
    descriptors is to be at which place; all others are closed."""
    try:
        _settle(start, files)
    except BaseException:
        traceback.print_exc()
        os._exit(BROKE)
    _run(start.program)


def _settle(start: Start, files: Mapping[int, int]) -> None:
    gc.freeze()
    if start.is_session:
        os.setsid()
    _reset_signals()
    _place(files)
    if start.env is not None:
        os.environ.clear()
        os.environ.update(start.env)
    if start.cwd is not None:
        os.chdir(start.cwd)
    _open_streams()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        _kept.append(sys.modules.pop(module))
    _sow()
    _show(start.program.command)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def _reset_signals() -> None:
    """As `exec` and an interpreter that begins leave them: what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _place(files: Mapping[int, int]) -> None:
    aside = {place: fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for place, file in files.items()}
    for place, file in aside.items():
        os.dup2(file, place)
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        if number not in files:
            with contextlib.suppress(OSError):  # the one that the list was read through
                os.close(number)


def _open_streams() -> None:
    for name, file, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        before = getattr(sys, name)
        _kept.append(before)
        stream = io.TextIOWrapper(
            open(file, mode, buffering=0 if before.write_through else -1, closefd=False),  # noqa: SIM115 (of the process, as long as it lives)
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=name == "stderr" or (name == "stdout" and os.isatty(file)),
            write_through=before.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _sow() -> None:
    """Gives the package's random numbers a seed of this process; `random`'s own have one, after any fork."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "psstore":
            for value in vars(module).values():
                if isinstance(value, random.Random):
                    value.seed()


def _show(command: Sequence[str]) -> None:
    """Has others read this as the command line: in the place of what the process was started with (proc(5): arg_start,
    arg_end of /proc/PID/stat)."""
    sys.orig_argv = list(command)
    first, last = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, text, min(len(text), last - first))
    shown = Path("/proc/self/cmdline").read_bytes()
    assert shown.rstrip(b"\0") == text.rstrip(b"\0"), f"is shown as {shown!r}, and is {text!r}"


def _run(program: Program) -> NoReturn:
    """As the interpreter does: with what its end does, too."""
    code: object = 0
    sys.argv = [program.module, *program.arguments]
    try:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
