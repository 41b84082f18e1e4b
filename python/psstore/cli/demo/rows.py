"""`psstore demo --rows`: a small recommender learns clicks, with its embedding tables in a real store, in front of the
user. The command's side is first, and then the worker's, which is started by

python -m psstore.cli.demo.rows SETTINGS-AS-JSON
"""

from __future__ import annotations

import os
import sys
import time

import msgspec
import torch
from rich.console import Console
from rich.panel import Panel

import psstore
from psstore.cli.demo import training
from psstore.cli.demo.display import SPARK_WIDTH, LiveLines, done, sparkline
from psstore.cli.demo.dlrm import DIM, TABLES, ClickLog, Dlrm, auc
from psstore.cli.demo.messages import RowsProgress, emit, parse
from psstore.cli.demo.reporter import REPORT_S
from psstore.client.store import Store
from psstore.launch.environment import find_gpus
from psstore.launch.job import Job
from psstore.launch.output import Line
from psstore.text import counted
from psstore.torch import DistributedOptimizer, EmbeddingBag
from psstore.types import Consistency

STEPS = 600

SAMPLES = 512
"""In a step of all workers together."""

NUM_MEASURES = SPARK_WIDTH
"""How often rank 0 measures the AUC."""


class RowsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as each worker gets it."""

    samples: int
    """In a worker's batch."""
    steps: int
    seed: int


class RowsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as it is shown and as `--json` prints it."""

    shards: int
    workers: int
    steps: int
    seed: int
    auc: float
    """Measured on samples that nobody trained on."""
    rows_per_s: float
    """Looked up and trained by all workers together."""
    rows: int
    """That the tables have in the end: those that some batch had."""
    bytes_pushed: int
    bytes_pulled: int
    seconds: float
    """From the start of the first process to the end of the last worker."""


def train_rows(console: Console, *, shards: int, workers: int, seed: int, steps: int = STEPS) -> RowsReport:
    """Ends the command if the training fails."""
    settings = RowsSettings(samples=max(1, SAMPLES // workers), steps=steps, seed=seed)
    job = Job(
        command=[sys.executable, "-u", "-m", "psstore.cli.demo.rows", msgspec.json.encode(settings).decode()],
        num_shards=shards,
        consistency=Consistency.of_mode("sync", num_workers=workers),
        environ=os.environ,
        gpus=find_gpus(os.environ),
    )
    began = time.perf_counter()
    display = RowsDisplay(console, num_shards=shards, num_workers=workers)
    training.train(job, display)
    last = display.last.values()
    return RowsReport(
        shards=shards,
        workers=workers,
        steps=steps,
        seed=seed,
        auc=display.aucs[-1],
        rows_per_s=round(sum(one.rows_per_s for one in last), 1),
        rows=max(one.rows for one in last),
        bytes_pushed=sum(one.bytes_pushed for one in last),
        bytes_pulled=sum(one.bytes_pulled for one in last),
        seconds=round(time.perf_counter() - began, 2),
    )


class RowsDisplay(LiveLines):
    """Shows the training: a line for each worker in a terminal, one for each measure of the AUC elsewhere."""

    def __init__(self, console: Console, *, num_shards: int, num_workers: int) -> None:
        super().__init__(
            console,
            title=(
                f"[bold]psstore demo --rows[/] · {counted(num_shards, 'shard')} · {counted(num_workers, 'worker')} · "
                f"{len(TABLES)} tables, clicks made by a seeded generator"
            ),
            of="worker",
            num_processes=num_workers,
        )
        self.last: dict[int, RowsProgress] = {}
        """What each worker told last."""
        self.aucs: list[float] = []

    def deliver(self, line: Line) -> None:
        event = None if line.is_error else parse(line.text)
        if isinstance(event, RowsProgress):
            self._show(event)
        else:
            self._pass_on(line)

    def _show(self, event: RowsProgress) -> None:
        self.last[event.rank] = event
        if event.auc is not None:
            self.aucs.append(event.auc)
        rows_per_s = f"{event.rows_per_s:>9,.0f} rows/s"
        measured = (
            f"  AUC {self.aucs[-1]:.3f} [green]{sparkline(self.aucs)}[/]" if event.rank == 0 and self.aucs else ""
        )
        self._progress.update(
            self._tasks[event.rank],
            total=event.steps,
            completed=event.step,
            status=f"loss {event.loss:.3f} {rows_per_s}{measured}",
        )
        if not self._console.is_terminal and event.auc is not None:
            self._print(
                f"step {event.step}/{event.steps}  loss {event.loss:.3f}  AUC {event.auc:.3f}"
                f"  {event.rows_per_s:,.0f} rows/s per worker"
            )


def rows_summary(report: RowsReport) -> Panel:
    return done(
        [
            ("AUC", f"[bold green]{report.auc:.3f}[/] of samples not trained on; 0.5 is chance"),
            ("rows/s", f"{report.rows_per_s:,.0f} looked up and trained, over all workers"),
            ("rows", f"{report.rows:,} of {DIM} in {len(TABLES)} tables, which began empty"),
            ("sent, received", f"{report.bytes_pushed / 1e6:,.1f} MB, {report.bytes_pulled / 1e6:,.1f} MB"),
            ("time", f"{report.seconds:.1f} s"),
        ]
    )


# ---- the worker ----


def train(store: Store, settings: RowsSettings) -> None:
    rank = store.rank
    assert rank is not None, "a store is joined as a worker unless it is told otherwise"
    log = ClickLog(settings.seed)
    tables = [
        EmbeddingBag(name, DIM, store, mode="sum", rule="adagrad", init="normal(0, 0.1)", seed=settings.seed, lr=0.1)
        for name in TABLES
    ]
    model = Dlrm(tables, seed=settings.seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, store, model.named_parameters(), tables=tables)
    test = log.test()
    batch = log.batch(0, samples=settings.samples, rank=rank)
    store.barrier("start")
    began = reported = time.perf_counter()
    num_rows = 0
    for step in range(1, settings.steps + 1):
        num_rows += batch.num_rows
        optimizer.zero_grad()
        loss = model.loss(batch)
        batch = log.batch(step, samples=settings.samples, rank=rank)
        for table, ids in zip(tables, batch.ids, strict=True):
            table.prefetch(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        now, is_last = time.perf_counter(), step == settings.steps
        is_measured = rank == 0 and (is_last or step % -(-settings.steps // NUM_MEASURES) == 0)
        if is_measured or is_last or now - reported >= REPORT_S:
            reported = now
            emit(
                RowsProgress(
                    rank=rank,
                    step=step,
                    steps=settings.steps,
                    loss=loss.item(),
                    rows_per_s=num_rows / (now - began),
                    auc=auc(model, test) if is_measured else None,
                    rows=sum(int(one["rows"]) for one in store.stats()) if is_last else 0,
                    bytes_pushed=store.bytes_pushed,
                    bytes_pulled=store.bytes_pulled,
                )
            )
    store.barrier("end")


def main() -> None:
    torch.set_num_threads(1)
    with psstore.connect() as store:
        train(store, msgspec.json.decode(sys.argv[1], type=RowsSettings))


if __name__ == "__main__":
    main()
