"""Runs a plan, and holds its end against the undisturbed run's."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import psutil

from psstore.checkpoint import reader
from psstore.checkpoint.place import COMPLETE, open_place
from psstore.errors import StorageError
from tests.chaos.faults import Faults
from tests.chaos.gates import Gates
from tests.chaos.ledger import account
from tests.chaos.plan import CHECKPOINT_EVERY, STEPS, ChaosPlan, Fault, Loop
from tests.chaos.processes import Processes, files_of, shared_memory
from tests.chaos.stage import Command, Stage

RUN_S = 180.0
"""Longer than any run should take on a busy machine: whoever needs more hangs."""

FIRST_STEP = CHECKPOINT_EVERY + 2
"""With which the checkpoint that faults wait for has been begun, and the training is far from its end."""

BURY_S = 5.0
"""How long the kernel may take to bury the killed."""


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
    exit_codes: dict[str, int] = field(default_factory=dict)
    hangs: bool = False
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    """What the ledger says."""
    damaged: list[str] = field(default_factory=list)
    """Checkpoints that don't load."""
    left: list[str] = field(default_factory=list)
    """Processes and files that outlived it."""
    longest_s: float = 0.0
    """The longest that a worker took from one step to its next."""

    def is_equal(self, expected: str) -> bool:
        """Whether all workers ended with those bytes."""
        return self.ends == {f"rank {rank}": expected for rank in range(self.plan.num_workers)}

    def problems(self, expected: str) -> list[str]:
        found = [f"it hangs: not over after {RUN_S:g} s"] if self.hangs else []
        found += [f"{who or 'psstore run'} ended with {code}" for who, code in self.exit_codes.items() if code]
        if not self.is_equal(expected):
            found.append(f"workers ended with {self.ends}, undisturbed with {expected}")
        for what, ones in (("lost", self.lost), ("doubled", self.doubled)):
            if ones:
                found.append(f"{what}: {len(ones)}; {'; '.join(ones[:3])}")
        if self.plan.scene == "standbys":
            found += [f"the store went back: {line}" for line in self.output if "go back to version" in line]
        found += [f"damaged: {one}" for one in self.damaged]
        found += [f"left behind: {one}" for one in self.left]
        return found


def run(plan: ChaosPlan, say: Callable[[str], None] = lambda line: None) -> ChaosRun:
    """Blocks until it has come to its end."""
    with tempfile.TemporaryDirectory(prefix="psstore-chaos-") as folder:
        processes = Processes()
        with Stage(plan, Path(folder), processes) as stage:
            try:
                return Monkey(plan, stage, processes, say).run()
            finally:
                processes.kill()


@lru_cache
def undisturbed(num_workers: int, loop: Loop) -> str:
    """How a run ends in which nothing goes wrong: the same for any number of shards."""
    calm = run(ChaosPlan(0, 1, num_workers, loop, ()))
    assert not calm.problems(calm.ends["rank 0"]), calm
    return calm.ends["rank 0"]


class Monkey:
    """Starts a training, and does to it what the plan says."""

    def __init__(self, plan: ChaosPlan, stage: Stage, processes: Processes, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._stage = stage
        self._processes = processes
        self._say = say
        self._step = 0
        self._moved = threading.Condition()
        self._over = threading.Event()
        self._ports: list[int] = []
        self._gates = Gates(stage.notes)
        self._result = ChaosRun(plan)

    def run(self) -> ChaosRun:
        result, before = self._result, shared_memory()
        self._gates.shut(map(_happens_after, self._plan.faults))
        began = time.monotonic()
        started = [self._start(command) for command in self._stage.commands()]
        hang = threading.Timer(RUN_S, self._give_up)
        hang.start()
        faults = threading.Thread(target=self._disturb)
        faults.start()
        for _, process, lines in started:
            lines.join()
            process.wait()
        hang.cancel()
        result.exit_codes = {command.who: process.returncode for command, process, _ in started}
        self._over.set()
        with self._moved:
            self._moved.notify_all()
        faults.join()
        result.seconds = time.monotonic() - began
        self._look_back(before)
        return result

    def _start(self, command: Command) -> tuple[Command, subprocess.Popen[str], threading.Thread]:
        process = subprocess.Popen(
            command.arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(command.environ)
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    text = line.rstrip("\n")
                    self._heard(f"[{command.who}] {text}" if command.who else text)

        lines = threading.Thread(target=read)
        lines.start()
        return command, process, lines

    def _give_up(self) -> None:
        self._result.hangs = True
        self._processes.kill()

    def _heard(self, line: str) -> None:
        with self._moved:
            self._result.output.append(line)
            self._say(line)
            who, _, text = line.removeprefix("[").partition("] ")
            if text.startswith("step "):
                self._step = int(text.split()[1])
                self._moved.notify_all()
            elif text.startswith("version "):
                self._result.ends[who] = text

    # ---- faults, on a thread of their own ----

    def _disturb(self) -> None:
        faults = Faults(self._stage, self._processes, self._over, self._result.damaged)
        if not self._plan.faults or not self._await_checkpoint():
            return
        self._ports = self._processes.listening()
        for fault in self._plan.faults:
            step = _happens_after(fault)
            with self._moved:
                self._moved.wait_for(lambda step=step: self._step >= step or self._over.is_set())  # type: ignore[misc]
            commit = faults.aim(fault)
            self._gates.open(step)
            self._over.wait(fault.later_s)
            self._say(f"-- {fault}")
            if not self._over.is_set() and commit():
                self._result.done.append(str(fault))

    def _await_checkpoint(self) -> bool:
        """A store that dies before its first one is lost."""
        while not self._complete():
            if self._over.wait(0.02):
                return False
        return True

    def _complete(self) -> list[int]:
        return [one.version for one in open_place(self._stage.place).place.list() if one.status == COMPLETE]

    # ---- afterwards ----

    def _look_back(self, shared_before: set[str]) -> None:
        result, plan = self._result, self._plan
        psutil.wait_procs(list(self._processes), BURY_S)
        result.left = [" ".join(one.cmdline()) for one in self._processes]
        result.left += [str(one) for one in self._stage.temporary.iterdir() if not one.name.startswith("torch")]
        result.left += files_of(self._ports) + sorted(shared_memory() - shared_before)
        told = account(self._stage.notes, plan.num_workers, STEPS)
        result.lost, result.doubled, result.longest_s = told.lost, told.doubled, max(told.waits, default=0.0)
        for version in self._complete():
            try:
                reader.verify(open_place(self._stage.place).place.storage, version)
            except StorageError as error:
                result.damaged.append(error.message)


def _happens_after(fault: Fault) -> int:
    """The step after which the training waits for that fault."""
    return max(fault.step, FIRST_STEP)
