"""What checkpoints that have what changed of a table cost and gain beside whole ones: the marks that say what changed,
writing, and starting a store with one.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

import psstore
from bench.comparison import milliseconds
from bench.cuts_found import Found
from bench.cuts_rows import RowCase, RowTrainer
from bench.harness import Took, Turn, alternate, cpu_seconds, process_tree, timed
from bench.processes import store_server
from bench.report import Cell
from bench.row_work import DIM, FILLED_TOGETHER, HYPERS, NUM_SETS, Ids, fill
from psstore.checkpoint.place import open_checkpoint
from psstore.checkpoint.url import folder_of

SHARDS = 2
NOTES, DOES_NOT = "--full-every 10", "--full-every 1"
WHOLE, EMPTY = "whole", "an empty store"
SHARES = (0.01, 0.1)
"""Of the rows, how many have changed since the base when a delta is written: each in turn."""


def delta_after(share: float) -> str:
    return f"delta, {share:.0%} of the rows changed"


def started(what: str) -> str:
    return f"{what}, started"


@contextlib.contextmanager
def keeping_store(place: str, *, full_every: int, keep: int = 3) -> Iterator[str]:
    """The URL of a store that writes checkpoints when it is asked to."""
    options = ["--checkpoint", place, "--checkpoint-every", "1000000s", "--full-every", str(full_every)]
    options += ["--keep", str(keep)]
    with store_server("unix", SHARDS, options=options) as url:
        yield url


# ---- marks ----


def marks(case: RowCase, *, rounds: int) -> Found:
    """Steps of a store that notes which rows change, and of one that does not. Nothing is written meanwhile."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        trainers = {}
        for who, full_every in ((DOES_NOT, 1), (NOTES, 10)):
            url = ends.enter_context(keeping_store(f"{folder}/{full_every}", full_every=full_every))
            trainers[who] = RowTrainer(ends.enter_context(psstore.connect(url, rank=0)), case)
            trainers[who].create()
        turns: dict[str, Turn] = {who: partial(_one_step, trainer) for who, trainer in trainers.items()}
        series = alternate(turns, warm_up=1, rounds=rounds, turns=NUM_SETS, progress="marks")
        noted_bytes = {
            who: sum(int(shard["published_bytes"]) for shard in trainer.store.stats())
            for who, trainer in trainers.items()
        }
    more = {f"{who}, bytes a row": num_bytes / case.num_rows for who, num_bytes in noted_bytes.items()}
    return Found("marks", str(case), series, more)


def _one_step(trainer: RowTrainer) -> None:
    trainer.step()


def marks_rows(one: Found) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for who, name in ((DOES_NOT, DOES_NOT), (NOTES, f"**{NOTES}**")):
        ratios = [None, None] if who == DOES_NOT else [one.ratio(who, DOES_NOT), one.cpu_ratio(who, DOES_NOT)]
        rows.append([f"{one.title}, {name}", milliseconds(one.series[who]), *ratios, one.more[f"{who}, bytes a row"]])
    return rows


# ---- deltas ----


def deltas(case: RowCase, where: str, parent: Path | None, *, rounds: int) -> Found:
    """Writing a whole checkpoint and, of it, deltas after so many rows have changed; and starting a store with each."""
    with tempfile.TemporaryDirectory(dir=parent) as folder, contextlib.ExitStack() as ends:
        place = Path(folder) / "place"
        url = ends.enter_context(keeping_store(str(place), full_every=1 + len(SHARES)))
        store = ends.enter_context(psstore.connect(url, rank=0))
        fill(store, num_rows=case.num_rows)
        written = _Written(store, place, case)
        turns: dict[str, Turn] = {EMPTY: _start}
        for what, ids in written.changes.items():
            turns[what] = partial(written.write, what, ids)
            turns[started(what)] = partial(written.start, what)
        series = alternate(turns, warm_up=1, rounds=rounds, progress=f"deltas, {where}")
    return Found("deltas", f"{case.num_rows:,} rows × {DIM}, {where}", series, written.sizes)


class _Written:
    """What a store writes at a place, turn by turn."""

    def __init__(self, store: psstore.Store, place: Path, case: RowCase) -> None:
        self._store = store
        self._place = place
        self._case = case
        self._versions: dict[str, int] = {}
        order = np.random.default_rng(3).permutation(case.num_rows).astype(np.uint64)
        bounds = [0, *(int(share * case.num_rows) for share in SHARES)]
        self.changes: dict[str, Ids] = {WHOLE: order[:1]}  # without a decision in between nothing would be written
        """By what is written: ids of rows that change before it is, each one in each round once."""
        for share, begin, end in zip(SHARES, bounds, bounds[1:], strict=False):
            self.changes[delta_after(share)] = order[begin:end]
        self.sizes: dict[str, float] = {}

    def write(self, what: str, ids: Ids) -> Took:
        if what == WHOLE:  # so that nobody has to remove files beside what is timed
            for version in self._versions.values():
                shutil.rmtree(self._place / folder_of(version))
        for first in range(0, len(ids), FILLED_TOGETHER):
            some = ids[first : first + FILLED_TOGETHER]
            self._store.push_rows("t", some, np.ones((len(some), DIM), np.float32))
            self._store.commit(HYPERS)
        processes = process_tree()
        cpu_before = cpu_seconds(processes)
        took = timed(lambda: self._versions.update({what: self._store.checkpoint()}))
        took = Took(took.seconds, cpu_seconds(processes) - cpu_before)
        with open_checkpoint(self._url(what)) as checkpoint:
            assert (checkpoint.manifest.base is None) == (what == WHOLE)
            changed = sum(sum((shard.changed or {}).values()) for shard in checkpoint.shards)
            self.sizes[f"{what}, bytes"] = checkpoint.manifest.num_bytes
            self.sizes[f"{what}, share of rows"] = 1.0 if what == WHOLE else changed / self._case.num_rows
        return took

    def start(self, what: str) -> Took:
        return _start("--restore", self._url(what))

    def _url(self, what: str) -> str:
        return f"{self._place}@{self._versions[what]}"


def _start(*options: str) -> Took:
    """A store, until it is ready."""
    with contextlib.ExitStack() as ends:
        cpu_before = cpu_seconds(process_tree())
        took = timed(lambda: ends.enter_context(store_server("unix", SHARDS, options=options)))
        return Took(took.seconds, cpu_seconds(process_tree()) - cpu_before)


def deltas_rows(one: Found) -> list[list[Cell]]:
    empty = one.series[EMPTY]
    rows: list[list[Cell]] = [[f"{one.title}, {EMPTY}", *[None] * 6, empty.median, None, None]]
    whole = one.series[started(WHOLE)]
    for what in written_by(one):
        ours = one.series[started(what)]
        row: list[Cell] = [what if what == WHOLE else f"**{what}**", 100 * one.more[f"{what}, share of rows"]]
        row += [1e-6 * one.more[f"{what}, bytes"], one.more[f"{what}, bytes"] / one.more[f"{WHOLE}, bytes"]]
        row += [one.series[what].median, one.ratio(what, WHOLE), one.cpu_ratio(what, WHOLE), ours.median]
        row += [(ours.median - empty.median) / (whole.median - empty.median)]
        row += [(ours.cpu_s - empty.cpu_s) / (whole.cpu_s - empty.cpu_s)]
        rows.append(row)
    return rows


def written_by(one: Found) -> Sequence[str]:
    return [what for what in one.series if f"{what}, bytes" in one.more]
