"""The GPU bench where there is no GPU: every line runs on the fake device, and the report and its chart are written."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import gpu
from bench.command import Subject, run
from bench.gpu_device import Gpu, NoGpu, first_gpu
from bench.gpu_targets import FUSED, LIMIT, OURS, TARGETS, Contest, targets
from bench.gpu_timing import Bench
from bench.harness import Series
from bench.report import Report

SETTING = gpu.Setting(Bench("fake:0"), gpu.FAKE)


def series(*times_s: float) -> Series:
    return Series(times_s, times_s)


def made_up(part: str, *, ours: float, limit: float, fused: float, inputs: str = "float32") -> Contest:
    times = {OURS: series(ours), LIMIT: series(limit), FUSED: series(fused)}
    return Contest(part, f"{part} in {inputs}", times, num_bytes=10**9, inputs=inputs)


def has_gpu() -> bool:
    try:
        return first_gpu().name != ""
    except NoGpu:
        return False


@pytest.mark.parametrize("part", ["steps", "small", "host", "encode"])
def test_every_part_runs_on_the_fake_device(part: str) -> None:
    contest = next(gpu.PARTS[part](SETTING))
    assert {OURS, LIMIT} <= contest.series.keys()
    assert all(one.median > 0 for one in contest.series.values())


def test_what_a_part_lacks_is_said_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(setting: gpu.Setting) -> None:
        raise ModuleNotFoundError("No module named 'msgspec'")

    monkeypatch.setattr(gpu, "PARTS", {"ipc": lacking, "host": gpu.host})
    report = gpu.measured(argparse.Namespace(device="fake:0", part=None, quick=True, json=None))
    assert [row[0] for row in report.tables[0].rows] == ["host → device → host, sgd()", "host → device → host, adam()"]
    assert "ipc: not measured: ModuleNotFoundError: No module named 'msgspec'" in report.notes


def test_what_was_measured_is_there_whenever_the_bench_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    saved: list[Report] = []

    def stopped(setting: gpu.Setting) -> Iterator[Contest]:
        yield made_up("steps", ours=1.0, limit=0.96, fused=1.5)
        saved.append(Report.load(results))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", {"steps": stopped, "host": gpu.host})
    report = gpu.measured(argparse.Namespace(device="fake:0", part=None, quick=True, json=results))
    for one in (saved[0], report):
        assert [row[0] for row in one.tables[0].rows] == ["steps in float32"]
        assert any("not measured:" in note for note in one.notes)


def test_a_target_is_about_its_worst_case() -> None:
    good = made_up("steps", ours=1.0, limit=0.96, fused=1.5)
    bad = made_up("steps", ours=1.0, limit=0.90, fused=1.2, inputs="bfloat16")
    verdicts = {str(row[0]): row for row in targets([good, bad]).rows}
    assert verdicts["steps, × plain copy by bytes"][2:] == [0.90, "missed: steps in bfloat16"]
    assert verdicts["steps in float32, × torch fused"][2:] == [1.5, "met: steps in float32"]
    assert verdicts["steps in bfloat16, × torch fused"][2:] == [1.2, "missed: steps in bfloat16"]
    assert verdicts["training step, × the local fused one"][2:] == [None, "not measured"]
    assert len(verdicts) == len(TARGETS)


def test_a_report_and_its_chart_are_written_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contests = [made_up("steps", ours=1.0, limit=0.96, fused=1.5)]
    subject = Subject("gpu", "", lambda chosen: gpu.report(SETTING, contests, ["a note"]), isolated=False)
    run(subject, ["--json", str(tmp_path / "nvidia-h200.json"), "--plot"])
    saved = Report.load(tmp_path / "nvidia-h200.json")
    assert saved.tables[0].rows[0][:3] == ["steps in float32", "1000 (1000–1000)", 1.0]
    assert saved.figures[0]["times_s"] == [1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvidia-h200.json", "nvidia-h200.png"]


def test_a_gpu_is_named_as_files_are() -> None:
    gpu = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, "13.0")
    assert (gpu.slug, gpu.architecture) == ("nvidia-h100-80gb-hbm3", "90")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_without_a_gpu_the_bench_and_the_script_say_so(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="gpu: "):
        gpu.setting_of(argparse.Namespace(device="cuda:0", quick=False))
    script = subprocess.run(
        ["bash", "bench/on_gpu.sh", str(tmp_path)],
        cwd=repository,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 2, script.stderr
    assert "no GPU can be used here" in script.stdout
    assert (tmp_path / "summary.txt").read_text() == script.stdout


def test_the_script_knows_no_other_steps_than_it_has(repository: Path, tmp_path: Path) -> None:
    """Else it would run nothing, and say that all has passed."""
    command = ["bash", "bench/on_gpu.sh", "--only", "kernels,memchek", str(tmp_path)]
    script = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert (script.returncode, script.stderr) == (64, "there is no step memchek\n")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_the_script_says_what_is_missing_and_what_to_do(repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    script = subprocess.run(
        ["bash", "bench/on_gpu.sh", "--dry-run", str(tmp_path)],
        cwd=repository,
        env={**os.environ, "PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 1, script.stdout
    assert "can't build and test without: numpy torch" in script.stdout
    assert "PYTHON=... chooses another one" in script.stdout
