"""How long it takes until the last of several readers has a trainer's newest weights.

    python -m bench.fan_out [--quick] [--json FILE]

A trainer has 4 million weights in float32, of which 1.6–3.4 % have other bits in bfloat16 than in the version before,
as after a step of AdamW at a learning rate of 1e-6. What is measured lasts from then on until each of READERS readers,
in processes of their own on the same machine, has all of them in bfloat16: by `store.publish` and `psstore.follow`, and
in other ways. Each reader's weights are compared with the trainer's after each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import numpy as np
import torch

from bench.command import Subject, run
from bench.comparison import Entry, Role, comparison, comparison_figures, comparison_summary
from bench.fan_out_ways import NUM_TENSORS, WAYS, HandOver, Readers, Way, bits_of, digest
from bench.harness import Took, alternate, cpu_seconds, process_tree
from bench.machine import machine
from bench.processes import preload
from bench.report import Report
from bench.work import Floats

READERS = 8
TENSOR_ELEMS = 1 << 18
VERSIONS = 6
"""Of the weights, which take turns."""

MOVED = 6e-7
SETTLE_S = 0.02
"""For readers that were told to wait for the next version to be waiting."""


def versions() -> list[Floats]:
    """Each differs from the one before by what a step may do."""
    draw = np.random.default_rng(0)
    first = draw.standard_normal(NUM_TENSORS * TENSOR_ELEMS, np.float32) * np.float32(0.02)
    return [first + draw.standard_normal(first.size, np.float32) * np.float32(MOVED) for _ in range(VERSIONS)]


def measure(chosen: argparse.Namespace) -> Report:
    preload("bench.fan_out_ways", "torch")
    rounds = 5 if chosen.quick else 40
    entries, notes = spread(READERS, versions(), rounds, WAYS)
    title = f"until the last of {READERS} readers has a version"
    return Report(
        subject="fan_out",
        about=(
            f"{NUM_TENSORS} tensors of {TENSOR_ELEMS:,} float32, read in bfloat16 by {READERS} processes of the"
            " trainer's machine; bytes are those of the version, once for each reader."
        ),
        tables=[comparison(title, entries)],
        summary=comparison_summary("fan_out", title, entries),
        figures=comparison_figures(title, entries),
        notes=notes,
        machine=machine("torch", "redis", "safetensors"),
    )


def spread(
    num_readers: int, weights: Sequence[Floats], rounds: int, ways: Mapping[str, tuple[Role, Way]]
) -> tuple[list[Entry], list[str]]:
    """What each took, and why others were not run."""
    torch.set_num_threads(1)
    roles: dict[str, Role] = {}
    turns: dict[str, Callable[[], Took]] = {}
    notes: list[str] = []
    with contextlib.ExitStack() as ends:
        for name, (role, way) in ways.items():
            try:
                hand_over, readers = ends.enter_context(way(num_readers, weights[0].size))
            except ImportError as error:
                notes.append(f"Not run: {name}: {error}.")
                continue
            readers.began()
            roles[name] = role
            turns[name] = _turn(hand_over, readers, weights)
        found = alternate(turns, warm_up=2, rounds=rounds, progress="fan_out")
    num_bytes = 2 * weights[0].size * num_readers
    return [Entry(name, roles[name], one, num_bytes) for name, one in found.items()], notes


def _turn(hand_over: HandOver, readers: Readers, weights: Sequence[Floats]) -> Callable[[], Took]:
    following = cycle([(one, digest([bits_of(one)])) for one in weights])

    def turn() -> Took:
        newest, expected = next(following)
        readers.wait_for_next()
        time.sleep(SETTLE_S)
        processes = process_tree()
        used_s, begin = cpu_seconds(processes), time.perf_counter()
        hand_over(newest)
        took = Took(readers.last_end() - begin, cpu_seconds(processes) - used_s)
        wrong = [number for number, value in enumerate(readers.digests()) if value != expected]
        if wrong:
            raise RuntimeError(f"readers {wrong} have other weights than the trainer")
        return took

    return turn


SUBJECT = Subject("fan_out", __doc__.splitlines()[0], measure)

if __name__ == "__main__":
    run(SUBJECT)
