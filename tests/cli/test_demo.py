"""`psstore demo`: it learns, in every mode; synchronous training equals one process; its parts."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from psstore.cli.demo import command, data
from psstore.cli.demo.display import Curve, Display, sparkline, summary
from psstore.cli.demo.messages import RECORD_SEPARATOR, Event, Settings, WorkerProgress, WorkerResult, parse, report_of
from psstore.cli.demo.worker import Batches, seeded_model
from psstore.cli.main import app
from psstore.errors import BadArgument
from psstore.exit_codes import EXIT_MISSING
from psstore.launch.job import Job
from psstore.launch.output import Line
from tests.support.fork_server import TrainingPopen, run

DEMO_S = 600.0
"""How long one demo may take on a machine that does much else: its processes' waits for each other end before."""

pytestmark = pytest.mark.timeout(2 * DEMO_S)


def demo(*arguments: str) -> dict[str, Any]:
    result = run([sys.executable, "-m", "psstore.cli.main", "demo", "--json", *arguments], timeout_s=DEMO_S)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def train_nothing(job: Job, display: Display) -> None:
    """In place of a training: a worker that has done all there was."""
    display.results[0] = WorkerResult(
        rank=0, images=1, seconds=1.0, bytes_pushed=0, bytes_pulled=0, max_staleness=0, accuracy=1.0,
        test_images=1, dataset="digits",
    )  # fmt: skip


# ---- the whole ----


@pytest.mark.parametrize(("shards", "workers"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.long)])
def test_synchronous_training_learns_and_equals_one_process(shards: int, workers: int) -> None:
    found = demo("--compare", "--shards", str(shards), "--workers", str(workers), "--epochs", "12")
    assert found["accuracy"] >= 0.97
    assert found["max_abs_weight_diff"] == 0.0
    assert found["max_staleness"] == 0
    assert (found["strategy"], found["mode"], found["shards"], found["workers"]) == ("ps", "sync", shards, workers)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "workers"), [("backup", 2), ("ssp", 2), ("async", 3)])
def test_every_mode_learns(mode: str, workers: int) -> None:
    found = demo("--mode", mode, "--workers", str(workers), "--epochs", "12", "--staleness", "3")
    assert found["accuracy"] >= 0.97
    assert found["images_per_s"] > 0
    assert found["seconds"] > 0
    assert mode != "ssp" or found["max_staleness"] <= 3


@pytest.mark.long
def test_bytes_moved_are_every_workers_gradients_and_parameters() -> None:
    found = demo("--epochs", "1")
    parameters = sum(p.numel() for p in seeded_model(data.scikit_learn_digits(), seed=0).parameters())
    rounds = 1438 // 2 // 32
    assert found["bytes_pushed"] == found["bytes_pulled"] == 2 * rounds * 4 * parameters


@pytest.mark.long
def test_an_all_reduce_of_two_workers_equals_one_process_too() -> None:
    """Two terms have one order, and dividing by two before or after is the same. Three differ by rounding."""
    found = demo("--strategy", "allreduce", "--epochs", "2", "--compare")
    parameters = sum(p.numel() for p in seeded_model(data.scikit_learn_digits(), seed=0).parameters())
    rounds = 2 * (1438 // 2 // 32)
    assert found["max_abs_weight_diff"] == 0.0
    assert (found["strategy"], found["shards"], found["workers"]) == ("allreduce", 0, 2)
    assert found["bytes_pushed"] == found["bytes_pulled"] == 2 * rounds * 4 * parameters  # 2(W-1)/W = 1 each


def test_an_all_reduce_ends_when_a_worker_dies() -> None:
    """The other one is in the middle of a collective; conftest.py looks whether it is left behind."""
    with TrainingPopen(
        [sys.executable, "-m", "psstore.cli.main", "demo", "--strategy", "allreduce", "--epochs", "1000", "--json"],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stderr is not None
        assert any(line.startswith("epoch 1/1000") for line in command.stderr), "it ended before its workers trained"
        children = psutil.Process(command.pid).children(recursive=True)
        victim = next(child for child in children if child.is_running() and child.environ().get("RANK") == "1")
        victim.kill()
        assert "rank 1 was killed by SIGKILL" in command.stderr.read()
        assert command.wait(DEMO_S) == 128 + signal.SIGKILL


def test_model_averaging_learns_with_a_fraction_of_the_bytes() -> None:
    found = demo("--strategy", "average", "--every", "4", "--epochs", "8")
    parameters = sum(p.numel() for p in seeded_model(data.scikit_learn_digits(), seed=0).parameters())
    steps = 8 * (1438 // 2 // 32)
    assert found["accuracy"] >= 0.9
    assert found["bytes_pushed"] == found["bytes_pulled"] == 2 * (steps // 4) * 4 * parameters


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 4])
def test_compressed_training_learns_with_a_fraction_of_the_bytes(every: int) -> None:
    average = ["--strategy", "average", "--every", f"{every}"] if every > 1 else []
    found = demo("--compression", "int8", "--epochs", "12", *average)
    parameters = sum(p.numel() for p in seeded_model(data.scikit_learn_digits(), seed=0).parameters())
    rounds = 12 * (1438 // 2 // 32) // every
    assert found["accuracy"] >= 0.97
    assert max(found["bytes_pushed"], found["bytes_pulled"]) < 2 * rounds * 4 * parameters / 3.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--compression", "int4"], "int4"), (["--compression", "int8", "--strategy", "allreduce"], "float32")],
)
def test_a_compression_that_can_not_be_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_mode_goes_with_a_store() -> None:
    result = CliRunner().invoke(app, ["demo", "--strategy", "allreduce", "--mode", "ssp"])
    assert result.exit_code == 2
    assert "--mode ssp is a store's" in result.stderr


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == EXIT_MISSING
    assert "the demo needs torch and scikit-learn" in result.stderr
    assert "-m pip install torch scikit-learn" in result.stderr


# ---- the data ----


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A few images in MNIST's format, under each of the names that are in use."""
    generator = np.random.default_rng(0)
    for name, count in (("train-images-idx3-ubyte", 80), ("t10k-images.idx3-ubyte.gz", 10)):
        write_idx(tmp_path / name, generator.integers(0, 256, (count, 28, 28), dtype=np.uint8))
    for name, count in (("train-labels-idx1-ubyte.gz", 80), ("t10k-labels.idx1-ubyte", 10)):
        write_idx(tmp_path / name, generator.integers(0, 10, count, dtype=np.uint8))
    return tmp_path


def test_digits_are_split_and_scaled() -> None:
    digits = data.load(None)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.float32
    assert (float(digits.train_images.min()), float(digits.train_images.max())) == (0.0, 1.0)
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found, digits = load_digits(), data.load(None)
    held = torch.cat([digits.train_images, digits.test_images]).numpy()[:, 0] * data.DIGITS_PIXEL_MAX
    labels = torch.cat([digits.train_labels, digits.test_labels]).numpy()
    order = np.random.RandomState(0).permutation(len(found.target))
    order = np.concatenate([order[-len(digits.train_labels) :], order[: len(digits.test_labels)]])
    assert np.array_equal(held, found.images[order])
    assert np.array_equal(labels, found.target[order])


def test_mnist_files_are_read_gzipped_or_not(mnist: Path) -> None:
    digits = data.load(str(mnist))
    assert digits.train_images.shape == (80, 1, 28, 28)
    assert digits.test_labels.shape == (10,)
    assert float(digits.train_images.max()) == 1.0


def test_mnist_files_are_checked(mnist: Path) -> None:
    images = mnist / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for content, sentence in (
        (whole[:-1], "its header says"),
        (b"PNG" + whole[3:], "no IDX file"),
        (b"", "no IDX file"),
    ):
        images.write_bytes(content)
        with pytest.raises(BadArgument, match=sentence):
            data.load(str(mnist))
    images.unlink()
    with pytest.raises(BadArgument, match="train-images-idx3-ubyte"):
        data.load(str(mnist))
    (mnist / f"{images.name}.gz").write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(BadArgument, match="can't be read"):
        data.load(str(mnist))


def test_files_that_are_not_mnists_are_refused_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--data-dir wants MNIST's four IDX files" in result.stderr


@pytest.mark.long
def test_the_demo_trains_on_mnist_files(mnist: Path) -> None:
    found = demo("--data-dir", str(mnist), "--epochs", "1", "--compare")
    assert found["dataset"] == "MNIST"
    assert found["max_abs_weight_diff"] == 0.0


def test_workers_have_parts_that_do_not_overlap() -> None:
    digits = data.load(None)
    marked = digits._replace(train_labels=torch.arange(len(digits.train_labels)))
    parts = [
        {
            int(label)
            for _, labels in Batches(marked, Settings(num_workers=3, epochs=1), rank=rank).epoch(0)
            for label in labels
        }
        for rank in range(3)
    ]
    assert all(len(part) == 22 * 21 for part in parts)
    assert len(set.union(*parts)) == 3 * 22 * 21


# ---- the display ----

PROGRESS = WorkerProgress(rank=0, round=11, rounds=22, epoch=1, epochs=2, loss=0.5, images_per_s=1234.0, staleness=1)
RESULT = WorkerResult(
    rank=0, images=6400, seconds=2.0, bytes_pushed=10, bytes_pulled=20, max_staleness=1, accuracy=0.99, test_images=360,
    dataset="digits",
)  # fmt: skip


def test_a_sparkline_spans_from_lowest_to_highest() -> None:
    assert sparkline([2.0, 1.0, 0.0]) == "█▅▁"
    assert sparkline([1.0]) == "▁"
    assert sparkline([]) == ""


def test_a_curve_averages_what_falls_on_one_point() -> None:
    curve = Curve()
    for done, loss in ((0.01, 2.0), (0.02, 4.0), (0.99, 0.0), (1.0, 0.0)):
        curve.add(done, loss)
    assert str(curve) == "█▁"


def record(event: Event) -> Line:
    import msgspec

    return Line("rank 0", False, RECORD_SEPARATOR + msgspec.json.encode(event))


def shown(*lines: Line, terminal: bool) -> tuple[str, Display]:
    console = Console(record=True, force_terminal=terminal, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    with Display(console, how="ssp · 1 shard", num_workers=2, dataset="digits") as display:
        for line in lines:
            display.deliver(line)
    return console.export_text(), display


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_progress_and_passes_other_output_on(terminal: bool) -> None:
    text, display = shown(
        record(PROGRESS),
        Line("rank 1", True, b"a [warning]"),
        Line("rank 1", True, b"a long line " * 20),
        Line("store", False, b"ready"),
        record(RESULT),
        terminal=terminal,
    )
    assert "ssp · 1 shard · 2 workers · digits" in text
    assert "loss 0.500" in text
    assert "[rank 1] a [warning]" in text
    assert "a long line " * 20 in text
    assert "ready" not in text
    assert display.results == {0: RESULT}


def test_events_are_told_from_output() -> None:
    assert parse(record(PROGRESS).text) == PROGRESS
    assert parse(b"hello") is None


@pytest.mark.parametrize(("difference", "words"), [(0.0, "identical"), (0.25, "at most 0.25"), (None, "99.00%")])
def test_the_summary_says_how_training_compares(difference: float | None, words: str) -> None:
    settings = Settings(num_workers=1, epochs=2)
    report = report_of([RESULT], settings, mode="sync", num_shards=2, seconds=3.0, max_abs_weight_diff=difference)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(report))
    text = console.export_text()
    assert words in text
    assert "3,200 over all workers" in text
    assert ("one process" in text) == (difference is not None)
