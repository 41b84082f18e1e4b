"""`psstore demo --learners`: it trains, shows who joins, learns and is killed, and refuses what others take."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from contextlib import suppress
from unittest import mock

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from psstore.cli.demo import learners
from psstore.cli.demo.learners import LearnersDisplay, learners_summary, train_learners
from psstore.cli.demo.messages import RECORD_SEPARATOR, LearnerProgress, WorkerBegan
from psstore.cli.main import app
from psstore.launch.output import Line


def console_to(shown: io.StringIO) -> Console:
    return Console(file=shown, width=200, force_terminal=False)


def told(event: LearnerProgress | WorkerBegan) -> Line:
    return Line(f"rank {event.rank}", is_error=False, text=RECORD_SEPARATOR + msgspec.json.encode(event))


def progress(rank: int, number: int, loss: float) -> LearnerProgress:
    return LearnerProgress(rank=rank, round=number, rounds=10, loss=loss, accuracy=0.5)


def test_a_learner_alone_learns() -> None:
    shown = io.StringIO()
    console = console_to(shown)
    report = train_learners(console, shards=1, learners=1, seed=0, kill=False, rounds=24)
    console.print(learners_summary(report))
    assert report.loss < report.first_loss
    assert (report.joined, report.killed, report.rounds) == (1, (), 24)
    assert "learner 0 joined" in shown.getvalue()
    assert "round 24/24" in shown.getvalue()


@pytest.mark.long
def test_learners_that_are_killed_are_replaced_and_the_loss_goes_down() -> None:
    report = train_learners(console_to(io.StringIO()), shards=2, learners=3, seed=1, kill=True)
    assert report.killed
    assert report.joined > 3
    assert report.loss < report.first_loss / 4


def test_the_display_shows_the_loss_and_who_joins() -> None:
    shown = io.StringIO()
    display = LearnersDisplay(console_to(shown), num_shards=1, num_learners=2, seed=0)
    with display:
        display.deliver(told(WorkerBegan(rank=1, process=1, store=None)))
        for event in (progress(1, 0, 2.5), progress(0, 5, 1.5), progress(1, 5, 1.6)):
            display.deliver(told(event))
        display.deliver(Line("rank 1", is_error=False, text=b"[hello]"))
    assert display.first == progress(1, 0, 2.5)
    assert display.last == progress(1, 5, 1.6)
    assert shown.getvalue().splitlines()[1:] == [
        "learner 1 joined",
        "round 5/10  loss 1.500  50.0% right",
        "[rank 1] [hello]",
    ]


def test_one_is_killed_where_another_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "KILL_EVERY_S", 0.001)
    display = LearnersDisplay(console_to(io.StringIO()), num_shards=1, num_learners=2, seed=0)
    victims = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]

    async def join(rank: int) -> None:
        display.deliver(told(WorkerBegan(rank=rank, process=victims[rank].pid, store=None)))
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(display.kill_now_and_then(), 0.5)

    try:
        asyncio.run(join(0))
        assert not display.killed
        asyncio.run(join(1))
        (rank,) = display.killed
        assert victims[rank].wait() == -signal.SIGKILL
        assert victims[1 - rank].poll() is None
    finally:
        for one in victims:
            one.kill()
            one.communicate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--learners", "2", "--mode", "async"], "--mode can't be with --learners"),
        (["--learners", "2", "--rows"], "--learners can't be with --rows"),
        (["--kill"], "--kill is for --learners"),
    ],
)
def test_what_is_of_other_trainings_is_refused(options: list[str], words: str) -> None:
    with mock.patch.object(learners, "train_learners") as started:
        result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not started.called
