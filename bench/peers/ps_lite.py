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
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.comparison import Role
from bench.work import LEARNING_RATE, Work

NAME = "ps-lite"
ROLE: Role = "peer"
IN_ONE_PROCESS = False
SPINS = False

SOURCE = Path(__file__).with_suffix(".cc")


def why_not(work: Work, transport: str) -> str | None:
    if transport == "shm":
        return "ps-lite's shared memory is BytePS's"
    if "PS_LITE" not in os.environ:
        return "PS_LITE does not name a folder with a build of ps-lite"
    return None if shutil.which("c++") else "there is no C++ compiler for ps_lite.cc"


@contextlib.contextmanager
def serve(work: Work, transport: str, *, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """The scheduler, which has no part in rounds, and one server. `more`: of the environment of all processes."""
    program = _compiled()
    with contextlib.ExitStack() as ends:
        environment = {
            "DMLC_NUM_WORKER": str(work.num_workers),
            "DMLC_NUM_SERVER": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_free_port()),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_LOCAL": str(int(transport == "unix")),
            **more,
        }
        for role in ("scheduler", "server"):
            ends.enter_context(_process(program, work, {**environment, "DMLC_ROLE": role}))
        yield json.dumps([str(program), {**environment, "DMLC_ROLE": "worker"}])


def join(work: Work, rank: int, where: str) -> PsLiteWorker:
    program, environment = json.loads(where)
    return PsLiteWorker(work, Path(program), environment)


class PsLiteWorker:
    """Has the worker's program take rounds."""

    def __init__(self, work: Work, program: Path, environment: Mapping[str, str]) -> None:
        self._ends = contextlib.ExitStack()
        self._process = self._ends.enter_context(_process(program, work, environment))
        assert self._process.stdout is not None, "it was asked for"
        assert self._process.stdout.readline() == "ready\n", "ps-lite's worker has not started"
        self.last = 0.0
        self.variants: Mapping[str, Callable[[], None]] = {
            "ZPushPull per tensor": lambda: self._round("t"),
            "ZPushPull of all": lambda: self._round("a"),
        }

    def close(self) -> None:
        self._ends.close()

    def _round(self, way: str) -> None:
        assert self._process.stdin is not None, "it was asked for"
        assert self._process.stdout is not None, "it was asked for"
        print(way, file=self._process.stdin, flush=True)
        self.last = float(self._process.stdout.readline())


@functools.cache
def _compiled() -> Path:
    """Once; removed when the bench ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    program, library = Path(folder.name) / "ps_lite", Path(os.environ["PS_LITE"])
    flags = ["-std=c++17", "-O3", "-march=native", "-w", f"-I{library / 'include'}"]
    libraries = [str(library / "build" / "libps.a"), "-lzmq", "-lprotobuf", "-pthread"]
    subprocess.run(["c++", *flags, "-o", str(program), str(SOURCE), *libraries], check=True)
    return program


@contextlib.contextmanager
def _process(program: Path, work: Work, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Ends by itself when its input does: ps-lite's processes wait for each other then."""
    sizes = ",".join(str(math.prod(shape)) for shape in work.shapes.values())
    process = subprocess.Popen(
        [str(program), str(LEARNING_RATE), sizes],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
