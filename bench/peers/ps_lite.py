"""DMLC's ps-lite, from which MXNet's and BytePS's servers descend: ps_lite.cc, compiled here against a build of it.

ps-lite is not packaged anywhere. PS_LITE names a folder with its include/ and build/libps.a (github.com/dmlc/ps-lite,
`make ps`); its libraries zmq and protobuf are found by the compiler. Threads of its own: one that sends, one that
receives, and one that steps in the server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.comparison import Role
from bench.processes import free_port
from bench.work import LEARNING_RATE, Work

NAME = "ps-lite"
ROLE: Role = "peer"
IN_ONE_PROCESS = False
SPINS = False

SOURCE = Path(__file__).with_suffix(".cc")


def why_not(work: Work, transport: str) -> str | None:
    if transport == "shm":
        return "ps-lite's shared memory is BytePS's"
    return why_not_built()


@contextlib.contextmanager
def serve(work: Work, transport: str, *, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """`more`: of the environment of all processes."""
    sizes = ",".join(str(math.prod(shape)) for shape in work.shapes.values())
    command = [str(compiled(SOURCE)), str(LEARNING_RATE), sizes]
    with servers(command, work.num_workers, {"DMLC_LOCAL": str(int(transport == "unix")), **more}) as environment:
        yield json.dumps([command, environment])


def join(work: Work, rank: int, where: str) -> PsLiteWorker:
    command, environment = json.loads(where)
    return PsLiteWorker(command, environment)


class PsLiteWorker:
    """Has the worker's program take rounds."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ends = contextlib.ExitStack()
        self._round = self._ends.enter_context(rounds(command, environment))
        self.last = 0.0
        self.variants: Mapping[str, Callable[[], None]] = {
            "ZPushPull per tensor": lambda: self._take("t"),
            "ZPushPull of all": lambda: self._take("a"),
        }

    def close(self) -> None:
        self._ends.close()

    def _take(self, way: str) -> None:
        self.last = float(self._round(way))


# ---- what other uses of ps-lite have, too ----


def why_not_built() -> str | None:
    if "PS_LITE" not in os.environ:
        return "PS_LITE does not name a folder with a build of ps-lite"
    return None if shutil.which("c++") else "there is no C++ compiler for what uses it"


@contextlib.contextmanager
def servers(command: Sequence[str], num_workers: int, more: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The scheduler, which has no part in rounds, and one server; yields the environment of workers."""
    environment = {
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        **more,
    }
    with contextlib.ExitStack() as ends:
        for role in ("scheduler", "server"):
            ends.enter_context(_process(command, {**environment, "DMLC_ROLE": role}))
        yield {**environment, "DMLC_ROLE": "worker"}


@contextlib.contextmanager
def rounds(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Callable[[str], str]]:
    """A worker's program, which says a line for each that it is told."""
    with _process(command, environment) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None, "it was asked for"
        assert stdout is not None, "it was asked for"
        assert stdout.readline() == "ready\n", "ps-lite's worker has not started"

        def take(told: str) -> str:
            print(told, file=stdin, flush=True)
            return stdout.readline()

        yield take


@functools.cache
def compiled(source: Path) -> Path:
    """Once; removed when the bench ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    program, library = Path(folder.name) / source.stem, Path(os.environ["PS_LITE"])
    flags = ["-std=c++17", "-O3", "-march=native", "-w", f"-I{library / 'include'}"]
    libraries = [str(library / "build" / "libps.a"), "-lzmq", "-lprotobuf", "-pthread"]
    subprocess.run(["c++", *flags, "-o", str(program), str(source), *libraries], check=True)
    return program


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Ends by itself when its input does: ps-lite's processes wait for each other then."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        process.kill()
        process.wait()
