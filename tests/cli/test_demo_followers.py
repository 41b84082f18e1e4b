"""`psstore demo --followers`: models that follow a training end with its bits, and the display says what came."""

from __future__ import annotations

import io
from unittest import mock

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from psstore.cli.demo import followers
from psstore.cli.demo.followers import FollowersDisplay, FollowerSettings, followers_summary, train_followed
from psstore.cli.demo.messages import RECORD_SEPARATOR, FollowerProgress
from psstore.cli.main import app
from psstore.launch.output import Line


def console_to(shown: io.StringIO) -> Console:
    return Console(file=shown, width=200, force_terminal=False)


def test_a_model_that_follows_ends_with_the_bits_of_the_one_that_is_trained() -> None:
    shown = io.StringIO()
    console = console_to(shown)
    report = train_followed(console, shards=1, followers=1, seed=0, steps=12)
    console.print(followers_summary(report))
    assert (report.verified, report.followers, report.steps) == (1, 1, 12)
    assert 1 < report.versions <= 13
    assert "1 of 1 have the store's bits at the end" in shown.getvalue()


def test_the_display_shows_what_came() -> None:
    shown = io.StringIO()
    settings = FollowerSettings(followers=2, steps=10, seed=0)
    display = FollowersDisplay(console_to(shown), num_shards=1, settings=settings)
    with display:
        for number, version in ((0, 5), (1, 10)):
            event = FollowerProgress(
                number=number,
                version=version,
                versions=4,
                num_bytes=500_000,
                whole_bytes=2_000_000,
                accuracy=0.5,
                is_verified=version == 10,
            )
            display.deliver(Line("rank 0", is_error=False, text=RECORD_SEPARATOR + msgspec.json.encode(event)))
        display.deliver(Line("rank 0", is_error=True, text=b"[hello]"))
    assert {number: one.is_verified for number, one in display.last.items()} == {0: False, 1: True}
    assert shown.getvalue().splitlines()[1:] == [
        "version    5/10  50.0% right  25% of 2.0 MB came",
        "[rank 0] [hello]",
    ]


@pytest.mark.parametrize("other", [["--learners", "2"], ["--rows"]])
def test_what_is_of_other_trainings_is_refused(other: list[str]) -> None:
    with mock.patch.object(followers, "train_followed") as started:
        result = CliRunner().invoke(app, ["demo", "--followers", "2", *other])
    assert result.exit_code == 2
    assert f"--followers can't be with {other[0]}" in result.stderr
    assert not started.called
