"""`psstore top`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from psstore.cli.top import CLEAR, frame, watch
from psstore.client.store_status import CheckpointStatus, StoreStatus, WorkerStatus, look_at
from psstore.launch.slowness import Look
from tests.support.server_process import StoreProcess

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]


@pytest.fixture(scope="module")
def status() -> StoreStatus:
    """An embedded store's, of two shards and four workers."""
    with psstore.LocalStore(2, workers=4) as local, local.connect(rank=0) as store:
        store.create("w", np.zeros(600_000, np.float32), rule="sgd")
        return look_at(store)


def workers(*rounds_and_waits: tuple[int, float]) -> tuple[WorkerStatus, ...]:
    slowest = min(clock for clock, _ in rounds_and_waits)
    return tuple(
        WorkerStatus(rank=rank, clock=clock, ahead=clock - slowest, waited_s=waited_s)
        for rank, (clock, waited_s) in enumerate(rounds_and_waits)
    )


def test_one_frame_of_a_store_that_trains() -> None:
    with StoreProcess("--shards", "2") as process, psstore.connect(process.url) as store:
        store.create("w", np.zeros(600_000, np.float32), rule="sgd")
        store.push("w", np.ones(600_000, np.float32))
        store.commit({"lr": 1.0})
        ran = CliRunner().invoke(app, ["top", process.url, "--once", "--every", "0.1"])
    assert ran.exit_code == 0
    assert ran.output.startswith("version 1   0.0 versions/s   sync, 1 tensors, 0 commits wait")
    assert CLEAR not in ran.output
    assert "checkpoint none in this life" in ran.output
    assert "workers 1 of 1 train" in ran.output


def test_speeds_are_what_grew_between_two_looks(status: StoreStatus) -> None:
    one, other = status.shards
    grown = replace(
        status,
        version=status.version + 30,
        shards=(
            replace(one, received_bytes=one.received_bytes + (6 << 20), sent_bytes=one.sent_bytes + (3 << 20)),
            other,
        ),
    )
    lines = frame(Look(10.0, status, 0.0), Look(12.0, grown, 0.002))
    assert "15.0 versions/s" in lines[0]
    assert "answers in 2.0 ms" in lines[0]
    shown = next(line for line in lines if line.startswith("0  ")).split()
    assert shown[2:4] == ["3.0", "1.5"]


def test_who_is_waited_for_comes_first_with_what_it_does_and_why(status: StoreStatus) -> None:
    before = replace(status, workers=workers((5, 1.0), (5, 1.0), (5, 1.0)))
    now = replace(status, workers=workers((9, 2.5), (9, 1.0), (9, 2.6)))
    lines = frame(Look(0.0, before, 0.0), Look(2.0, now, 0.0))
    said = next(i for i, line in enumerate(lines) if line.endswith("waited for is rank 1"))
    assert lines[said + 1].startswith("why: it computes, or loads data")
    assert lines[said + 2].split()[:3] == ["rank", "round", "ahead"]
    assert lines[said + 3].split() == ["1", "9", "0", "0.0", "0.0", "100%", "0%", "0%", "0%"]
    assert [line.split()[0] for line in lines[said + 4 : said + 6]] == ["0", "2"]


def test_staleness_is_shown_as_a_histogram_of_what_was_committed_since(status: StoreStatus) -> None:
    before = replace(status, staleness={0: 10, 1: 3})
    now = replace(status, staleness={0: 16, 1: 4, 2: 2, 8: 1})
    lines = frame(Look(5.0, now, 0.0), Look(6.0, now, 0.0), long_ago=Look(0.0, before, 0.0))
    first = lines.index("staleness of the 10 commits of 6 s, in rounds ahead of the slowest")
    rows = [line.split() for line in lines[first + 1 :]]
    assert [(row[0], row[-1]) for row in rows] == [("0", "60%"), ("1", "10%"), ("2-3", "20%"), ("8-15", "10%")]
    assert len(rows[0][1]) == 6 * len(rows[1][1])
    assert not any("staleness" in line for line in frame(Look(0.0, now, 0.0), Look(1.0, now, 0.0)))


def test_what_is_wrong_is_shown(status: StoreStatus) -> None:
    bad = replace(
        status,
        lost=(3,),
        torn="round 7 is torn",
        checkpoint=CheckpointStatus(version=4, age_s=61.0, written=1, failed=2, failure="no space left"),
    )
    text = "\n".join(frame(Look(0.0, bad, 0.0), Look(1.0, bad, 0.0)))
    assert "checkpoint version 4, 61 s ago; 2 failed, the last: no space left" in text
    assert "torn: round 7 is torn" in text
    assert "lost: 3" in text


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["top", f"unix://{tmp_path}/none"])
    assert ran.exit_code == 3
    assert "no connection" in ran.output


def test_it_goes_on_where_the_store_goes_back(tmp_path: Path) -> None:
    flags = ("--checkpoint", str(tmp_path), "--restarts", "1")
    with StoreProcess(*flags) as process, psstore.connect(process.url, role="client") as store:
        store.create("w", np.zeros(3, np.float32), rule="assign")
        store.checkpoint()
        looks = watch(store, 0.05)
        before = next(looks)[-1].status.shards[0].process
        os.kill(process.shard_pids()[0], signal.SIGKILL)
        after = next(looks)
        while after[-1].status.shards[0].process == before:
            after = next(looks)
        assert {look.status.shards[0].process for look in after} == {after[-1].status.shards[0].process}
