"""A program run in a process that was forked from one which has imported what it imports: that is more than half of
what a store takes that a test starts, and most of what a worker takes that trains a few steps.

`subprocess.Popen` is the standard library's here but for how a process begins; it is a child, which is waited for and
signalled as any. What its program finds is what it would find if it had been started: its files and no others, its
arguments and variables, which others see, too, signals as `exec` leaves them, a log that nobody has configured, and
nothing to do at its end that is another process'. Two things differ: texts hash as they do in the process that was
forked, and modules have been imported, each of which may have looked at something as it was.
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
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

READ_AT_ONCE = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "UVLOOP_"),
    *("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "NPY_", "ATEN_", "TORCH_", "PYTORCH_"),
)
"""Variables that an interpreter and libraries read as they begin. Where these differ from those of what would be
forked, a process is started; the others a forked one finds as it would have."""

OF_LIGHTNING = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Which it leaves in the variables of whoever imports it."""

ROOM_BYTES = 16384
"""For a command line, and for variables, as others see them: a process has the room that it was started with."""

ROOM = "." * ROOM_BYTES

ABOVE = 512
"""Where descriptors are put aside, unless one has to be at a place beyond that."""

LOOK_MS = 100
"""How often who forks looks at a child that has not become the program."""

BROKE = 70
"""Exit status of a process that did not become the program."""

Popen = subprocess.Popen
"""As it was before any of these was put in its place."""


@dataclass(frozen=True)
class Program:
    """A module or a script with its arguments, as a command line of Python names it."""

    command: tuple[str, ...]
    module: str | None
    script: str | None
    arguments: tuple[str, ...]
    is_safe: bool
    """Whether modules are looked for in no folder of the program's (-P)."""
    is_unbuffered: bool


def program_of(command: object) -> Program | None:
    """What a forked process can become in place of what is to be started; None: it has to be started."""
    if not isinstance(command, (list, tuple)) or not all(isinstance(word, str) for word in command):
        return None
    python, *words = command
    flags = [word for word in words[:2] if word in ("-P", "-u")]
    if python != sys.executable or words[: len(flags)] != flags:
        return None
    if len(_text(command)) > ROOM_BYTES:
        return None
    is_safe = "-P" in flags or bool(getattr(sys.flags, "safe_path", False))
    rest = words[len(flags) :]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Program(tuple(command), rest[1], None, tuple(rest[2:]), is_safe, "-u" in flags)
    if rest and rest[0].endswith(".py"):
        return Program(tuple(command), None, rest[0], tuple(rest[1:]), is_safe, "-u" in flags)
    return None


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that may have been looked at already."""
    read = {name: value for name, value in environ.items() if name.startswith(READ_AT_ONCE)}
    read.pop(OF_LIGHTNING, None)
    return read


def num_threads() -> int:
    """Of this process, those that no Python knows of included."""
    return len(os.listdir("/proc/self/task"))


class ForkingPopen(subprocess.Popen[Any]):
    """Forks this process where it can become what is to be run, and starts a process elsewhere."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        start = Start.of(args, rest, lasting(os.environ))
        if start is None or num_threads() > 1:
            return super()._execute_child(args, *rest)  # type: ignore[misc,no-any-return]
        same = {place: place for place in (0, 1, 2, *start.kept)}
        self.pid = fork(start, same | {place: file for place, file in enumerate(start.files) if file != -1})
        self._child_created = True
        self._close_pipe_fds(*start.pipes)  # type: ignore[attr-defined]
        return None


@dataclass(frozen=True)
class Start:
    """What `Popen` is told of a process, as far as ours are told anything."""

    program: Program
    cwd: str
    env: dict[str, str]
    kept: tuple[int, ...]
    """Descriptors that it has as this process has them."""
    pipes: tuple[int, ...]
    """Both ends of stdin's, stdout's and stderr's; -1: none."""
    is_session: bool
    group: int
    """Of processes, which it joins; 0: one of its own, -1: that of this process."""

    @classmethod
    def of(cls, args: object, rest: Sequence[Any], environ: Mapping[str, str]) -> Start | None:
        """None: a process is started as it was to be. `environ`: the lasting variables of what would be forked."""
        executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *others = rest
        pipes, (restore_signals, gid, gids, uid, umask, is_session, *group) = others[:6], others[6:]
        told = (executable, preexec_fn, gid, gids, uid)
        if any(one is not None for one in told) or shell or not close_fds or not restore_signals or umask != -1:
            return None
        program, whole = program_of(args), dict(os.environ if env is None else env)
        if program is None or lasting(whole) != environ or len(_text(_pairs(whole))) > ROOM_BYTES:
            return None
        where = os.getcwd() if cwd is None else os.fspath(cwd)
        return cls(program, where, whole, tuple(sorted(pass_fds)), tuple(pipes), bool(is_session), *(group or (-1,)))

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


def fork(start: Start, files: Mapping[int, int]) -> int:
    """Returns once a child of this process is about to run the program. `files`: which of this process' descriptors it
    has at which place, and no others."""
    waits, told = os.pipe()
    with _no_signals():
        pid = os.fork()
        if not pid:
            _become(start, files, told)
    os.close(told)
    begins = select.poll()
    begins.register(waits)
    while not begins.poll(LOOK_MS) and not _is_stopped(pid):
        pass
    os.close(waits)
    return pid


def _is_stopped(pid: int) -> bool:
    """Whether that child stands still, as who has seen its command line may have it do at any moment: then it has
    become the program as far as anybody can see. The news stays, for who minds the child."""
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _become(start: Start, files: Mapping[int, int], told: int) -> NoReturn:
    try:
        _settle(start, files, told)
    except BaseException:
        traceback.print_exc()
        os._exit(BROKE)
    _run(start.program)


def _settle(start: Start, files: Mapping[int, int], told: int) -> None:
    gc.freeze()
    if start.is_session:
        os.setsid()
    if start.group != -1:
        os.setpgid(0, start.group)
    _reset_signals()
    told = _aside(told, files)
    _place({**files, told: told})
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # another process' folders, for one
    _open_streams(start.program.is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        _kept.append(sys.modules.pop(module))
    _sow()
    _show(start)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    os.close(told)


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


def _aside(file: int, places: Iterable[int]) -> int:
    """The same file, beyond all places."""
    return fcntl.fcntl(file, fcntl.F_DUPFD, max(ABOVE, *places) + 1)


def _place(files: Mapping[int, int]) -> None:
    aside = {place: _aside(file, files) for place, file in files.items()}
    for place, file in aside.items():
        os.dup2(file, place)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in files:
            with contextlib.suppress(OSError):  # the one that the list was read through
                os.close(number)


def _open_streams(is_unbuffered: bool) -> None:
    for name, file, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        before = getattr(sys, name)
        _kept.append(before)
        stream = io.TextIOWrapper(
            open(file, mode, buffering=0 if is_unbuffered and mode == "wb" else -1, closefd=False),  # noqa: SIM115 (of the process, as long as it lives)
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=not is_unbuffered and (name == "stderr" or os.isatty(file)),
            write_through=is_unbuffered and mode == "wb",
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _sow() -> None:
    """Gives the package's random numbers, and numpy's, a seed of this process; `random`'s have one, after any fork."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "psstore":
            for value in vars(module).values():
                if isinstance(value, random.Random):
                    value.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _show(start: Start) -> None:
    """Has others read these as the command line and the variables, in the place of those that the process was started
    with (proc(5): arg_start to env_end in /proc/PID/stat). Nothing here reads those: each variable was set anew."""
    sys.orig_argv = list(start.program.command)
    ends = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    texts = _text(start.program.command), _text(_pairs(start.env))
    for name, text, first, last in zip(("cmdline", "environ"), texts, ends[::2], ends[1::2], strict=True):
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, text, min(len(text), last - first))
        shown = Path(f"/proc/self/{name}").read_bytes()
        assert shown.rstrip(b"\0") == text.rstrip(b"\0"), f"{name} is shown as {shown!r}, and is {text!r}"


def _pairs(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


def _text(words: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _run(program: Program) -> NoReturn:
    """As the interpreter does: with what its end does, too."""
    code: object = 0
    sys.argv = [program.script or "-m", *program.arguments]
    try:
        if program.script is not None:
            sys.path[:0] = [] if program.is_safe else [os.path.dirname(os.path.realpath(program.script))]
            _run_script(os.path.abspath(program.script))
        else:
            assert program.module is not None, "a program is a script or a module"
            sys.path[:0] = [] if program.is_safe else [os.getcwd()]
            sys.modules.pop(program.module, None)  # it may have been imported, which is another thing
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


def _run_script(path: str) -> None:
    """As `runpy` runs one but for the first argument, which is the path as it was given."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))
