"""The processes of a run: all that bear its mark, whoever started them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from psstore.net.user_token import NETWORK

MARK = "PSSTORE_CHAOS"
WORK = str(Path(__file__).with_name("work.py"))
SUPERVISOR = "psstore.cli.server"
MODULES = {"shard": "psstore.server.shard", "checkpoints": "psstore.launch.checkpointing"}


class Processes:
    """Finds them."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex

    @property
    def environ(self) -> Mapping[str, str]:
        """What makes a process one of them, and its children."""
        return {MARK: self._mark}

    def __iter__(self) -> Iterator[psutil.Process]:
        """All that live."""
        for one in psutil.process_iter():
            try:
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self._mark:
                    yield one
            except psutil.Error:
                continue

    def kill(self) -> None:
        """Whoever is left."""
        for one in self:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def find(self, victim: str) -> psutil.Process | None:
        """'worker 1', 'shard 0', 'checkpoints'; None: it is dead, or over."""
        kind, _, number = victim.partition(" ")
        if kind == "worker":
            return next((one for one in self.running(WORK) if _environ(one).get("RANK") == number), None)
        found, place = self.running(MODULES[kind]), int(number or 0)
        return found[place] if place < len(found) else None

    def running(self, what: str) -> list[psutil.Process]:
        """Those that run that script, or that module by `python -m`, in the order in which they were started."""
        found = []
        for one in self:
            try:
                arguments = one.cmdline()
            except psutil.Error:
                continue
            if what in arguments[1:4]:  # behind -m, and flags of Python
                found.append(one)
        return sorted(found, key=lambda one: one.pid)

    def listening(self) -> list[int]:
        """Ports of the shards of one machine, in their order: as their supervisor has bound them."""
        found = []
        for supervisor in self.running(SUPERVISOR):
            places = [one for one in supervisor.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found += [one.laddr.port for one in sorted(places, key=lambda one: one.fd)]
        return found

    def ports_to(self, worker: str, port: int) -> list[int]:
        """The worker's own ends of its connections there."""
        process = self.find(worker)
        try:
            connections = [] if process is None else process.net_connections("tcp")
        except psutil.Error:
            return []
        return [one.laddr.port for one in connections if one.raddr and one.raddr.port == port]


def name_of(process: psutil.Process, leaders: Mapping[int, int]) -> str:
    """What it does, as in a plan: 'worker 1', 'leader 0', 'standby'; else the module that it runs. A supervisor is
    'saving' while it has the process that writes checkpoints, and that one's descriptors: it is the supervisor of shard
    0's leader, another one from a takeover on. `leaders`: of which shard, by process."""
    try:
        arguments = process.cmdline()
        if SUPERVISOR in arguments[1:4]:
            saves = any(MODULES["checkpoints"] in one.cmdline()[1:4] for one in process.children())
            return "saving" if saves else "server"
    except psutil.Error:
        return "ended"
    if WORK in arguments[1:4]:  # not who starts it
        return f"worker {_environ(process).get('RANK', '')}"
    if MODULES["shard"] in arguments:
        return f"leader {leaders[process.pid]}" if process.pid in leaders else "standby"
    return next((one.rpartition(".")[2] for one in arguments if one.startswith("psstore.")), "other")


def _environ(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def files_of(ports: list[int]) -> list[str]:
    """Token files of stores that listened there, which are to go with them. Stores on virtual hosts have none."""
    folder, network = Path(f"/tmp/psstore-{os.geteuid()}"), os.stat(NETWORK).st_ino
    return [str(one) for port in ports for one in folder.glob(f"{network}-*-{port}")]


def shared_memory() -> set[str]:
    """Names of it that are psstore's: it has none that outlive it."""
    folder = Path("/dev/shm")
    return {one.name for one in folder.iterdir() if "psstore" in one.name} if folder.exists() else set()
