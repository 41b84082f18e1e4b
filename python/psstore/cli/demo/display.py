"""Shows the demo while it runs and when it is done: live in a terminal, line by line elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from psstore.cli.demo.messages import ChaosReport, CrashReport, Report, WorkerBegan, WorkerProgress, WorkerResult, parse
from psstore.launch.output import Line
from psstore.text import counted

L = TypeVar("L", bound="LiveLines")

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 12

MAX_LINES = 20
"""About epochs, outside a terminal."""

BAR_WIDTH = 24
STATUS_WIDTH = 73
"""Columns that a worker's line takes beside its bar, which gets what is left, up to BAR_WIDTH."""


def sparkline(values: Sequence[float]) -> str:
    """A curve of block characters, from the smallest value to the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


class Curve:
    """Losses over the whole training, averaged into as many points as fit."""

    def __init__(self) -> None:
        self._points: dict[int, deque[float]] = {}

    def add(self, done: float, loss: float) -> None:
        """`done`: how much of the training, from 0 to 1."""
        place = min(int(done * SPARK_WIDTH), SPARK_WIDTH - 1)
        self._points.setdefault(place, deque(maxlen=32)).append(loss)

    def __str__(self) -> str:
        return sparkline([sum(point) / len(point) for _, point in sorted(self._points.items())])


class LiveLines(ABC):
    """A context manager: a bar and a status for each process that trains, in a terminal, under the title."""

    def __init__(
        self, console: Console, *, title: str, of: str, num_processes: int, bar_width: int = BAR_WIDTH
    ) -> None:
        """`of`: what one process is called, before its rank."""
        self._console = console
        self._title = title
        self._progress = Progress(
            TextColumn("[bold cyan]{task.description}"),
            BarColumn(bar_width=bar_width),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: list[TaskID] = [
            self._progress.add_task(f"{of} {rank}", total=None, status="[dim]starting …")
            for rank in range(num_processes)
        ]

    def __enter__(self: L) -> L:
        self._print(self._title)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @abstractmethod
    def deliver(self, line: Line) -> None:
        """Takes every line that the launcher reads."""

    def _pass_on(self, line: Line) -> None:
        """Shows one that is no event, unless the store says that all is well."""
        if line.is_error or line.source != "store":
            self._console.print(f"[{line.source}] {line.text.decode(errors='replace')}", markup=False, soft_wrap=True)

    def _print(self, line: str | Text) -> None:
        """As one line, however long: a traceback that is cut at 80 columns can't be read."""
        self._console.print(line, soft_wrap=True, highlight=False)


class Display(LiveLines):
    """Shows the training on digits.

    Args:
        how: the strategy, for people.
    """

    def __init__(self, console: Console, *, how: str, num_workers: int, dataset: str) -> None:
        super().__init__(
            console,
            title=f"[bold]psstore demo[/] · {how} · {counted(num_workers, 'worker')} · {dataset}",
            of="worker",
            num_processes=num_workers,
            bar_width=max(4, min(BAR_WIDTH, console.width - STATUS_WIDTH)),
        )
        self.results: dict[int, WorkerResult] = {}
        self.workers: dict[int, int] = {}
        """Process ids of those that train, by rank."""
        self.store: str | None = None
        """Address of the store that they train with."""
        self.round = 0
        """The last one that a worker told of."""
        self._curves = [Curve() for _ in range(num_workers)]
        self._next_epoch = 1
        """Whose end is the next to be told, outside a terminal."""

    def lose(self, process: int) -> None:
        """Notes that this process trains no more; another one may begin in its place."""
        self.workers = {rank: other for rank, other in self.workers.items() if other != process}

    def deliver(self, line: Line) -> None:
        event = None if line.is_error else parse(line.text)
        match event:
            case WorkerBegan():
                self.workers[event.rank], self.store = event.process, event.store
            case WorkerProgress():
                self._show(event)
            case WorkerResult():
                self.results[event.rank] = event
            case None if line.is_error or line.source != "store":
                self._print(Text.assemble((f"[{line.source}] ", "dim"), line.text.decode(errors="replace")))

    def _show(self, event: WorkerProgress) -> None:
        self.round = max(self.round, event.round)
        curve = self._curves[event.rank]
        curve.add(event.round / event.rounds, event.loss)
        self._progress.update(
            self._tasks[event.rank],
            total=event.rounds,
            completed=event.round,
            status=(
                f"epoch {event.epoch:>2}/{event.epochs}  loss {event.loss:.3f} [green]{curve!s:<{SPARK_WIDTH}}[/]"
                f" {event.images_per_s:>6,.0f} img/s  staleness {event.staleness}"
            ),
        )
        if not self._console.is_terminal and event.rank == 0 and event.epoch >= self._next_epoch:
            self._next_epoch = event.epoch + max(1, event.epochs // MAX_LINES)
            self._print(
                f"epoch {event.epoch}/{event.epochs}  loss {event.loss:.3f}  staleness {event.staleness}"
                f"  {event.images_per_s:,.0f} images/s per worker"
            )


def done(rows: Iterable[tuple[str, str]], *, colour: str = "green") -> Panel:
    """The result of a run, in a frame: what, and what it came to."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for what, result in rows:
        table.add_row(what, result)
    return Panel(table, title="done", title_align="left", border_style=colour, expand=False)


def summary(report: Report) -> Panel:
    good = "green" if report.accuracy >= 0.97 else "yellow"
    rows = [
        ("test accuracy", f"[bold {good}]{report.accuracy:.2%}[/] of {report.test_images:,} images not trained on"),
        ("images/s", f"{report.images_per_s:,.0f} over all workers"),
        ("sent, received", f"{_megabytes(report.bytes_pushed)}, {_megabytes(report.bytes_pulled)}"),
        ("staleness seen", f"at most {counted(report.max_staleness, 'round')}"),
        ("time", f"{report.seconds:.1f} s"),
    ]
    if report.max_abs_weight_diff is not None:
        rows.append(("one process", _comparison(report.max_abs_weight_diff)))
    return done(rows, colour=good)


def crash_hashes(report: CrashReport) -> str:
    return _hashes({"uninterrupted": report.sha256_uninterrupted, "killed": report.sha256_went_on})


def chaos_hashes(report: ChaosReport) -> str:
    """What was killed, the longest wait, and the two hashes."""
    kinds = Counter(next(kind for kind in ("leader", "standby", "worker") if kind in name) for name in report.killed)
    killed = ", ".join(counted(number, kind) for kind, number in sorted(kinds.items()))
    return (
        f"killed {killed}; the longest time without a step was {report.longest_wait_s:.1f} s\n"
        f"{_hashes({'undisturbed': report.sha256_undisturbed, 'disturbed': report.sha256_disturbed})}"
    )


def _hashes(of: Mapping[str, str]) -> str:
    """One under the other, and whether they are the same; no line is longer than 80 columns."""
    same = len(set(of.values())) == 1
    lines = [f"SHA-256 of weights and momentum: {'[bold green]identical[/]' if same else '[bold red]different[/]'}"]
    return "\n".join(lines + [f"  {name:<13} {sha256}" for name, sha256 in of.items()])


def _comparison(difference: float) -> str:
    if difference == 0.0:
        return "[bold green]identical[/]: plain PyTorch on the same batches has the same weights, bit for bit"
    return f"weights differ from plain PyTorch's on the same batches by at most {difference:.3g}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
