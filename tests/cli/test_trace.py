"""`psstore trace`: what workers do in their steps, as trace viewers read it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import psstore
from psstore.cli.main import app
from psstore.client.store import Store
from psstore.client.traced import WANTED, CallSpan, SpanFile, TracedStore, path_of
from psstore.launch.timeline import CALLS
from tests.support.server_process import StoreProcess, eventually

pytestmark = [pytest.mark.sockets, pytest.mark.one_loop]

NUM_WORKERS = 2
SLOW, SLOW_S = 1, 0.05
"""Rank of the worker that computes longer, and by how much."""

NEVER = 1 << 62
"""Round."""

SLACK_US = 1.0
"""Times are floats of microseconds since 1970, which float64 has to a quarter of one."""

Event = dict[str, Any]


class Training:
    """Workers on threads, until they are told to end."""

    def __init__(self, url: str, take_step: Callable[[Store, float], None]) -> None:
        self._url = url
        self._take_step = take_step
        self._last = NEVER
        self._threads = [threading.Thread(target=self._work, args=(rank,)) for rank in range(NUM_WORKERS)]
        self.rounds = [0] * NUM_WORKERS
        for thread in self._threads:
            thread.start()

    def _work(self, rank: int) -> None:
        with psstore.connect(self._url, rank=rank, num_workers=NUM_WORKERS) as store:
            for name in "ab":
                store.create(name, np.ones(100, "f4"), rule="sgd")
            while store.round <= self._last:
                self.rounds[rank] = store.round
                self._take_step(store, SLOW_S if rank == SLOW and self._last == NEVER else 0.0)

    def end(self) -> None:
        self._last = max(self.rounds) + 20
        for thread in self._threads:
            thread.join()


def take_step(store: Store, compute_s: float) -> None:
    ones = np.ones(100, "f4")
    started = store.start_push_many({"a": ones})
    time.sleep(compute_s)
    store.push("b", ones)
    started.result()
    store.commit({"lr": 0.01})
    store.pull_many(["a", "b"])


def take_early_step(store: Store, compute_s: float) -> None:
    """As with overlap="eager"."""
    values = {name: np.ones(100, "f4") for name in "ab"}
    committed = store.start_commit({"lr": 0.01}, present=list(values), early=True)
    pushed = store.start_push_many(values)
    time.sleep(compute_s)
    store.settle()
    committed.result()
    pulled = store.start_pull_many(list(values))
    finished = store.start_finish()
    for call in (pushed, pulled, finished):
        call.result()


def take_clipped_step(store: Store, compute_s: float) -> None:
    time.sleep(compute_s)
    store.push_many({name: np.ones(100, "f4") for name in "ab"})
    store.commit({"lr": 0.01}, max_norm=1.0)
    store.global_norm()
    store.pull_many(["a", "b"])


def publish(store: Store, compute_s: float) -> None:
    """The weights of a trainer whose optimizer is its own."""
    time.sleep(compute_s)
    store.publish({f"w{store.rank}": np.ones(100, "f4")})


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[StoreProcess]:
    """`request.param`: further flags."""
    flags = getattr(request, "param", ())
    with StoreProcess("--shards", "2", "--workers", str(NUM_WORKERS), *flags) as server:
        yield server


@pytest.fixture
def training(
    request: pytest.FixtureRequest, server: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    """`request.param`: how steps are taken."""
    monkeypatch.setenv("PSSTORE_TRACE", str(tmp_path))
    training = Training(server.url, getattr(request, "param", take_step))
    assert eventually(lambda: min(training.rounds) > 0), "both train"
    yield training
    training.end()


def trace(url: str, out: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["trace", url, "--out", str(out), *flags])


def test_a_timeline_has_the_steps_that_were_asked_for(server: StoreProcess, training: Training, tmp_path: Path) -> None:
    result = trace(server.url, tmp_path / "trace.json", "--steps", "5")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "trace.json").read_text())
    check_format(document)
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    steps = {event["args"]["step"] for event in events}
    assert steps == set(range(min(steps), min(steps) + 5))
    for rank in range(NUM_WORKERS):
        for step in steps:
            check_step([event for event in events if event["pid"] == rank and event["args"]["step"] == step])
    waits = [event for event in events if event["name"].startswith("waits")]
    assert {event["name"] for event in waits if event["pid"] != SLOW} == {f"waits for rank {SLOW}"}
    waited_us = {rank: sum(event["dur"] for event in waits if event["pid"] == rank) for rank in range(NUM_WORKERS)}
    assert waited_us[1 - SLOW] > waited_us[SLOW]
    assert not (tmp_path / "wanted").exists()


def check_format(document: dict[str, Any]) -> None:
    """Google's Trace Event Format, of 2016: the JSON object format, complete events and metadata events."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] == "X"
            assert event["ts"] > 0
            assert event["dur"] >= 0


def check_step(events: list[Event]) -> None:
    """One worker's: its calls are in order and inside of the step, and what it waits for is inside of its commit."""
    (whole,) = [event for event in events if event["name"].startswith("step")]
    (commit,) = [event for event in events if event["name"] == "commit"]
    (pull,) = [event for event in events if event["name"] == "pull"]
    pushes = [event for event in events if event["name"] == "push"]
    assert {event["args"]["call"] for event in pushes} == {"push", "push_many"}
    assert all(end(push) <= commit["ts"] + SLACK_US for push in pushes)
    assert end(commit) <= pull["ts"] + SLACK_US
    assert end(whole) == pytest.approx(end(pull), abs=SLACK_US)
    row = [event for event in events if event["tid"] == commit["tid"] and not event["name"].startswith("waits")]
    assert sum(event["dur"] for event in row) == pytest.approx(whole["dur"], abs=SLACK_US * len(row))
    for wait in events:
        if wait["name"].startswith("waits"):
            assert commit["ts"] - SLACK_US <= wait["ts"]
            assert end(wait) <= end(commit) + SLACK_US


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize(
    ("training", "ends"),
    [(take_early_step, "finish"), (take_clipped_step, "global_norm"), (publish, "publish")],
    indirect=["training"],
)
def test_other_steps_have_a_timeline_with_whom_they_wait_for(
    server: StoreProcess, training: Training, ends: str, tmp_path: Path
) -> None:
    result = trace(server.url, tmp_path / "trace.json", "--steps", "5", "--patience", "20")
    assert result.exit_code == 0, result.output
    events = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    steps = {event["args"]["step"] for event in events}
    assert steps == set(range(min(steps), min(steps) + 5))
    for rank in range(NUM_WORKERS):
        for step in steps:
            its = [event for event in events if event["pid"] == rank and event["args"]["step"] == step]
            (whole,) = [event for event in its if event["name"].startswith("step")]
            calls = [event for event in its if "call" in event["args"] and event["tid"] == CALLS]
            assert all(whole["ts"] - SLACK_US <= call["ts"] and end(call) <= end(whole) + SLACK_US for call in calls)
            row = [event for event in its if event["tid"] == CALLS and not event["name"].startswith("waits")]
            assert sum(event["dur"] for event in row) == pytest.approx(whole["dur"], abs=SLACK_US * len(row))
    calls = [event["args"]["call"] for event in events if "call" in event["args"]]
    assert set(Counter(calls).values()) == {5 * NUM_WORKERS}, "each in every step"
    assert ends in calls
    assert {one["name"] for one in events if one["name"].startswith("waits") and one["pid"] != SLOW} == {
        f"waits for rank {SLOW}"
    }


@pytest.mark.parametrize("server", [("--mode", "async")], indirect=True)
def test_where_nobody_waits_it_is_each_workers_own_steps(
    server: StoreProcess, training: Training, tmp_path: Path
) -> None:
    assert eventually(lambda: training.rounds[1 - SLOW] > training.rounds[SLOW] + 20)
    result = trace(server.url, tmp_path / "trace.json", "--steps", "5", "--patience", "20")
    assert result.exit_code == 0, result.output
    assert result.output == f"5 steps of each of 2 workers: {tmp_path / 'trace.json'}\n"
    events = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    for rank in range(NUM_WORKERS):
        assert len({event["args"]["step"] for event in events if event["pid"] == rank}) == 5
    assert not [event for event in events if event["name"].startswith("waits")]


def test_what_another_thread_calls_is_waited_for_by_nobody(server: StoreProcess, tmp_path: Path) -> None:
    notes: list[CallSpan] = []
    with psstore.connect(server.url, rank=0) as store, psstore.connect(server.url, rank=1) as other:
        noted = TracedStore(store._operations, store._backend, server.url, notes=[ListedNotes(notes)])
        for one in (noted, other):
            one.create("a", np.ones(100, "f4"), rule="sgd")
            one.push("a", np.ones(100, "f4"))
        with ThreadPoolExecutor(1) as thread:
            committed = thread.submit(other.commit)
            noted.commit()
            committed.result()
            thread.submit(noted.pull, "a").result()
        noted.pull("a")
    assert [(one.call, one.waits) for one in notes] == [
        ("push", True), ("commit", True), ("pull", False), ("pull", True)
    ]  # fmt: skip


class ListedNotes:
    """In a list, always."""

    is_on = True

    def __init__(self, notes: list[CallSpan]) -> None:
        self._notes = notes

    def look(self) -> None:
        pass

    def note(self, span: CallSpan) -> None:
        self._notes.append(span)

    def end(self) -> None:
        pass


def test_nobody_notes_anything_before_and_after_it_is_wanted(
    server: StoreProcess, training: Training, tmp_path: Path
) -> None:
    assert not list(tmp_path.glob("*.jsonl"))
    for _ in range(2):  # and again
        assert trace(server.url, tmp_path / "trace.json", "--steps", "2").exit_code == 0
    training.end()
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.jsonl")}
    assert set(sizes) == {f"rank-{rank}.jsonl" for rank in range(NUM_WORKERS)}


def test_who_asks_in_another_folder_is_told_that_nobody_notes_there(
    server: StoreProcess, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("PSSTORE_TRACE", str(tmp_path / "other"))
    result = trace(server.url, tmp_path / "trace.json", "--patience", "0.3")
    assert result.exit_code == 1
    assert "rank 0 has noted nothing" in result.stderr


def test_who_asks_first_is_told_that_somebody_else_has_asked(
    server: StoreProcess, training: Training, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "psstore.cli.main", "trace", server.url, "--steps", "100000"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as first:
        assert eventually((tmp_path / WANTED).exists)
        second = trace(server.url, tmp_path / "second.json", "--steps", "5")
        assert second.exit_code == 0, second.output
        said = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert said == f"psstore: another trace has begun in {tmp_path}: workers note for one at a time\n"


def test_without_a_folder_it_is_said_what_is_missing(server: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSSTORE_TRACE", raising=False)
    result = trace(server.url, Path("trace.json"))
    assert result.exit_code == 2
    assert "PSSTORE_TRACE is not set" in result.stderr


def test_a_store_without_the_variable_is_a_plain_one(server: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSSTORE_TRACE", raising=False)
    with psstore.connect(server.url, rank=0) as store:
        assert type(store) is Store


@pytest.mark.parametrize("what", ["can't be made", "is full"])
def test_a_file_that_fails_is_said_once_and_stops_no_training(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psstore.client.traced.LOOK_S", 0.0)
    spans = SpanFile(tmp_path, 3)
    if what == "can't be made":
        path_of(tmp_path, 3).mkdir()
    else:
        path_of(tmp_path, 3).symlink_to("/dev/full")
    for _ in range(2):  # they ask, and ask again
        (tmp_path / WANTED).unlink(missing_ok=True)
        spans.look()
        (tmp_path / WANTED).touch()
        spans.look()
        spans.note(CallSpan(call="push", step=1, begin=1, end=2))
        assert not spans.is_on
    (said,) = caplog.messages
    assert said.startswith("this worker notes no calls for psstore trace: ")
