"""What consistent reads and checkpoints of a running store cost who reads, and who trains meanwhile.

    python -m bench.cuts [--quick] [--megabytes M] [--part PART] [--json FILE]

Two shards and one worker, Adam. Who reads or writes beside a trainer, and who trains beside a reader, is a process of
its own. The parts:

reading     pull_many(consistent=True) beside a plain pull_many of the same client, by turns: while nobody trains, and
            while the worker takes step after step without a pause, which is the hardest case.
readers     Steps beside clients that read all tensors READS_PER_S times a second each, as one that serves the newest
            weights may. The limit is as many clients whose pulls are plain. The model is a sixteenth of the large one:
            16 readers of 64 MiB would ask for 5 GB/s, more than two cores copy, and nothing else would be measured.
            A turn's figure is the mean of its steps, since few of them meet a reader.
writing     Steps while a checkpoint is written, to disk and to memory, of the model and of a table of rows. The limit
            is another process that writes as many bytes to one file by plain calls of the system, with one fsync. Of
            the table a delta of what was just written is written, too.
marks       Steps on the table in a store that notes which rows change, beside those in one that does not.
deltas      Writing a whole checkpoint of the table, and deltas of it after any 1 % and 10 % of its rows have changed;
            and starting a store with each of them, files being in the page cache. Nobody trains meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psstore
from bench.checkpoint import IN_MEMORY
from bench.checkpoint import PARTS as PARTS_OF_ADAM
from bench.command import Subject, run
from bench.comparison import milliseconds
from bench.cuts_deltas import DOES_NOT as NOTES_NOTHING
from bench.cuts_deltas import (
    NOTES,
    SHARDS,
    SHARES,
    WHOLE,
    delta_after,
    deltas,
    deltas_rows,
    keeping_store,
    marks,
    marks_rows,
    started,
)
from bench.cuts_found import Found
from bench.cuts_rows import RowCase, RowTrainer
from bench.cuts_user import ALONE, CHECKPOINT, DELTA, FIRST_STEPS, PLAIN_CALLS, Case, Trainer, Writing, aside, user
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.processes import preload, store_server
from bench.report import Cell, Report, Table, three_digits
from bench.row_work import NUM_ROWS

SMALL = Case(20, 4096)
ROWS = RowCase(NUM_ROWS, 4096)
TRANSPORTS = ("unix", "tcp", "shm")
READERS = (1, 16)
READS_PER_S = 5
PLAIN, CONSISTENT = "plain", "consistent"


# ---- reading ----


def reading(case: Case, transport: str, *, trains: bool, rounds: int, turns: int) -> Found:
    """`turns`: pulls of a turn."""
    with (
        store_server("tcp" if transport == "tcp" else "unix", SHARDS) as url,
        aside(url, case, rank=0, transport=transport) as trainer,
        user(url, case, transport=transport) as reader,
    ):
        trainer.once("create")
        if trains:
            trainer.begin("step", every_s=0.0)
        title = f"{case}, {transport}, {'a worker trains' if trains else 'nobody trains'}"
        contestants: dict[str, Turn] = {PLAIN: reader.plain, CONSISTENT: reader.consistent}
        series = alternate(contestants, warm_up=1, rounds=rounds, turns=turns, progress=title)
        if trains:
            trainer.tell_end()
        return Found("reading", title, series)


def _reading_rows(one: Found) -> list[list[Cell]]:
    times = [milliseconds(one.series[name]) for name in (PLAIN, CONSISTENT)]
    return [[one.title, *times, one.ratio(CONSISTENT, PLAIN)]]


# ---- readers ----


def readers(case: Case, *, rounds: int, block_s: float) -> Found:
    """`block_s`: how long a turn is."""
    with store_server("unix", SHARDS) as url, contextlib.ExitStack() as ends:
        trainer = ends.enter_context(user(url, case, rank=0))
        trainer.create()
        others = [ends.enter_context(aside(url, case)) for _ in range(max(READERS))]
        reads_per_s: dict[str, float] = {}

        def turn(count: int, what: str) -> float:
            for number, one in enumerate(others[:count]):
                one.begin(what, every_s=1 / READS_PER_S, after_s=(number + 0.5) / count / READS_PER_S)
            taken = trainer.steps(block_s)
            for one in others[:count]:
                one.tell_end()
            reads_per_s[beside(count, what)] = sum(one.done().times for one in others[:count]) / block_s
            return statistics.fmean(step.seconds for step in taken)

        turns: dict[str, Turn] = {ALONE: partial(turn, 0, "")}
        for count in READERS:
            turns |= {beside(count, what): partial(turn, count, what) for what in (PLAIN, CONSISTENT)}
        series = alternate(turns, warm_up=1, rounds=rounds, progress="readers")
        return Found("readers", str(case), series, {f"{who}, reads/s": rate for who, rate in reads_per_s.items()})


def beside(count: int, what: str) -> str:
    return f"{count} {what} reader{'s' if count > 1 else ''}"


def _readers_rows(one: Found) -> list[list[Cell]]:
    rows: list[list[Cell]] = [[f"{one.title}, {ALONE}", milliseconds(one.series[ALONE]), None, None, None]]
    for count in READERS:
        plain, ours = (beside(count, what) for what in (PLAIN, CONSISTENT))
        for who, than in ((plain, None), (ours, one.ratio(ours, plain))):
            times = milliseconds(one.series[who])
            rows.append([who if than is None else f"**{who}**", times, one.ratio(who, ALONE), than])
            rows[-1].append(one.more[f"{who}, reads/s"])
    return rows


# ---- writing ----


@contextlib.contextmanager
def trainer_of(url: str, case: Case | RowCase) -> Iterator[Trainer]:
    if isinstance(case, Case):
        with user(url, case, rank=0) as trainer:
            yield trainer
    else:
        with psstore.connect(url, rank=0) as store:
            yield RowTrainer(store, case)


def writing(case: Case | RowCase, where: str, parent: Path | None, *, rounds: int, block_s: float) -> Found:
    with tempfile.TemporaryDirectory(dir=parent) as name, contextlib.ExitStack() as ends:
        full_every = 2 if isinstance(case, RowCase) else 1
        url = ends.enter_context(keeping_store(f"{name}/place", full_every=full_every, keep=1))
        trainer = ends.enter_context(trainer_of(url, case))
        trainer.create()
        writer = ends.enter_context(aside(url, Case(1, case.written_bytes // PARTS_OF_ADAM // 4 * 4)))
        writer.once("make_written")
        found = Writing(trainer, writer, block_s=block_s)
        turns: dict[str, Turn] = {
            ALONE: found.alone,
            CHECKPOINT: found.checkpoint,
            PLAIN_CALLS: partial(found.plain_calls, Path(name) / "plain"),
        }
        if isinstance(case, RowCase):
            turns[DELTA] = found.delta
        took = alternate(turns, warm_up=1, rounds=rounds, progress=f"writing, {where}")
    steps = {who: [step for turn in taken[1:] for step in turn] for who, taken in found.turns.items()}
    series = {who: Series(tuple(step.seconds for step in taken), ()) for who, taken in steps.items()}
    series |= {written(who): took[who] for who in turns if who != ALONE}
    more = {f"{who}, kept": found.kept_bytes[who] / case.written_bytes for who in turns if who != ALONE}
    for who, turns_of_it in found.first.items():
        for part, what in enumerate(("held", "commit held")):
            longest_s = [max(step[part] for step in first) for first in turns_of_it[1:] if first]
            held_s = statistics.median(longest_s) - statistics.median(step[part] for step in steps[ALONE])
            more[f"{who}, {what}, ms/GB"] = 1e12 * held_s / case.written_bytes
    return Found("writing", f"{case}, {where}", series, more)


def written(what: str) -> str:
    return f"{what}, written"


def _writing_rows(one: Found) -> list[list[Cell]]:
    rows: list[list[Cell]] = [
        [f"{one.title}, {ALONE}", milliseconds(one.series[ALONE]), None, one.tail(ALONE), *[None] * 5]
    ]
    for who in (PLAIN_CALLS, CHECKPOINT, DELTA):
        if who not in one.series:
            continue
        only_ours: list[Cell] = [one.ratio(written(who), written(PLAIN_CALLS)), one.more[f"{who}, kept"]]
        is_ours = who != PLAIN_CALLS
        rows.append([f"**{who}**" if is_ours else who, milliseconds(one.series[who])])
        rows[-1] += [one.ratio(who, ALONE), one.tail(who), one.series[written(who)].median]
        rows[-1] += only_ours if is_ours else [None, None]
        rows[-1] += [one.more[f"{who}, {what}, ms/GB"] for what in ("held", "commit held")]
    return rows


# ---- all ----

TIMES = "ms: median (min–max)"
ABOVE_EMPTY = ("more than empty, × whole", "CPU likewise")
PARTS: Mapping[str, tuple[Sequence[str], Callable[[Found], list[list[Cell]]], Callable[[], list[tuple[str, str]]]]] = {
    "reading": (
        ("what", f"plain, {TIMES}", f"consistent, {TIMES}", "× plain"),
        _reading_rows,
        lambda: [(CONSISTENT, PLAIN)],
    ),
    "readers": (
        ("a step", TIMES, "× alone", "× plain readers", "reads a second"),
        _readers_rows,
        lambda: [(beside(count, CONSISTENT), beside(count, PLAIN)) for count in READERS],
    ),
    "writing": (
        ("a step", TIMES, "× alone", "p99 × alone", "s to write", "× plain calls", "kept", "held", "commit held"),
        _writing_rows,
        lambda: [(CHECKPOINT, PLAIN_CALLS), (written(CHECKPOINT), written(PLAIN_CALLS))],
    ),
    "marks": (
        ("a step", TIMES, "× without", "CPU × without", "bytes a row"),
        marks_rows,
        lambda: [(NOTES, NOTES_NOTHING)],
    ),
    "deltas": (
        ("what", "% of rows", "MB", "× whole", "s to write", "× whole", "CPU × whole", "s to start", *ABOVE_EMPTY),
        deltas_rows,
        lambda: [(of(delta_after(share)), of(WHOLE)) for share in SHARES for of in (str, started)],
    ),
}
"""Headers and rows of each part's table, and who is held against whom in the table of all subjects."""


def measure(chosen: argparse.Namespace) -> Report:
    preload("psstore", "numpy", "bench.cuts_user")
    large = Case(16, chosen.megabytes << 16)
    rounds, block_s = (3, 0.3) if chosen.quick else (15, 1.0)
    found: list[Found] = []
    for part in chosen.part or PARTS:
        if part == "reading":
            for case, turns in ((SMALL, 20), (large, 3)):
                for transport in TRANSPORTS:
                    for trains in (False, True):
                        found.append(reading(case, transport, trains=trains, rounds=rounds, turns=turns))
        elif part == "readers":
            found.append(readers(Case(16, large.tensor_bytes // 16), rounds=3 * rounds, block_s=3 / READS_PER_S))
        elif part == "marks":
            found.append(marks(ROWS, rounds=rounds))
        elif part == "deltas":
            for where, folder in (("disk", None), ("memory", IN_MEMORY)):
                found.append(deltas(ROWS, where, folder, rounds=rounds))
        else:
            for where, folder in (("disk", None), ("memory", IN_MEMORY)):
                found += [writing(case, where, folder, rounds=rounds, block_s=block_s) for case in (large, ROWS)]
    return report(found)


def report(found: Sequence[Found]) -> Report:
    tables = [
        Table(part, headers, [row for one in found if one.part == part for row in rows(one)])
        for part, (headers, rows, _) in PARTS.items()
        if any(one.part == part for one in found)
    ]
    return Report(
        subject="cuts",
        about=(
            "What it costs to read all of a store at one version, and to write its checkpoint, while it trains: two"
            f" shards, one worker, Adam. Readers read all of it {READS_PER_S} times a second each, over what a client"
            " on one host uses by itself; a turn's figure is the mean of its steps. Plain readers, and another process"
            " that writes as many bytes by plain calls and fsync, are limits. Kept: the most that shards kept beside"
            f" the values, as a share of the checkpoint. Held: the longest of {FIRST_STEPS} steps around the beginning"
            " of the writing minus the usual one, and of their commits likewise, in ms per GB that is written;"
            " of a delta, that a whole one has. Tables have Adagrad. % of rows: those whose records are written."
        ),
        tables=tables,
        figures=[figure for one in found for figure in one.figures],
        summary=[
            ["cuts", f"{one.part}, {one.title}: {who}", _ms(one, who), one.ratio(who, than), None]
            for one in found
            for who, than in PARTS[one.part][2]()
        ],
        machine=machine(),
    )


def _ms(one: Found, who: str) -> str:
    return f"{three_digits(1e3 * one.series[who].median)} ms"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=64, metavar="M", help="of the large model's values, in MiB")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")


SUBJECT = Subject("cuts", __doc__.splitlines()[0], measure, add_options)

if __name__ == "__main__":
    run(SUBJECT)
