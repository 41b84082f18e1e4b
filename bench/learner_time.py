"""How long four learners take to a loss, all alike and with one that is four times slower, beside torchft and hivemind.

    python -m bench.learner_time [--quick] [--loss LOSS] [--fragments N] [--json FILE]

The learners, the model and the text of `learner_loss`, with a learning rate that stays. Each step's compute is slept in
addition to what it takes, so that four learners can be alike on two cores, and the slow one sleeps four times as long.
A way ends when the model of the first learner, which is a usual one, first has that loss on text that nobody has
trained on, which is looked at after every 50 of its steps; time begins when all have joined. All ways share the model
every 50 steps, psstore in as many fragments as are asked for, and have the same outer step, and TCP over loopback;
torchft and hivemind take part if they are installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.command import Subject, run
from bench.learner_course import Course, Seen, taken
from bench.learner_ways import DILOCO, DILOCO_FLOAT32, EVERY, LEARNERS, QUORUM, Hivemind, Psstore, TorchFt, Way
from bench.machine import machine
from bench.processes import OPTIMIZERS, preload
from bench.report import Cell, Report, Table

LOSS, QUICK_LOSS = 2.2, 2.6

WINDOWS = 8
"""In a learner's step: few, so that what is slept is most of it."""

LEARNING_RATE = 6e-3
"""As in learner_loss."""

STEP_S = 0.03
"""Slept in each step: several times what a step computes where two learners share a core."""

SLOWER = 4.0

MOST_STEPS = 5_000
"""Of the first learner: the loss that is asked for is not reached, then."""

TARGET = 0.6
"""Of the time that learners take who wait for the slow one, at most."""


@dataclass(frozen=True)
class Case:
    title: str
    slowness: Sequence[float]
    """How many times as long each learner sleeps."""
    ways: Sequence[Way]
    """The first one is what others are compared with."""
    target: float | None = None
    """Of the second way."""

    def in_fragments(self, number: int) -> Case:
        """With so many in the ways of psstore; others share the whole model at once."""
        ways = [replace(way, fragments=number) if isinstance(way, Psstore) else way for way in self.ways]
        return replace(self, ways=ways)


CASES = (
    Case("all alike", (1.0,) * LEARNERS, (DILOCO, DILOCO_FLOAT32, TorchFt(), Hivemind())),
    Case(
        f"one learner {SLOWER:g} × slower",
        (*(1.0,) * (LEARNERS - 1), SLOWER),
        (DILOCO, QUORUM, TorchFt(), Hivemind()),
        target=TARGET,
    ),
)


def learner_time(chosen: argparse.Namespace) -> Report:
    preload("bench.learner_course", OPTIMIZERS)
    loss = chosen.loss or (QUICK_LOSS if chosen.quick else LOSS)
    cases = [case.in_fragments(chosen.fragments) for case in CASES]
    found = {case.title: {way.name: seen(case, way, loss) for way in case.ways if not way.why_not()} for case in cases}
    missing = dict.fromkeys(why_not for case in cases for way in case.ways if (why_not := way.why_not()))
    return Report(
        subject="learner_time",
        about=(
            f"{LEARNERS} learners, which share the model every {EVERY} steps, psstore's in {chosen.fragments} fragments"
            f" that take turns, until the loss on held-out text is at most {loss:g};"
            f" {STEP_S:g} s a step slept in addition to its compute, and {SLOWER:g} times as long by one that is slow."
            " Bytes: over loopback, all that is sent, per learner and step of the first one."
        ),
        tables=[
            Table(
                case.title,
                ("", "seconds", f"× {case.ways[0].name}", "target", "steps", "bytes"),
                rows(case, found[case.title], loss),
            )
            for case in cases
        ],
        notes=[f"{reason}: left out" for reason in missing],
        figures=[
            {
                "loss": loss,
                "seen": {
                    title: {name: [seen._asdict() for seen in looks] for name, looks in ways.items()}
                    for title, ways in found.items()
                },
            }
        ],
        machine=machine("torch", "torchft-nightly", "hivemind"),
    )


def seen(case: Case, way: Way, loss: float) -> list[Seen]:
    """At each look of the first learner, up to the one at which the loss is reached."""
    course = Course(
        num_steps=MOST_STEPS,
        num_windows=WINDOWS,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        looks_every=EVERY,
        step_s=tuple(STEP_S * slow for slow in case.slowness),
    )
    return taken(way, course, lambda seen: seen.loss <= loss)


def rows(case: Case, found: dict[str, list[Seen]], loss: float) -> list[list[Cell]]:
    """What is not reached has no time."""
    ends = {name: looks[-1] for name, looks in found.items()}
    times_s = {name: end.seconds if end.loss <= loss else None for name, end in ends.items()}
    first_s = times_s[case.ways[0].name]
    return [
        [
            way.name,
            times_s[way.name],
            (own_s / first_s) if first_s and (own_s := times_s[way.name]) else None,
            case.target if index == 1 else None,
            f"{ends[way.name].steps}",
            f"{ends[way.name].num_bytes / ends[way.name].steps / LEARNERS:.0f}",
        ]
        for index, way in enumerate(case.ways)
        if way.name in found
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loss", type=float, help=f"that is to be reached (default: {LOSS:g})")
    parser.add_argument("--fragments", type=int, default=1, metavar="N", help="of psstore's, in turns (default: 1)")


SUBJECT = Subject("learner_time", __doc__.splitlines()[0], learner_time, _options)

if __name__ == "__main__":
    run(SUBJECT)
