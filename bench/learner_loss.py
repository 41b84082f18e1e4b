"""How near four learners that share seldom come to the loss of data parallel training on the same tokens, and in how
many bytes.

    python -m bench.learner_loss [--quick] [--steps N] [--learning-rate RATE] [--turns N] [--json FILE]

A small GPT on the source of Python's standard library (learner_gpt.py), trained once by gradients that are shared in
each step, and once by learners that share what has become of the model every 50 steps, in 8 bits both ways: alike are
the model at first, each learner's windows, AdamW with its schedule, and the number of steps. What is compared is the
loss on text that nobody has trained on, and all bytes that went over loopback.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from bench.command import Subject, run
from bench.learner_course import Course, Seen, taken
from bench.learner_gpt import LENGTH
from bench.learner_ways import DATA_PARALLEL, DILOCO, EVERY, LEARNERS, OUTER
from bench.machine import machine
from bench.processes import OPTIMIZERS, preload
from bench.report import Cell, Report, Table

STEPS, QUICK_STEPS = 6_000, 200

WINDOWS = 32
"""In a learner's step. Of fewer, four times as many are worth more to data parallel training: with 8 and 12,000 steps
it was at 1.43, and DiLoCo at 1.46."""

LEARNING_RATE = 6e-3
"""Better for DiLoCo than 1e-2, which left 1.392 in place of 1.387. Data parallel training is better with 1e-2: 1.365 in
place of 1.388."""

TARGET_LOSS, TARGET_BYTES = 1.01, 1.0 / 180.0
"""As parts of data parallel training's."""

WAYS = (DATA_PARALLEL, DILOCO)


def learner_loss(chosen: argparse.Namespace) -> Report:
    preload("bench.learner_course", OPTIMIZERS)
    steps = chosen.steps or (QUICK_STEPS if chosen.quick else STEPS)
    course = Course(num_steps=steps, num_windows=WINDOWS, learning_rate=chosen.learning_rate)
    found: dict[str, list[Seen]] = {way.name: [] for way in WAYS}
    for _ in range(chosen.turns):
        for way in WAYS:
            found[way.name].append(taken(way, course)[-1])
    return Report(
        subject="learner_loss",
        about=(
            f"{LEARNERS} learners, {steps:,} steps of {WINDOWS} windows of {LENGTH} letters each, AdamW with lr"
            f" {chosen.learning_rate:g} at most; DiLoCo with every={EVERY}, fragments=1, int8 both ways, outer SGD with"
            f" lr {OUTER['lr']:g} and Nesterov momentum {OUTER['momentum']:g}. Loss: of text that nobody has trained"
            " on, median of the turns. Bytes: over loopback, all that is sent, a step and learner."
        ),
        tables=[Table("after the same tokens", ("", "loss", "× data parallel", "bytes", "of its bytes"), rows(found))],
        figures=[{"steps": steps, "found": {name: [seen._asdict() for seen in one] for name, one in found.items()}}],
        machine=machine("torch"),
    )


def rows(found: Mapping[str, Sequence[Seen]]) -> list[list[Cell]]:
    losses = {name: statistics.median(seen.loss for seen in one) for name, one in found.items()}
    num_bytes = {name: statistics.median(seen.num_bytes / seen.steps for seen in one) for name, one in found.items()}
    least, most = losses[DATA_PARALLEL.name], num_bytes[DATA_PARALLEL.name]
    compared: list[list[Cell]] = [
        [
            name,
            f"{losses[name]:.4f}",
            f"{losses[name] / least:.4f}",
            f"{num_bytes[name] / LEARNERS:,.0f}",
            f"1/{most / num_bytes[name]:.0f}",
        ]
        for name in found
    ]
    return [*compared, ["target", None, f"{TARGET_LOSS:g}", None, f"1/{1 / TARGET_BYTES:.0f}"]]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, metavar="N", help=f"of each learner (default: {STEPS})")
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, metavar="RATE", help=f"default: {LEARNING_RATE:g}"
    )
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="runs of each way (default: 1)")


SUBJECT = Subject("learner_loss", __doc__.splitlines()[0], learner_loss, _options)

if __name__ == "__main__":
    run(SUBJECT)
