"""Learners that take a course, each in a process of its own, and what the first one tells of it.

A step may be slept in addition to what it computes, by each learner for as long as the course says: it is how one is
slow on a machine with fewer processors than learners. Bytes are those of this network's loopback, which is the bench's
own, from when all have joined: what all learners and what serves them have sent, each byte once.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_bool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import RawArray
from typing import Literal, NamedTuple, Protocol

import torch

from bench.harness import process_tree
from bench.learner_gpt import Lesson
from bench.learner_ways import LEARNERS, PATIENCE_S, Way
from bench.link_meter import look_at
from bench.processes import FRESH, signal_all

WARM_UP = 100
"""Steps in which the learning rate rises where it is constant afterwards."""

LOOKED_AFTER_S = 0.5
"""Between two looks at whether all learners live."""


@dataclass(frozen=True)
class Course:
    """What learners do."""

    num_steps: int
    num_windows: int
    """In a learner's step."""
    learning_rate: float
    """AdamW's, at most."""
    schedule: Literal["one cycle", "constant"] = "one cycle"
    looks_every: int | None = None
    """Steps between two looks at the loss, beside the last one."""
    step_s: tuple[float, ...] = (0.0,) * LEARNERS
    """Slept in each step, by each learner."""


class Seen(NamedTuple):
    """At a look."""

    steps: int
    """Of the first learner."""
    seconds: float
    num_bytes: int
    loss: float
    """Of text that nobody trains on, by the first learner's model."""


class LearnerDied(Exception):
    """In the middle of its course."""


class Flags(Protocol):
    """In memory that processes share; no lock, which one that is killed would keep."""

    def __getitem__(self, index: int) -> bool: ...

    def __setitem__(self, index: int, value: bool) -> None: ...


def taken(way: Way, course: Course, enough: Callable[[Seen], bool] = lambda seen: False) -> list[Seen]:
    """What the first learner has seen, up to what is enough, or the end. Raises LearnerDied."""
    flags: Flags = RawArray(c_bool, LEARNERS + 1)
    ours, theirs = FRESH.Pipe(duplex=False)
    looks: list[Seen] = []
    with way.serve() as where, _learners(way, where, course, flags, theirs) as processes:
        while not looks or (looks[-1].steps < course.num_steps and not enough(looks[-1])):
            while not ours.poll(LOOKED_AFTER_S):
                if any(one.exitcode for one in processes):
                    raise LearnerDied(f"a learner of {way.name} has ended, and said why")
            looks.append(ours.recv())
    return looks


@contextlib.contextmanager
def _learners(
    way: Way, where: str, course: Course, flags: Flags, link: Connection
) -> Iterator[Sequence[ForkServerProcess]]:
    """Those that have not ended by themselves soon are killed, with what they have started."""
    processes = [
        FRESH.Process(target=learn, args=(way, where, rank, course, flags, None if rank else link))
        for rank in range(LEARNERS)
    ]
    for one in processes:
        one.start()
    try:
        yield processes
    finally:
        flags[LEARNERS] = True
        until = time.monotonic() + PATIENCE_S / 10
        for one in processes:
            one.join(max(0.0, until - time.monotonic()))
            if one.is_alive() and one.pid:
                signal_all(process_tree(one.pid), signal.SIGKILL)
            one.join()


def learn(way: Way, where: str, rank: int, course: Course, flags: Flags, link: Connection | None) -> None:
    """One learner's part, in its process. `flags`: who has joined, and last whether it is over. `link`: where what is
    seen goes to."""
    torch.set_num_threads(1)
    lesson = Lesson(rank, course.num_windows)
    inner = torch.optim.AdamW(lesson.model.parameters(), lr=course.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
    member = way.join(where, rank, lesson.model, inner)
    scheduler = _scheduler(member.optimizer, course)
    flags[rank] = True
    while not all(flags[one] for one in range(LEARNERS)):
        time.sleep(0.001)
    begin_s, begin = time.monotonic(), look_at("lo").came_bytes
    for step in range(1, course.num_steps + 1):
        if flags[LEARNERS]:
            break
        lesson.backward()
        time.sleep(course.step_s[rank])
        member.step()
        scheduler.step()
        last = step == course.num_steps
        if last:
            member.finish()
        if link and (last or (course.looks_every and step % course.looks_every == 0)):
            seconds, num_bytes = time.monotonic() - begin_s, look_at("lo").came_bytes - begin
            link.send(Seen(step, seconds, num_bytes, lesson.held_out_loss()))
    member.leave()


def _scheduler(optimizer: torch.optim.Optimizer, course: Course) -> torch.optim.lr_scheduler.LRScheduler:
    if course.schedule == "one cycle":
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=course.learning_rate, total_steps=course.num_steps, pct_start=0.1
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
