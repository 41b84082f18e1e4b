"""Runs a plan, and holds its end against the undisturbed run's, or what its log of members says."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import psutil

from psstore.checkpoint import reader
from psstore.checkpoint.place import COMPLETE, open_place
from psstore.errors import StorageError
from psstore.exit_codes import EXIT_FAILED
from psstore.wire.messages import Members
from tests.chaos.faults import Faults
from tests.chaos.gates import Gates
from tests.chaos.ledger import account
from tests.chaos.plan import (
    CHECKPOINT_EVERY,
    NUM_SAMPLES,
    ON_HOSTS,
    SESSIONS,
    WITH_STANDBYS,
    ChaosPlan,
    Fault,
    Loop,
    faults_of,
)
from tests.chaos.processes import Processes, files_of, shared_memory
from tests.chaos.programs import Programs
from tests.chaos.stage import Stage
from tests.support.server_process import eventually

FIRST_STEP = CHECKPOINT_EVERY + 2
"""With which the checkpoint that faults wait for has been begun, and the training is far from its end."""

BURY_S = 30.0
"""How long the kernel may take to bury the killed, and other tests' stores to go on with other shards."""


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
    log: list[Members] = field(default_factory=list)
    """Of members, as it is in the end."""
    damaged: list[str] = field(default_factory=list)
    """Checkpoints that don't load."""
    left: list[str] = field(default_factory=list)
    """Processes and files that outlived it."""
    longest_s: float = 0.0
    """The longest that a worker took from one step to its next."""

    def is_equal(self, expected: str) -> bool:
        """Whether all workers ended with those bytes."""
        return self.ends == {f"rank {rank}": expected for rank in range(self.plan.num_workers)}

    @property
    def was_full_at_the_end(self) -> bool:
        """Whether there was no room for the last checkpoint, and that was said."""
        return self.plan.scene == "disk" and any("the last checkpoint was not written" in line for line in self.output)

    def problems(self, expected: str) -> list[str]:
        found = [f"it hangs: not over after {self.plan.limit_s:g} s"] if self.hangs else []
        found += [
            f"{who or 'psstore run'} ended with {code}"
            for who, code in self.exit_codes.items()
            if code and not (who == "" and code == EXIT_FAILED and self.was_full_at_the_end)
        ]
        if not self.is_equal(expected):
            found.append(f"workers ended with {self.ends}, and should with {expected}")
        for what, ones in (("lost", self.lost), ("doubled", self.doubled)):
            if ones:
                found.append(f"{what}: {len(ones)}; {'; '.join(ones[:3])}")
        if self.plan.scene in WITH_STANDBYS:
            found += [f"the store went back: {line}" for line in self.output if "go back to version" in line]
        found += [f"damaged: {one}" for one in self.damaged]
        found += [f"left behind: {one}" for one in self.left]
        return found


def run(
    plan: ChaosPlan,
    say: Callable[[str], None] = lambda line: None,
    watch: Callable[[Monkey], None] = lambda monkey: None,
) -> ChaosRun:
    """Blocks until it has come to its end. `watch` is called on a thread of its own, and ends when it is over."""
    with tempfile.TemporaryDirectory(prefix="psstore-chaos-") as folder:
        processes = Processes()
        with Stage(plan, Path(folder), processes) as stage:
            try:
                return Monkey(plan, stage, processes, say).run(watch)
            finally:
                processes.kill()


def expected_end(result: ChaosRun) -> str:
    """How each worker has to end: of a session as its log of members has it, else as where nothing goes wrong."""
    plan = result.plan
    if plan.loop not in SESSIONS:
        return _undisturbed(plan.num_workers, plan.loop, plan.steps, is_elastic=plan.fewest is not None)
    from tests.chaos import session_loop  # torch takes a while

    return session_loop.replayed(plan.num_workers, plan.steps, result.log)


@lru_cache
def _undisturbed(num_workers: int, loop: Loop, steps: int, *, is_elastic: bool) -> str:
    """The same for any number of shards."""
    fewest = 1 if is_elastic else None
    calm = run(ChaosPlan(0, 1, num_workers, loop, (), steps=steps, pace_s=0.0, fewest=fewest))
    assert not calm.problems(calm.ends["rank 0"]), calm
    return calm.ends["rank 0"]


class Monkey:
    """Starts a training, and does to it what the plan says."""

    def __init__(self, plan: ChaosPlan, stage: Stage, processes: Processes, say: Callable[[str], None]) -> None:
        self._plan = plan
        self.stage = stage
        self.processes = processes
        self._say = say
        self.step = 0
        """The last that rank 0 has taken."""
        self._moved = threading.Condition()
        self.over = threading.Event()
        self._ports: list[int] = []
        self._gates = Gates(stage.notes)
        self.result = ChaosRun(plan)

    def run(self, watch: Callable[[Monkey], None]) -> ChaosRun:
        result, before = self.result, shared_memory()
        self._gates.shut(map(_happens_after, self._plan.faults))
        plan = self._plan
        if plan.scene in ON_HOSTS or plan.fault_every_s or plan.fewest is not None or _reshards(plan):
            # The training ends when all faults have: a host that came back to a store which is over would wait for it,
            # and that a command hangs would not be seen once the store has ended.
            self._gates.shut([self._plan.steps])
        began = time.monotonic()
        programs = Programs(self.stage.commands(), self._heard)
        hang = threading.Timer(self._plan.limit_s, self._give_up, args=(programs,))
        hang.start()
        beside = [
            threading.Thread(target=self._disturb, args=(programs,)),
            threading.Thread(target=watch, args=(self,)),
        ]
        for thread in beside:
            thread.start()
        result.exit_codes = programs.wait()
        hang.cancel()
        self.over.set()
        with self._moved:
            self._moved.notify_all()
        for thread in beside:
            thread.join()
        result.seconds = time.monotonic() - began
        self._look_back(before)
        return result

    def _give_up(self, programs: Programs) -> None:
        self.result.hangs = True
        programs.give_up()
        self.processes.kill()

    def _heard(self, program: str, line: str) -> None:
        line = f"[{program}] {line}" if program else line
        who, _, text = line.removeprefix("[").partition("] ")
        self._say(line)
        with self._moved:
            if text.startswith("step "):
                self.step = int(text.split()[1])
                self._moved.notify_all()
                return
            self.result.output.append(line)
            if text.startswith("version "):
                self.result.ends[who] = text

    # ---- faults, on a thread of their own ----

    def _disturb(self, programs: Programs) -> None:
        faults, plan = Faults(self.stage, self.processes, programs, self.over, self.result.damaged), self._plan
        if (plan.faults or plan.fault_every_s) and self._await_checkpoint():
            self._ports = self.processes.listening()
            for fault in self._by_the_clock() if plan.fault_every_s else self._by_steps():
                self._do(fault, faults)
            faults.settle(is_apart=plan.scene in ON_HOSTS and plan.scene in WITH_STANDBYS)
        self._gates.open(plan.steps)

    def _by_steps(self) -> Iterator[Fault]:
        """Each when it is due. The training waits until it has its victim."""
        for fault in self._plan.faults:
            self._await_step(_happens_after(fault))
            yield fault

    def _by_the_clock(self) -> Iterator[Fault]:
        due = time.monotonic()
        for fault in faults_of(self._plan):
            due += self._plan.fault_every_s
            if self._await_step(self._plan.steps, timeout_s=due - time.monotonic()):
                return
            yield replace(fault, step=self.step)

    def _await_step(self, step: int, *, timeout_s: float | None = None) -> bool:
        """False: it has not been taken in that time."""
        with self._moved:
            return self._moved.wait_for(lambda: self.step >= step or self.over.is_set(), timeout_s)

    def _do(self, fault: Fault, faults: Faults) -> None:
        commit = faults.aim(fault)
        self._gates.open(_happens_after(fault))
        self.over.wait(fault.later_s)
        self._heard("", f"-- {fault}")
        if not self.over.is_set() and commit():
            self.result.done.append(str(fault))

    def _await_checkpoint(self) -> bool:
        """A store that dies before its first one is lost."""
        while not self._complete():
            if self.over.wait(0.02):
                return False
        return True

    def _complete(self) -> list[int]:
        return [one.version for one in open_place(self.stage.place).place.list() if one.status == COMPLETE]

    # ---- afterwards ----

    def _look_back(self, shared_before: set[str]) -> None:
        result, plan = self.result, self._plan
        psutil.wait_procs(list(self.processes), BURY_S)
        eventually(lambda: shared_memory() <= shared_before, BURY_S)  # another store here may just be resharding
        result.left = [" ".join(one.cmdline()) for one in self.processes]
        result.left += [str(one) for one in self.stage.temporary.iterdir() if not one.name.startswith("torch")]
        result.left += files_of(self._ports) + sorted(shared_memory() - shared_before)
        num_samples = NUM_SAMPLES if plan.loop in SESSIONS else 0
        told = account(self.stage.notes, plan.num_workers, plan.steps, num_samples)
        result.lost, result.doubled, result.log = told.lost, told.doubled, told.log
        result.longest_s = max(told.waits, default=0.0)
        for version in self._complete():
            try:
                reader.verify(open_place(self.stage.place).place.storage, version)
            except StorageError as error:
                result.damaged.append(error.message)


def _reshards(plan: ChaosPlan) -> bool:
    return any(fault.kind == "reshard" for fault in plan.faults)


def _happens_after(fault: Fault) -> int:
    """The step after which the training waits for that fault."""
    return max(fault.step, FIRST_STEP)
