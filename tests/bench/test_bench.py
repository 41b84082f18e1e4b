"""The bench suite: what it makes of times, and that its subjects run. Nothing here looks at how long anything took."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import pytest
from bench import __main__ as every_subject
from bench import (
    calls,
    compression,
    cuts,
    cuts_deltas,
    fan_out,
    followers,
    graces,
    harness,
    latency,
    learner_links,
    learners,
    monitoring,
    restarts,
    small_steps,
    staleness,
    standbys,
    tls,
)
from bench import page as pages
from bench.callers import placements, store_caller
from bench.calls import Found
from bench.command import Subject, run
from bench.comparison import Entry, comparison, comparison_chart, comparison_summary
from bench.cuts_rows import RowCase
from bench.cuts_user import Case, aside, user
from bench.dense import OWN, Contestant, contest
from bench.fan_out_ways import WAYS
from bench.far import ThisHost
from bench.harness import Rotation, Series, alternate, cpu_seconds, process_tree
from bench.ledger import account
from bench.link_meter import Carried, carried
from bench.machine import congestion_control, machine
from bench.native_ping_pong import native_calls
from bench.page import filled
from bench.peers import load
from bench.ping_pong import raw_caller
from bench.processes import FRESH, OPTIMIZERS, child, preload, store_server
from bench.report import Chart, Report, Table, merged, three_digits
from bench.servers import TOKEN, shard_addresses
from bench.targets import targets_table
from bench.team import WorkerFailed, team
from bench.work import Work

from psstore import _core
from psstore.cli.demo.data import scikit_learn_digits
from psstore.cli.demo.messages import Settings
from tests.support.python_forkserver import end_forkserver

TINY = Work("tiny", {"a": (300,), "b": (3, 4)}, num_workers=2)


@pytest.fixture(scope="module", autouse=True)
def processes_that_start_at_once() -> Iterator[None]:
    parts = ("bench.team", "bench.peers.store", "bench.peers.raw_sockets", "bench.callers", "bench.cuts_user")
    preload(*parts, "bench.learners_worker", OPTIMIZERS)
    yield
    end_forkserver()


def series(*times_s: float) -> Series:
    return Series(times_s, tuple(time / 2 for time in times_s))


OURS = Entry("psstore, tcp", "psstore", series(0.003, 0.002, 0.010), num_bytes=1_000_000, limit="raw")
LIMIT = Entry("raw", "limit", series(0.002, 0.002), num_bytes=1_000_000)
PEERS = [Entry(name, "peer", series(time), num_bytes=1_000_000) for name, time in (("fast", 0.006), ("slow", 0.060))]


def test_contestants_take_turns() -> None:
    taken: list[str] = []
    turns = {name: lambda name=name: taken.append(name) for name in ("a", "b")}
    found = alternate(turns, warm_up=1, rounds=2)
    assert taken == ["a", "b"] * 3
    assert [len(one.times_s) for one in found.values()] == [2, 2]


def test_a_turn_may_tell_its_own_time() -> None:
    found = alternate({"a": lambda: 5.0}, warm_up=0, rounds=3)
    assert (found["a"].median, found["a"].min, found["a"].max) == (5.0, 5.0, 5.0)


def test_processor_time_counts_child_processes() -> None:
    ours, theirs = FRESH.Pipe()
    before = cpu_seconds(process_tree())
    with child(_burn_until_told, theirs):
        ours.recv()
        processes = process_tree()
        assert len(processes) > len({os.getpid()})
        assert cpu_seconds(processes) > before + 0.05
        ours.send("enough")


def _burn_until_told(link: Connection) -> None:
    while process_time() < 0.05:
        pass
    link.send("burnt")
    link.recv()


@pytest.mark.parametrize(("cache", "memory", "sets"), [(1.0, 1000.0, 2), (1000.0, 3.0, 3), (1000.0, 0.5, 1)])
def test_data_rotates_over_twice_the_cache_as_far_as_there_is_memory(
    cache: float, memory: float, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache`, `memory`: how many sets would fit into the cache, and into what may be used of the memory."""
    num_bytes = 1 << 20
    monkeypatch.setattr(harness, "last_level_cache_bytes", lambda: int(cache * num_bytes))
    monkeypatch.setattr(harness, "MOST_OF_MEMORY", memory * num_bytes / _core.machine_memory_bytes())
    rotation = Rotation(lambda index: index, num_bytes=num_bytes)
    assert [rotation.next() for _ in range(2 * sets)] == [*range(sets), *range(sets)]


def test_a_comparison_is_of_medians() -> None:
    table = comparison("case", [OURS, LIMIT, *PEERS])
    assert table.rows[0] == ["**psstore, tcp**", "3.00 (2.00–10.0)", 1.5, 0.5, 1.5]
    assert [row[3] for row in table.rows[2:]] == [0.1, 10.0], "a peer's is the best of the other ones"
    assert comparison_summary("dense", "case", [OURS, LIMIT]) == [["dense", "case: psstore, tcp", "3.00 ms", 1.5, None]]


@pytest.mark.parametrize(("value", "shown"), [(1234.4, "1234"), (99.96, "100"), (12.34, "12.3"), (0.0049, "0.00")])
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert three_digits(value) == shown


def test_a_report_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    report = a_report("dense")
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").markdown() == report.markdown()


def test_parts_of_a_subject_are_one_report() -> None:
    both = merged([a_report("dense", "large"), a_report("dense", "small")])
    assert [table.title for table in both.tables] == ["large", "small"]
    assert both.notes == ["a note"]


def test_a_page_gets_reports_where_it_has_a_place_for_them() -> None:
    page = "before\n<!-- bench: dense -->\nold\n<!-- end -->\n<!-- bench: kernels -->\nkept\n<!-- end -->\nafter\n"
    found = filled(page, [a_report("dense", "large")], images="images")
    assert found.startswith("before\n<!-- bench: dense -->\n\nabout dense\n")
    assert "![title](images/dense-chart.png)\n\n<!-- end -->\n<!-- bench: kernels -->\nkept\n<!-- end -->" in found
    assert "old" not in found
    assert filled(found, [a_report("dense", "large")], images="images") == found


def test_all_pages_with_places_get_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "README.md", tmp_path / "docs" / "a.md"]
    (tmp_path / "docs").mkdir()
    for path in paths:
        path.write_text("<!-- bench: dense -->\n<!-- end -->")
    a_report("dense").save(tmp_path / "dense.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.page", "dense.json"])
    pages.main()
    assert all("about dense" in path.read_text() for path in paths)


def test_a_page_gets_the_tables_and_charts_that_it_asks_for() -> None:
    report = replace(a_report("dense", "large"), charts=[Chart("a", "small", "ms", {}), Chart("b", "large", "ms", {})])

    def shown(text: str) -> list[str]:
        page = filled(f"<!-- bench: dense {text} -->\n<!-- end -->", [report], images="images")
        return re.findall(r"^(?:\*\*|!\[)(\w+)", page, re.MULTILINE)

    assert shown("large") == ["large", "large"]
    assert shown("small") == ["small"]
    assert shown("charts") == ["small", "large"]
    assert shown("charts small") == ["small"]


def test_a_page_says_which_targets_are_met() -> None:
    def rounds(name: str, time_s: float) -> dict[str, object]:
        return {"title": "ResNet-50, 1 worker", "name": name, "times_s": [time_s]}

    def row_of(place: str, psstore_s: float) -> str:
        figures = [rounds("raw sockets, tcp, pipelined", 1.0), rounds("psstore, tcp, early commit", psstore_s)]
        page = filled(place, [replace(a_report("dense"), figures=figures)], None)
        return next(line for line in page.splitlines() if "× raw sockets" in line)

    place = "<!-- bench: targets -->\n<!-- end -->"
    assert "| ≤ 1.1 × raw sockets | 1.10 | – | yes |" in row_of(place, 1.104)
    assert "| ≤ 1.1 × raw sockets | 1.11 | – | no |" in row_of(place, 1.106)


def test_a_page_says_what_the_limit_itself_reaches() -> None:
    took_s = {"raw sockets, tcp, pipelined": 1.0, "psstore, tcp, early commit": 1.25, "gloo all-reduce, tcp": 1.5}
    figures = [{"title": "ResNet-50, 2 workers", "name": name, "times_s": [time_s]} for name, time_s in took_s.items()]
    page = filled("<!-- bench: targets -->\n<!-- end -->", [replace(a_report("dense"), figures=figures)], None)
    assert "| dense | the same, beside gloo + SGD | ≥ 1.5 × as fast | 1.20 | 1.50 | no |" in page


def test_a_page_keeps_the_targets_of_subjects_that_were_not_measured() -> None:
    def links(sign_s: float) -> Report:
        figures = [{"codec": "none", "times_s": [30.0]}, {"codec": "sign", "times_s": [sign_s]}]
        return replace(a_report("links"), figures=figures)

    page = filled("<!-- bench: targets -->\n<!-- end -->", [links(1.0)], None)
    assert filled(page, [a_report("latency")], None) == page
    assert "| ≥ 25 × as fast as float32 | 15.0 | – | no |" in filled(page, [links(2.0)], None)


def test_a_page_gets_the_rows_of_all_subjects_that_it_asks_for() -> None:
    report = replace(a_report("dense"), summary=comparison_summary("dense", "a case", [OURS, LIMIT]))
    place = "<!-- bench: all {} -->\n<!-- end -->"
    assert "| dense | a case: psstore, tcp | 3.00 ms | 1.50 | – |" in filled(place.format("a case"), [report], None)
    assert "3.00 ms" not in filled(place.format("another"), [report], None)


def test_a_page_keeps_the_rows_of_subjects_that_were_not_measured() -> None:
    def row(subject: str, ms: str) -> Report:
        return replace(a_report(subject), summary=[(subject, "a case", ms, 1.5, None)])

    page = filled("<!-- bench: all -->\n<!-- end -->", [row("dense", "1 ms"), row("latency", "2 ms")], None)
    page = filled(page, [row("dense", "3 ms"), row("links", "4 ms")], None)
    shown = [line.split(" | ")[2] for line in page.splitlines() if "a case" in line]
    assert shown == ["3 ms", "2 ms", "4 ms"]


def test_ratios_of_all_subjects_are_times_as_long_as_a_limit_or_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how many times as fast, nor what a figure is to be at most."""
    took = {tls.TLS: series(0.2), tls.TLS_SOCKETS: series(0.1), tls.PLAIN: series(0.1), tls.TCP: series(0.1)}
    monkeypatch.setattr(restarts, "_measured", lambda *_, **__: ([6.0], [2.0]))
    monkeypatch.setattr(monitoring, "_measured", lambda *_: (0.001, 0.002))
    monkeypatch.setattr(standbys, "_measured", lambda *_, **__: ({0.0: (series(1.0), series(1.5))}, [0.7], series(0.3)))
    chosen = argparse.Namespace(quick=True, megabytes=1, transport=["tcp"])
    reports = [tls._report(took, 1), restarts.restarts(chosen), monitoring.measure(chosen), standbys.measure(chosen)]
    ratios = {(report.subject, str(row[1])[:8]): [*row[3:]] for report in reports for row in report.summary}
    assert ratios == {
        ("tls", "push and"): [2.0, None],
        ("restarts", "away for"): [3.0, None],
        ("monitoring", "/metrics"): [None, None],
        ("standbys", "a step, "): [1.5, None],
        ("standbys", "rate whi"): [None, None],
        ("standbys", "a step i"): [None, None],
    }


def test_what_is_asked_for_holds_of_a_quick_bench_too(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compression.Outcome([1.0], 0.5, 1.0, 1.0)
    trained: list[tuple[int, int]] = []

    def train(digits: object, settings: Settings, row: str) -> compression.Outcome:
        trained.append((settings.seed, settings.epochs))
        return outcome

    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(compression, "train_together", train)
    monkeypatch.setattr(compression, "CHOICES", {compression.PLAIN: "none"})
    measured = {"restarts": 0}
    monkeypatch.setattr(
        restarts, "_measured", lambda _, num_bytes, rounds: measured.update(restarts=num_bytes) or ([1.0], [1.0])
    )
    for seeds, epochs, megabytes in ((2, 3, 7), (None, None, None)):
        compression.measure(argparse.Namespace(quick=True, seeds=seeds, epochs=epochs))
        restarts.restarts(argparse.Namespace(quick=True, megabytes=megabytes))
        assert (trained, measured["restarts"]) == (
            ([(0, 3), (1, 3)], 7_000_000) if megabytes else ([(0, 2)], 100_000_000)
        )
        trained.clear()


def test_models_that_are_compared_begin_alike_whatever_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch draws from one sequence, in whichever thread."""
    made: list[threading.Thread] = []
    monkeypatch.setattr(compression, "seeded_model", lambda *_: made.append(threading.current_thread()))
    monkeypatch.setattr(compression, "train", lambda *_: compression.Outcome([1.0], 0.5, 1.0, 1.0))
    compression.train_together(scikit_learn_digits(), Settings(num_workers=2, epochs=1), compression.PLAIN)
    assert made == [threading.current_thread()] * 2


def test_parts_share_a_chart_of_one_name() -> None:
    def part(shards: str) -> Report:
        return replace(a_report("scaling"), charts=[Chart("", "title", "s", {"psstore": {shards: 1.0}}, kind="lines")])

    (chart,) = merged([part("1"), part("8")]).charts
    assert chart.series == {"psstore": {"1": 1.0, "8": 1.0}}
    assert chart.file_name("scaling") == "scaling.png"


def test_a_subject_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    subject = Subject("dense", "a summary", _quick_or_not, isolated=False)
    run(subject, ["--quick", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert "quick: True" in capsys.readouterr().out
    assert Report.load(tmp_path / "a.json").command == "python -m bench.dense --quick"
    assert (tmp_path / "a-chart.png").stat().st_size > 0


def test_what_cant_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(Subject("dense", "a summary", _not_run, isolated=False), ["--json", str(tmp_path / "nowhere" / "a.json")])
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_a_report_that_cant_be_written_is_shown_and_ends_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(SystemExit, match=r"can't write .*a\.json: Is a directory"):
        run(Subject("dense", "a summary", _quick_or_not, isolated=False), ["--json", str(tmp_path / "a.json")])
    assert "quick: False" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


SHOWN_NOWHERE = """
from bench.command import Subject, run
from bench.report import Report
run(Subject("dense", "a summary", lambda _: Report("dense", "about", []), isolated=False))
"""


def test_tables_that_cant_be_shown_are_saved_and_end_in_a_sentence(tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", SHOWN_NOWHERE, "--json", str(saved)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (1, "can't show the tables: No space left on device\n")
    assert saved.exists()


def test_all_subjects_are_measured_even_if_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(command: Sequence[str]) -> int:
        subject = command[2].removeprefix("bench.")
        replace(a_report(subject), summary=[(subject, "a case", "1 ms", 1.5, None)]).save(Path(command[4]))
        return int(subject == "latency")

    monkeypatch.setattr(every_subject, "ended", measure)
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match="failed: latency"):
        every_subject.main()
    shown = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if "a case" in line]
    assert shown == [f"| {subject}" for subject in every_subject.SUBJECTS if subject != "latency"]


def test_folders_for_reports_and_charts_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(command: Sequence[str]) -> int:
        json, plot = (Path(command[command.index(option) + 1]) for option in ("--json", "--plot"))
        assert json.parent.is_dir()
        assert plot.parent.is_dir()
        a_report("dense").save(json)
        return 0

    monkeypatch.setattr(every_subject, "ended", measure)
    folders = ["--json", str(tmp_path / "reports"), "--plot", str(tmp_path / "charts")]
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "dense", *folders])
    every_subject.main()


BESIDE_A_STORE = """
import time
from bench.command import Subject, run
from bench.processes import store_server
def measure(_):
    with store_server("unix", 1) as url:
        print(url, flush=True)
        time.sleep(600)
run(Subject("dense", "a summary", measure, isolated=False), [])
"""

ALL_OF_THEM = """
import sys
from bench.__main__ import ended
from psstore.cli.ending import end_as_by_ctrl_c
end_as_by_ctrl_c()
ended([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("program", [(BESIDE_A_STORE,), (ALL_OF_THEM, BESIDE_A_STORE)], ids=["one", "all"])
def test_a_bench_that_is_told_to_end_ends_what_it_has_started(program: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, "-c", *program], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        path = Path(bench.stdout.readline().strip().removeprefix("unix://"))
        assert path.is_socket()
        bench.terminate()
        assert bench.wait(60) == 130
    assert not path.parent.exists(), "what the store was in, which is gone after it"


def _not_run(_: argparse.Namespace) -> Report:
    raise AssertionError("it measured first")


def _quick_or_not(chosen: argparse.Namespace) -> Report:
    return a_report("dense", f"quick: {chosen.quick}")


def a_report(subject: str, title: str = "title") -> Report:
    return Report(
        subject,
        f"about {subject}",
        [Table(title, ("who", "ms"), [["psstore", 1.0], ["nobody", None]])],
        notes=["a note"],
        charts=[comparison_chart("chart", "title", {"group": [OURS, LIMIT, *PEERS]})],
        machine={"cores": 2},
    )


def test_the_machine_is_described() -> None:
    described = machine("no-such-package")
    assert described["congestion control"] == congestion_control()
    assert described["no-such-package"] == "none"


def test_a_report_says_whose_loopback_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some count its bytes."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (_, note) = run(Subject("dense", "a summary", _quick_or_not), []).notes
    assert "the machine's own loopback, with what else goes over that: another needs root" in note


def test_dense_contestants_do_the_same_work() -> None:
    """Each team's parameters are checked after its rounds."""
    able = [Contestant("raw_sockets", "unix"), Contestant("memory", "shm"), Contestant("store", "unix")]
    assert [one.why_not(TINY) for one in able] == [None] * 3
    entries = contest(TINY, able, warm_up=0, rounds=1)
    assert [(entry.role, len(entry.series.times_s)) for entry in entries] == [
        *[("limit", 1)] * 6,
        *[("psstore", 1)] * 2,
    ]


def test_a_ledger_tells_workers_from_their_servers() -> None:
    table = account(TINY, [Contestant("memory", "shm"), Contestant("store", "unix")], warm_up=0, rounds=1)
    variants = [(row[0], row[2]) for row in table.rows]
    assert [side for name, side in variants if name == "memory, shm, SGD alone"] == ["workers"]
    assert [side for name, side in variants if name == "psstore, unix, late commit"] == ["workers", "server"]
    assert all(isinstance(row[3], float) and row[3] > 0 for row in table.rows)


def test_a_contestant_whose_parameters_are_wrong_is_found_out() -> None:
    with team("memory", TINY, "shm") as one:
        one.turns["SGD alone"]()
        one.check()
        one._rounds += 1
        with pytest.raises(AssertionError, match="after 2 rounds the last element is"):
            one.check()


def test_a_contestant_that_spins_stands_still_between_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the cores of those who have theirs."""
    monkeypatch.setattr(load("store"), "SPINS", True)
    with team("store", TINY, "unix") as one:
        assert len(one.processes) > TINY.num_workers, "the server, too"
        _wait_until_stopped(one.processes)
        one.turns["late commit"]()
        _wait_until_stopped(one.processes)
        one.check()


def _wait_until_stopped(pids: Sequence[int]) -> None:
    """proc(5): the third field is the state."""
    while any(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" for pid in pids):
        os.sched_yield()


def test_a_worker_that_fails_says_why() -> None:
    nobody = Work("nobody's", {}, num_workers=0)
    with pytest.raises(WorkerFailed, match="max_workers must be greater"), team("memory", nobody, "shm"):
        pass


def test_a_worker_that_dies_is_not_waited_for() -> None:
    with team("memory", TINY, "shm") as one:
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(WorkerFailed, match="process has ended"):
            one.check()


def test_limits_have_the_colour_of_limits_in_charts() -> None:
    pytest.importorskip("matplotlib")
    from bench.plots import LIMIT as GREY
    from bench.plots import _colour

    owns = [load(name) for name in OWN]
    assert {_colour(one.NAME) == GREY: one.ROLE for one in owns} == {True: "limit", False: "psstore"}
    assert all((_colour(one.NAME) == GREY) == (one.ROLE == "limit") for one in owns)


def test_contestants_say_what_they_cannot_do() -> None:
    assert Contestant("raw_sockets", "shm").why_not(TINY) == "sockets are no shared memory"
    assert Contestant("memory", "tcp").why_not(TINY) == "memory is no socket"


def test_latency_is_measured_idle_and_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BURST", 3)
    with raw_caller("unix") as raw, raw_caller("unix", spinning=True) as spinning, store_caller("unix") as store:
        found = calls.measure_callers([raw, spinning, store], warm_up=1, rounds=1)
    assert [len(one.push.times_s) for one in found] == [3, 3, 3]
    assert [one.loaded is None for one in found] == [False, True, False]
    assert "**psstore, unix**" in latency.report(found, []).markdown()


@pytest.mark.skipif(shutil.which("cc") is None, reason="the native ping-pong needs a C compiler, `cc`")
def test_steps_of_1_kib_are_told_by_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_steps, "BURST", 3)
    monkeypatch.setattr(calls, "BURST", 3)
    starts = [partial(one, "unix") for one in (small_steps._native, small_steps._raw, small_steps._store)]
    found = small_steps.measure_steps(starts, passes=2)
    assert [len(times_s) for one in found for times_s in one.times_s.values()] == [6] * 12
    assert next(row[2] for row in small_steps.table(found).rows) == 1.0
    assert [row[1] for row in latency.report([], [], found).summary] == ["a step of 1 KiB: psstore, unix"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="the native ping-pong needs a C compiler, `cc`")
def test_the_limit_of_steps_is_between_two_processes() -> None:
    """As a worker and its shard are; three that answer would have to be woken one after the other."""
    before = set(multiprocessing.active_children())
    with native_calls("unix", ("push", "commit", "pull", "pull")) as made:
        assert len(set(multiprocessing.active_children()) - before) == 1
        for call in (*made, *made):
            call()


def test_latency_says_how_far_bursts_of_calls_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BURST", 3)
    some = Series((5.0, 1.0, 3.0, 2.0, 9.0, 2.0), (0.0, 0.0))
    assert calls.range_of_bursts(some) == (2.0, 3.0)
    assert calls.typical_s(some) == 2.5


def test_latency_joins_what_one_caller_took_in_all_its_starts() -> None:
    with raw_caller("unix") as one:
        starts = [Found(one, Series((time_s,), (0.1,)), Series((1.0,), (0.1,)), None, time_s) for time_s in (1.0, 3.0)]
    found = calls.joined(starts)
    assert (found.push.times_s, found.pull.times_s, found.loaded) == ((1.0, 3.0), (1.0, 1.0), None)
    assert found.pipelined_s == 2.0


def test_latency_is_compared_with_a_limit_on_the_same_cores_and_under_load_with_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "BURST", 3)
    cores, before = placements()[-1], os.sched_getaffinity(0)
    with (
        raw_caller("unix") as free,
        raw_caller("unix", one_thread=True) as alone,
        raw_caller("unix", cores=cores) as pinned,
        store_caller("unix", cores=cores) as store,
        raw_caller("unix", one_thread=True) as another,
    ):
        found = calls.measure_callers([free, alone, pinned, store, another], warm_up=0, rounds=1)
    assert latency._limit(found[3], found).caller is pinned
    assert latency._limit(found[4], found, one_thread=True).caller is alone
    assert latency._limit(found[4], found).caller is free
    assert [one.loaded is None for one in found] == [False, False, True, True, False]
    assert os.sched_getaffinity(0) == before


def test_reading_and_writing_beside_training_is_held_against_doing_so_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "READERS", (1, 2))
    case = Case(2, 4096)
    found = [
        cuts.reading(case, "unix", trains=True, rounds=1, turns=2),
        cuts.readers(case, rounds=1, block_s=0.05),
        cuts.writing(case, "memory", Path("/dev/shm"), rounds=2, block_s=0.05),
        cuts.writing(RowCase(5000, 100), "memory", Path("/dev/shm"), rounds=2, block_s=0.05),
    ]
    assert [(one.part, len(series.times_s)) for one in found[:2] for series in one.series.values()] == [
        *[("reading", 2)] * 2,
        *[("readers", 1)] * 5,
    ]
    for one in found[2:]:
        assert one.more["checkpoint, kept"] > 0, "of the steps that were taken while it was written"
    report = cuts.report(found)
    assert "**2 consistent readers**" in report.markdown()
    assert "delta" in found[3].series
    assert "delta" not in found[2].series
    assert [row[1] for row in report.summary][-4:] == [
        f"writing, {what}, memory: {who}"
        for what in ("2 × 4 KiB", "5,000 rows × 64, 100 a step")
        for who in ("checkpoint", "checkpoint, written")
    ]


def test_deltas_are_held_against_whole_checkpoints_and_marks_against_none() -> None:
    case = RowCase(5000, 100)
    found = [
        cuts_deltas.marks(case, rounds=1),
        cuts_deltas.deltas(case, "memory", Path("/dev/shm"), rounds=1),
    ]
    assert [found[0].more[f"--full-every {often}, bytes a row"] > 0 for often in (1, 10)] == [False, True]
    share, num_bytes = (
        [found[1].more[f"{what}, {of}"] for what in ("whole", *map(cuts_deltas.delta_after, cuts_deltas.SHARES))]
        for of in ("share of rows", "bytes")
    )
    assert share[0] == 1.0
    assert share[1:] == [0.01, 0.1]
    assert num_bytes[1] < num_bytes[2] < num_bytes[0]
    report = cuts.report(found)
    assert [table.title for table in report.tables] == ["marks", "deltas"]
    assert [row[1] for row in report.summary] == [
        "marks, 5,000 rows × 64, 100 a step: --full-every 10",
        *(
            f"deltas, 5,000 rows × 64, memory: delta, {share} of the rows changed{what}"
            for share in ("1%", "10%")
            for what in ("", ", started")
        ),
    ]


def test_followers_are_measured_by_what_they_are_sent_and_beside_who_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "TENSOR_ELEMS", 4096)
    monkeypatch.setattr(followers, "READERS", (1,))
    sent = followers.bytes_sent(2).rows
    assert [row[0] for row in sent] == ["0 versions missed", "3 versions missed"]
    assert all(isinstance(cell, float) and 2 < cell < 4 for cell in (row[2] for row in sent))
    assert len(followers.codec(1).rows) == 2
    table, found = followers.readers(rounds=1, block_s=0.05, compute_s=0.0)
    assert list(found) == [followers.ALONE, "1 followers", "1 clients that pull"]
    assert len(table.rows) == 3
    monkeypatch.setattr(followers, "SHARDS", 1)
    monkeypatch.setattr(followers, "NUM_BEHIND", 2)
    table, found = followers.relays(followers.APART, (1,), rounds=1, block_s=0.05, compute_s=0.01)
    assert list(found) == [followers.ALONE, "1 followers", "2 followers behind 2 relays", followers.BARE]
    assert [bool(versions_per_s) for *_, versions_per_s, _ in table.rows] == [False, True, True, True]


def test_readers_of_each_way_have_what_the_trainer_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "TENSOR_ELEMS", 512)
    ours, raw = "psstore, shm", "raw sockets, tcp, whole"
    entries, notes = fan_out.spread(2, fan_out.versions(), 1, {name: WAYS[name] for name in (ours, raw)})
    assert [entry.name for entry in entries] == [ours, raw]
    assert not notes


def test_learners_behind_links_take_steps_with_a_store_and_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    for name, value in (("LEARNERS", 2), ("WIDTH", 8), ("COMPUTE_S", 0.001)):
        monkeypatch.setattr(learner_links, name, value)
    options = ("--token-file", str(token_file))
    with store_server("unix", 1, workers=2, options=options) as url, ThreadPoolExecutor(2) as both:
        learners = [learner_links.Learner(rank) for rank in range(2)]
        list(both.map(lambda one: one.join(url, {"every": 2, "fragments": 1}), learners))
        together = list(both.map(lambda one: one.together(2), learners))
        alone = list(both.map(lambda one: one.alone(2), learners))
        assert min(*together, *alone) >= 2 * 0.001
        list(both.map(learner_links.Learner.leave, learners))


def test_a_grace_that_is_to_pay_is_as_good_as_the_best_fixed_one_whatever_the_learners_are() -> None:
    """Under a clock that jumps, where the same seed gives the same figures."""
    shares = {
        title: {name: graces.Run(case, grace_s, seed=0).share(300.0) for name, grace_s in graces.GRACES.items()}
        for title, case in graces.CASES.items()
    }
    for title, of in shares.items():
        best = max(share for name, share in of.items() if name != "auto")
        assert of["auto"] > best - 0.05, f"{title}: {of}"
    for name in set(graces.GRACES) - {"auto"}:
        assert any(of["auto"] > of[name] + 0.03 for of in shares.values()), f"{name} does as well everywhere: {shares}"


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_training_by_stale_gradients_is_the_same_for_the_same_seed(is_adaptive: bool) -> None:
    digits, way = scikit_learn_digits(), staleness.Way("async", 3, strength=1.0, is_adaptive=is_adaptive)
    first, again, other = (staleness.final_loss(digits, way, rate=0.1, seed=seed, gradients=60) for seed in (0, 0, 1))
    assert first == again != other
    assert first < 2.0, "it has learnt something"


def test_learners_are_killed_by_the_seed_and_what_is_shared_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "START_S", 0.1)
    monkeypatch.setattr(learners, "STEP_S", 0.01)
    case = learners.Case("killed", "killed", slowness=(1.0,) * 4, between_kills_s=1.0)
    schedule = learners.kills(case, 3.0, seed=1)
    assert schedule == learners.kills(case, 3.0, seed=1) != learners.kills(case, 3.0, seed=2)
    assert schedule == sorted(schedule)
    assert all(0.0 < at_s < 3.0 for at_s, _ in schedule)
    for store in (learners.QUORUM, learners.ALL):
        assert 0.0 < learners.share(case, store, 3.0, seed=1) < 1.0


def test_data_parallel_training_goes_back_to_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = learners.Case("killed", "killed", slowness=(1.0,) * 4, between_kills_s=1.0)
    monkeypatch.setattr(learners, "kills", lambda case, duration_s, seed: [(5.0, 0), (6.0, 1), (20.0, 2)])
    trained_s = (
        4.0 + 12.0 + (40.0 - 21.5)
    )  # 0 to 5; all start until 7.5, with one more death on the way; to 20; from 21.5
    assert learners.data_parallel_share(killed, 40.0, seed=0) == pytest.approx(trained_s / 40.0)
    slow = replace(killed, slowness=(1.0, 1.0, 1.0, 4.0))
    assert learners.data_parallel_share(slow, 40.0, seed=0) == pytest.approx(trained_s / 40.0 / 3.25)


def test_targets_of_reading_and_writing_beside_training_are_ratios_of_one_run() -> None:
    held = {"checkpoint, held, ms/GB": 4.0, "plain calls, held, ms/GB": 3.0}

    def one(title: str, name: str, *times_s: float, **more: float) -> dict[str, object]:
        return {"title": title, "name": name, "times_s": times_s, **more}

    figures = [
        *(
            one("reading, 20 × 4 KiB, unix, nobody trains", name, time_s)
            for name, time_s in (("plain", 1), ("consistent", 3))
        ),
        *(one("readers, 16 × 256 KiB", f"{who}", time_s) for who, time_s in READERS_TOOK.items()),
        *(
            one("writing, 16 × 4096 KiB, disk", who, *times_s, **held)
            for who, times_s in (("alone", [2.0]), ("plain calls", [3.0]), ("checkpoint", [2.0, 2.0, 6.0]))
        ),
    ]
    rows = targets_table([replace(a_report("cuts"), figures=figures)]).rows
    assert [[*row[2:6]] for row in rows if row[0] == "cuts"] == [
        ["≤ 1.1 × a plain pull", "3.00", None, "no"],
        ["≤ 1.1 × a plain pull", None, None, None],
        ["≤ 1.02 × alone", "1.02", "1.01", "yes"],
        ["≤ 1.1 × alone", "1.20", "1.15", "no"],
        ["≤ 1.1 × alone", "1.00", "1.50", "yes"],
        ["≤ 2 × the usual step", "3.00", "1.50", "no"],
        ["≤ 10 ms per GB", "4.00", "3.00", "yes"],
    ]


READERS_TOOK = {
    "alone": 1.0,
    "1 plain reader": 1.01,
    "1 consistent reader": 1.02,
    "16 plain readers": 1.15,
    "16 consistent readers": 1.2,
}


@pytest.mark.parametrize("every_s", [None, 0.0])
def test_what_another_process_does_ends_with_the_block(every_s: float | None) -> None:
    case = Case(1, 1024)
    with store_server("unix", 1) as url, user(url, case, rank=0) as trainer:
        trainer.create()
        with aside(url, case) as reader:
            reader.begin("consistent", every_s=every_s)
            if every_s is None:
                assert reader.done().times == 1
            (process,) = multiprocessing.active_children()
        assert not process.is_alive()


def test_shards_have_addresses_of_their_own_also_on_one_host() -> None:
    addresses = [one for count in (1, 2, 4, 8) for one in shard_addresses(ThisHost(), count, first_host=2)]
    assert len(set(addresses)) == len(addresses) == 15


def test_a_link_is_metered_by_what_it_carried_and_when() -> None:
    times_s = [0.0, 1.0, 2.0, 3.0, 4.0]
    found = carried(times_s, [50, 50, 150, 1000, 1050])
    assert found == Carried(num_bytes=1000, begins_s=2.0, middle_bytes_s=850.0)
    assert carried(times_s, [50, 50, 50, 50, 50]) is None
