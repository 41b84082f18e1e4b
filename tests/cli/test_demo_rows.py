"""`psstore demo --rows`: it trains tables, shows what workers tell, and refuses what is of the digits."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from psstore.cli.demo.messages import RECORD_SEPARATOR, RowsProgress
from psstore.cli.demo.rows import RowsDisplay, rows_summary, train_rows
from psstore.cli.main import app
from psstore.launch.output import Line


def console_to(shown: io.StringIO) -> Console:
    return Console(file=shown, width=200, force_terminal=False)


def told(rank: int, step: int, auc: float | None) -> Line:
    event = RowsProgress(
        rank=rank, step=step, steps=10, loss=0.5, rows_per_s=1000.0, auc=auc, rows=0, bytes_pushed=1, bytes_pulled=2
    )
    return Line(f"rank {rank}", is_error=False, text=RECORD_SEPARATOR + msgspec.json.encode(event))


def test_a_training_fills_tables_and_measures_what_it_learns() -> None:
    shown = io.StringIO()
    console = console_to(shown)
    report = train_rows(console, shards=2, workers=1, seed=0, steps=24)
    console.print(rows_summary(report))
    assert shown.getvalue().count("AUC") == 12 + 1
    assert report.auc > 0.52
    assert 1000 < report.rows < 41_000
    assert report.rows_per_s > 0
    assert min(report.bytes_pushed, report.bytes_pulled) > 24 * 512 * 11 * 4
    assert f"{report.rows:,} of 16" in shown.getvalue()


@pytest.mark.long
def test_the_demo_learns() -> None:
    report = train_rows(console_to(io.StringIO()), shards=3, workers=2, seed=1)
    assert report.auc > 0.75


def test_the_display_shows_each_measure_and_what_else_workers_print() -> None:
    shown = io.StringIO()
    display = RowsDisplay(console_to(shown), num_shards=1, num_workers=2)
    with display:
        display.deliver(told(0, 5, 0.6))
        display.deliver(told(1, 6, None))
        display.deliver(Line("rank 1", is_error=False, text=b"[hello]"))
        display.deliver(told(0, 10, 0.7))
    assert display.aucs == [0.6, 0.7]
    assert {rank: one.step for rank, one in display.last.items()} == {0: 10, 1: 6}
    assert shown.getvalue().splitlines()[1:] == [
        "step 5/10  loss 0.500  AUC 0.600  1,000 rows/s per worker",
        "[rank 1] [hello]",
        "step 10/10  loss 0.500  AUC 0.700  1,000 rows/s per worker",
    ]


@pytest.mark.parametrize("option", [["--mode", "async"], ["--chaos"], ["--epochs", "3"]])
def test_options_of_the_digits_are_refused(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", "--rows", *option])
    assert result.exit_code == 2
    assert option[0] in result.output
