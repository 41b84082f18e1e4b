"""The pass that sums the workers' gradients and takes the optimizer's step, beside memory's own speed, torch and numpy.

    OPENBLAS_NUM_THREADS=1 python -m bench.kernels [--quick] [--part PART] [--json FILE] [--plot FILE.png]

Axes: rule, number of workers W, dtype of the gradients, threads; 25 M parameters in slices of 4 MiB (numpy's arrays of
that size lie on huge pages where the system has them; all contestants' do), 8 M with --quick; 10,000 small slices; and
the encoders; and medians and trimmed means of the workers beside their mean. The limit is plain_loop.c: a loop that
reads and writes as many arrays and only adds, compiled here with prefetching, on the same gradients; of encoders
copy_loop.c. Bytes per parameter: W gradients, value and states read, value and states written.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from bench import encoders
from bench.command import Subject, run
from bench.comparison import milliseconds, rates
from bench.harness import Series, Turn, alternate
from bench.kernel_inputs import READS
from bench.kernel_work import Task, Work, core_work, numpy_work, plain_work, torch_work
from bench.machine import machine
from bench.report import Cell, Chart, Report, Table
from bench.rule_case import Case
from bench.small_slices import SmallTask, shard_turn, torch_turn
from psstore import _core

CASES = (Case("sgd", {}), Case("sgd", {"momentum": 0.9}), Case("adam", {}))

OURS, LIMIT = "psstore", "plain loop"
FUSED, FOREACH, NUMPY = "torch sum + fused", "torch sum + foreach", "numpy in blocks"

HEADERS = (
    "rule",
    "W",
    "inputs",
    "threads",
    "bytes per parameter",
    "GB/s: median (min–max)",
    "plain loop's GB/s",
    "of the limit",
    f"× {FUSED}",
    f"× {FOREACH}",
    f"× {NUMPY}",
    "CPU s per GB",
)

Named = tuple[str, dict[str, Series]]
"""A case, and what each contestant took."""

SMALL_HEADERS = (
    "rule",
    "W",
    "slices of",
    "ms: median (min–max)",
    f"× {FUSED}",
    f"× {FOREACH}",
    "CPU s per GB",
)

COMPENSATED_HEADERS = ("rule", "inputs", "as it is, ms", "compensated, ms", "× as it is, of the least")

SORTED_HEADERS = ("rule", "W", "inputs", "mean, ms", "median, ms", "× mean", "trimmed by 1, ms", "× mean")

SLICE_ELEMS = 1 << 20

NUM_SLOTS, NUM_SLOTS_QUICK = 24, 8
"""Slices of 4 MiB: 25 M and 8 M parameters. More than the last-level cache holds, with their gradients."""

SLOTS_PER_TURN = 4
"""Few, so that the contestants take turns often: what else the machine does then slows all alike."""

PARTS = ("workers", "inputs", "threads", "small", "encoders", "sorted", "compensated")

MEDIAN, TRIMMED = "median", "trimmed by 1"

COMPENSATED = "compensated"

CHARTED = ("workers", "inputs", "threads")

INPUTS = tuple(name for name in READS if name != "float32")


def tasks(part: str, quick: bool) -> list[Task]:
    axes = {
        "workers": [(num_workers, "float32", 1) for num_workers in (1, 2, 4, 8)],
        "inputs": [(num_workers, inputs, 1) for inputs in INPUTS for num_workers in (2, 4, 8)],
        "threads": [(num_workers, "float32", 2) for num_workers in (1, 2, 4, 8)],
    }[part]
    return [
        Task(case, num_workers, inputs, num_threads, NUM_SLOTS_QUICK if quick else NUM_SLOTS, SLICE_ELEMS)
        for num_workers, inputs, num_threads in axes
        for case in CASES
    ]


def small_tasks(quick: bool) -> list[SmallTask]:
    return [
        SmallTask(case, num_workers, 10_000, num_elems)
        for num_elems in ((256,) if quick else (256, 1024))
        for num_workers in ((4,) if quick else (1, 4))
        for case in CASES
    ]


def sorted_tasks() -> list[Task]:
    return [
        Task(CASES[0], num_workers, inputs, 1, NUM_SLOTS_QUICK, SLICE_ELEMS)
        for inputs in ("float32", "int8")
        for num_workers in (4, 8, 16)
    ]


def compensated_tasks() -> list[Task]:
    return [Task(case, 1, inputs, 1, NUM_SLOTS_QUICK, SLICE_ELEMS) for inputs in ("float32", "int8") for case in CASES]


TITLES = {
    "workers": "Sum of W gradients and a step",
    "inputs": "The same of gradients in fewer bytes",
    "threads": "The same with two threads",
    "small": "The same of 10,000 small slices: a shard's apply, torch over a list",
    "encoders": "A gradient encoded",
    "sorted": "The median and the trimmed mean of W gradients, and a step",
    "compensated": "A gradient that is compensated, and a step",
}


def walk(task: Task, work: Work, *, first_slot: int, pool: ThreadPoolExecutor | None) -> Turn:
    """A turn is a step on the next SLOTS_PER_TURN slices; with a pool each of two threads takes half of them."""
    turns = itertools.count(first_slot, SLOTS_PER_TURN)

    def steps(slots: Sequence[int]) -> None:
        for slot in slots:
            work(slot)

    def turn() -> None:
        begin = next(turns)
        slots = [slot % task.num_slots for slot in range(begin, begin + SLOTS_PER_TURN)]
        if pool is None:
            return steps(slots)
        for done in [pool.submit(steps, half) for half in (slots[::2], slots[1::2])]:
            done.result()
        return None

    return turn


def measure(task: Task, *, rounds: int) -> dict[str, Series]:
    torch.set_num_threads(task.num_threads)  # torch's own threads; the others get Python's
    works = {
        OURS: core_work(task, task.arrays()),
        FUSED: torch_work(task, task.arrays(), fused=True),
        FOREACH: torch_work(task, task.arrays(), fused=False),
    }
    if shutil.which("cc"):
        works[LIMIT] = plain_work(task)
    if task.inputs == "float32" and task.num_threads == 1:
        works[NUMPY] = numpy_work(task, task.arrays())
    with ThreadPoolExecutor(2) as threads:
        # Nobody begins where another has just been.
        turns = {
            name: walk(
                task,
                work,
                first_slot=SLOTS_PER_TURN * number,
                pool=threads if task.num_threads == 2 and name in (OURS, LIMIT) else None,
            )
            for number, (name, work) in enumerate(works.items())
        }
        return alternate(turns, warm_up=6, rounds=rounds, progress=str(task))


def measure_small(task: SmallTask, *, rounds: int) -> dict[str, Series]:
    torch.set_num_threads(1)
    turns = {
        OURS: shard_turn(task),
        FUSED: torch_turn(task, fused=True),
        FOREACH: torch_turn(task, fused=False),
    }
    return alternate(turns, warm_up=1, rounds=rounds, progress=str(task))


def measure_sorted(task: Task, *, rounds: int) -> dict[str, Series]:
    works = {
        OURS: core_work(task, task.arrays()),
        MEDIAN: core_work(task, task.arrays(), dropped=(task.num_workers - 1) // 2),
        TRIMMED: core_work(task, task.arrays(), dropped=1),
    }
    turns = {
        name: walk(task, work, first_slot=SLOTS_PER_TURN * number, pool=None)
        for number, (name, work) in enumerate(works.items())
    }
    return alternate(turns, warm_up=1, rounds=rounds, progress=str(task))


def measure_compensated(task: Task, *, rounds: int) -> dict[str, Series]:
    works = {
        OURS: core_work(task, task.arrays()),
        COMPENSATED: core_work(task, task.arrays(), bases=task.arrays(0.25)),
    }
    turns = {
        name: walk(task, work, first_slot=SLOTS_PER_TURN * number, pool=None)
        for number, (name, work) in enumerate(works.items())
    }
    return alternate(turns, warm_up=1, rounds=rounds, progress=str(task))


def times_as_fast(found: dict[str, Series], other: str) -> float | None:
    return found[other].median / found[OURS].median if other in found else None


def row(task: Task, found: dict[str, Series]) -> list[Cell]:
    num_bytes = task.bytes_per_parameter * SLOTS_PER_TURN * task.num_elems
    return [
        str(task.case),
        str(task.num_workers),
        task.inputs,
        str(task.num_threads),
        f"{task.bytes_per_parameter:g}",
        rates(found[OURS], num_bytes),
        num_bytes / found[LIMIT].median / 1e9 if LIMIT in found else None,
        *(times_as_fast(found, other) for other in (LIMIT, FUSED, FOREACH, NUMPY)),
        found[OURS].cpu_s_per_gb(num_bytes),
    ]


def small_row(task: SmallTask, found: dict[str, Series]) -> list[Cell]:
    return [
        str(task.case),
        str(task.num_workers),
        f"{4 * task.num_elems >> 10} KiB",
        milliseconds(found[OURS]),
        *(times_as_fast(found, other) for other in (FUSED, FOREACH)),
        found[OURS].cpu_s_per_gb(task.num_bytes),
    ]


def sorted_row(task: Task, found: dict[str, Series]) -> list[Cell]:
    mean, median, trimmed = found[OURS], found[MEDIAN], found[TRIMMED]
    return [
        str(task.case),
        str(task.num_workers),
        task.inputs,
        milliseconds(mean),
        milliseconds(median),
        median.median / mean.median,
        milliseconds(trimmed),
        trimmed.median / mean.median,
    ]


def compensated_row(task: Task, found: dict[str, Series]) -> list[Cell]:
    plain, compensated = found[OURS], found[COMPENSATED]
    return [
        str(task.case),
        task.inputs,
        milliseconds(plain),
        milliseconds(compensated),
        compensated.min / plain.min,  # what others do on the machine is in every median
    ]


def summary_row(what: str, found: dict[str, Series]) -> list[Cell]:
    peers = [series.median for name, series in found.items() if name not in (OURS, LIMIT)]
    ours = found[OURS].median
    limit = found[LIMIT].median if LIMIT in found else None
    return ["kernels", what, f"{1e3 * ours:.1f} ms", limit and ours / limit, ours / min(peers)]


def _of_four(cases: Sequence[Named]) -> list[Named]:
    return [one for one in cases if "W = 4" in one[0]]


def chart(name: str, title: str, groups: Sequence[Named]) -> Chart:
    series = {group: {contestant: 1e3 * one.median for contestant, one in found.items()} for group, found in groups}
    return Chart(name=name, title=title, unit="ms", series=series)


def measured_part(part: str, quick: bool) -> tuple[Table, list[Named]]:
    rounds = 6 if quick else 30
    if part == "small":
        small = [(task, measure_small(task, rounds=max(2, rounds // 6))) for task in small_tasks(quick)]
        return Table(TITLES[part], SMALL_HEADERS, [small_row(*one) for one in small]), _named(small)
    if part == "encoders":
        each = encoders.tasks(NUM_SLOTS_QUICK, SLICE_ELEMS)
        encoded = [(task, encoders.measure(task, rounds=8 * rounds)) for task in each]
        return Table(TITLES[part], encoders.HEADERS, [encoders.row(*one) for one in encoded]), _named(encoded)
    if part == "sorted":
        by_sorting = [(task, measure_sorted(task, rounds=rounds)) for task in sorted_tasks()]
        return Table(TITLES[part], SORTED_HEADERS, [sorted_row(*one) for one in by_sorting]), [
            (f"{task.inputs} of {task.num_workers} workers, sorted", series) for task, series in by_sorting
        ]
    if part == "compensated":
        made_up = [(task, measure_compensated(task, rounds=rounds)) for task in compensated_tasks()]
        return Table(TITLES[part], COMPENSATED_HEADERS, [compensated_row(*one) for one in made_up]), [
            (f"{task}, compensated", series) for task, series in made_up
        ]
    found = [(task, measure(task, rounds=rounds)) for task in tasks(part, quick)]
    return Table(TITLES[part], HEADERS, [row(*one) for one in found]), _named(found)


def _named(found: Sequence[tuple[object, dict[str, Series]]]) -> list[Named]:
    return [(str(task), series) for task, series in found]


def measured(options: argparse.Namespace) -> Report:
    found = {part: measured_part(part, options.quick) for part in options.part or PARTS}
    cases = [one for _, named in found.values() for one in named]
    charted = {part: named for part, (_, named) in found.items() if part in CHARTED}
    return Report(
        subject="kernels",
        about=(__doc__ or "").partition("\n")[0],
        tables=[table for table, _ in found.values()],
        notes=[] if shutil.which("cc") else ["no limit: plain_loop.c needs a C compiler, `cc`"],
        charts=[
            chart(part, TITLES[part], _of_four(named) if part == "inputs" else named) for part, named in charted.items()
        ],
        figures=[
            {"title": title, "name": name, "times_s": series.times_s}
            for title, one in cases
            for name, series in one.items()
        ],
        summary=[summary_row(*one) for one in _of_four(cases) if "2 threads" not in one[0]],
        machine={"instruction set": _core.instruction_sets()[0], **machine("torch")},
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given several times)")


SUBJECT = Subject("kernels", "the pass that sums gradients and steps", measured, add_options, isolated=False)


if __name__ == "__main__":
    run(SUBJECT)
