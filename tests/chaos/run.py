"""Runs a plan, and holds its end against the undisturbed run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import psutil

from psstore.checkpoint.place import COMPLETE, open_place
from tests.chaos.plan import CHECKPOINT_EVERY, STEPS, ChaosPlan, Fault

RUN_S = 180.0
"""Longer than any run should take on a busy machine: whoever needs more hangs."""

RESTARTS = 20
MARK = "PSSTORE_CHAOS"
WORK = Path(__file__).with_name("work.py")
MODULES = {"shard": "psstore.server.shard", "checkpoints": "psstore.launch.checkpointing"}


@dataclass
class ChaosRun:
    """What became of a run."""

    plan: ChaosPlan
    seconds: float = 0.0
    ends: dict[str, str] = field(default_factory=dict)
    """What each worker said at its end."""
    done: list[str] = field(default_factory=list)
    """Faults that met somebody."""
    output: list[str] = field(default_factory=list)
    exit_code: int | None = None
    left: list[str] = field(default_factory=list)
    """Processes that outlived it."""

    def problems(self, expected: str) -> list[str]:
        found = []
        if self.exit_code != 0:
            found.append(f"it ended with {self.exit_code}")
        if self.ends != {f"rank {rank}": expected for rank in range(self.plan.num_workers)}:
            found.append(f"workers ended with {self.ends}, undisturbed with {expected}")
        if self.left:
            found.append(f"left behind: {self.left}")
        return found


def run(plan: ChaosPlan, say: Callable[[str], None] = lambda line: None) -> ChaosRun:
    """Blocks until it has come to its end."""
    with tempfile.TemporaryDirectory(prefix="psstore-chaos-") as folder:
        return Monkey(plan, Path(folder), say).run()


@lru_cache
def undisturbed(num_shards: int, num_workers: int, overlap: str) -> str:
    """How a run ends in which nothing goes wrong."""
    calm = run(ChaosPlan(0, num_shards, num_workers, overlap, ()))
    assert not calm.problems(calm.ends["rank 0"]), calm
    return calm.ends["rank 0"]


class Monkey:
    """Starts a training, and does to it what the plan says."""

    def __init__(self, plan: ChaosPlan, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._place = str(folder / "checkpoints")
        self._say = say
        self._mark = uuid.uuid4().hex
        self._step = 0
        self._moved = threading.Condition()
        self._over = threading.Event()
        self._result = ChaosRun(plan)

    def run(self) -> ChaosRun:
        plan, result = self._plan, self._result
        began = time.monotonic()
        command = [
            *(sys.executable, "-m", "psstore.cli.main", "run", "--restarts", str(RESTARTS)),
            *("--shards", str(plan.num_shards), "--workers", str(plan.num_workers)),
            *("--checkpoint", self._place, "--checkpoint-every", str(CHECKPOINT_EVERY)),
            *(str(WORK), plan.overlap, str(STEPS)),
        ]
        environ = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        ) as process:
            hang = threading.Timer(RUN_S, process.kill)
            hang.start()
            faults = threading.Thread(target=self._disturb)
            faults.start()
            assert process.stdout is not None
            for line in process.stdout:
                self._heard(line.rstrip("\n"))
            result.exit_code = process.wait()
            hang.cancel()
            self._over.set()
            with self._moved:
                self._moved.notify_all()
            faults.join()
        result.seconds = time.monotonic() - began
        time.sleep(0.2)  # for the kernel to have buried the killed
        result.left = [" ".join(one.cmdline()) for one in self._processes()]
        return result

    def _heard(self, line: str) -> None:
        self._result.output.append(line)
        self._say(line)
        who, _, text = line.removeprefix("[").partition("] ")
        if text.startswith("step "):
            with self._moved:
                self._step = int(text.split()[1])
                self._moved.notify_all()
        elif text.startswith("version "):
            self._result.ends[who] = text

    # ---- faults, on a thread of their own ----

    def _disturb(self) -> None:
        for fault in self._plan.faults:
            with self._moved:
                self._moved.wait_for(lambda step=fault.step: self._step >= step or self._over.is_set())  # type: ignore[misc]
            if not self._await_checkpoint():
                return
            self._over.wait(fault.later_s)
            self._commit(fault)

    def _await_checkpoint(self) -> bool:
        """A store that dies before its first one is lost."""
        place = open_place(self._place).place
        while not any(one.status == COMPLETE for one in place.list()):
            if self._over.wait(0.02):
                return False
        return True

    def _commit(self, fault: Fault) -> None:
        victim = self._find(fault.victim)
        if victim is None:
            return  # it is dead, or over
        self._say(f"-- {fault}")
        try:
            if fault.kind == "stop":
                victim.suspend()
                self._over.wait(fault.for_s)
                victim.resume()
            else:
                victim.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self._result.done.append(str(fault))
        except psutil.NoSuchProcess:
            pass

    def _find(self, victim: str) -> psutil.Process | None:
        kind, _, number = victim.partition(" ")
        found = []
        for one in self._processes():
            try:
                arguments, environ = one.cmdline(), one.environ()
            except psutil.Error:
                continue
            if kind == "worker" and str(WORK) in arguments and environ.get("RANK") == number:
                return one
            if kind in MODULES and MODULES[kind] in arguments:
                found.append(one)
        found.sort(key=lambda one: one.pid)
        place = int(number or 0)
        return found[place] if place < len(found) else None

    def _processes(self) -> Iterator[psutil.Process]:
        """All of this run that live."""
        for one in psutil.process_iter():
            try:
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self._mark:
                    yield one
            except psutil.Error:
                continue
