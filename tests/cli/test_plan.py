"""`psstore plan` and the shapes that it knows: published totals, balance, files, mistakes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import psstore
from psstore.cli.main import app
from psstore.cli.model_shapes import MODELS
from psstore.cli.plan import plan_of
from psstore.types import TensorSpec
from tests.support.server_process import StoreProcess


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [("resnet50", 25_557_032, 161), ("vgg16", 138_357_544, 32), ("gpt2", 124_439_808, 148)],
)
def test_built_in_shapes_have_the_published_totals(model: str, parameters: int, tensors: int) -> None:
    """torchvision's documentation of ResNet50_Weights and VGG16_Weights; OpenAI's released GPT-2 small."""
    shapes = MODELS[model]()
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shards", range(1, 9))
def test_the_largest_shard_is_at_most_one_percent_above_the_mean(model: str, shards: int) -> None:
    specs = [TensorSpec(name=name, shape=shape) for name, shape in MODELS[model]().items()]
    planned = plan_of(specs, shards)
    assert planned.largest_over_mean <= 1.01
    assert sum(shard.bytes for shard in planned.shards) == planned.bytes == 4 * planned.parameters
    assert sum(shard.slices for shard in planned.shards) == planned.slices


def test_json_is_one_object_with_every_shard() -> None:
    planned = json.loads(plan("--shards", "3", "--model", "vgg16", "--json").stdout)
    assert len(planned["shards"]) == 3
    assert planned["tensors"] == 32
    assert planned["bytes"] == 4 * 138_357_544


def test_the_table_shows_each_shard_and_the_balance() -> None:
    result = plan("--shards", "2", "--model", "resnet50")
    assert result.exit_code == 0
    assert "25,557,032 float32 parameters" in result.stdout
    assert "largest shard / mean: 1.0000" in result.stdout


@pytest.mark.parametrize("width", ["80", "40"])
def test_figures_are_whole_in_a_narrow_terminal(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    lines = plan("vgg16", "--state-buffers", "2", "--compensated", "3").stdout.splitlines()
    assert [line.split()[1:12:2] for line in lines if line.startswith("│")] == [
        ["0", "276,715,008", "276.7", "553.4", "830.1", "1064"],
        ["1", "276,715,168", "276.7", "553.4", "830.1", "1067"],
    ]


def test_compensated_gradients_take_a_value_of_each_worker_more_at_most() -> None:
    alone, planned = (json.loads(plan("resnet50", *flags, "--json").stdout) for flags in ((), ("--compensated", "3")))
    assert alone["base_bytes"] == 0
    assert planned["base_bytes"] == 3 * planned["bytes"] == 3 * alone["bytes"]
    assert [shard["base_bytes"] for shard in planned["shards"]] == [3 * shard["bytes"] for shard in alone["shards"]]
    assert "bases," in plan("resnet50", "--compensated", "3").stdout
    assert "bases" not in plan("resnet50").stdout


def test_gradients_of_all_workers_wait_at_most() -> None:
    planned = json.loads(plan("resnet50", "--workers", "4", "--state-buffers", "1", "--json").stdout)
    assert planned["contribution_bytes"] == 4 * planned["bytes"]
    for shard in planned["shards"]:
        assert shard["contribution_bytes"] == 4 * shard["bytes"]
        assert shard["memory_bytes"] == shard["bytes"] + shard["state_bytes"] + shard["contribution_bytes"]
    shown = " ".join(plan("resnet50", "--shards", "1", "--workers", "2:4", "--state-buffers", "1").stdout.split())
    assert "a shard takes 613.4 MB at most, of which 408.9 MB are gradients that wait" in shown


@pytest.mark.sockets
@pytest.mark.one_loop
def test_what_a_shard_takes_at_most_is_what_it_takes_over_sockets() -> None:
    """Blocks of memory are whole, which takes some hundredths more."""
    shape = (1 << 20,)
    planned = plan_of([TensorSpec(name="w", shape=shape, rule="sgd")], 1, num_state_buffers=1, num_workers=3)
    with StoreProcess("--workers", "3") as store, ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as ends:
        workers = [
            ends.enter_context(psstore.connect(store.url, rank=rank, num_workers=3, transport="tcp"))
            for rank in range(3)
        ]
        for worker in workers:
            worker.create("w", np.zeros(shape, np.float32), rule="sgd")
        for _ in range(2):  # the first step's has no state yet
            for worker in workers:
                worker.push("w", np.ones(shape, np.float32))
            taken = int(workers[0].stats()[0]["memory_bytes"])
            list(threads.map(lambda worker: worker.commit({"lr": 0.1, "momentum": 0.9}), workers))
        assert planned.shards[0].memory_bytes <= taken <= 1.1 * planned.shards[0].memory_bytes


def test_standbys_have_what_workers_were_sent_too() -> None:
    planned = json.loads(plan("resnet50", "--compensated", "3", "--standbys", "1", "--json").stdout)
    assert planned["standby_bytes"] == planned["bytes"] + planned["base_bytes"] == 4 * planned["bytes"]
    shown = " ".join(plan("resnet50", "--compensated", "3", "--standbys", "1").stdout.split())
    assert "standbys: 408.9 MB of values and bases more" in shown


def test_standbys_hold_all_values_once_more_and_are_sent_all_gradients() -> None:
    alone, planned = (json.loads(plan("resnet50", *flags, "--json").stdout) for flags in ((), ("--standbys", "1")))
    assert alone["standby_bytes"] == 0
    assert planned["standby_bytes"] == planned["bytes"] == alone["bytes"]
    shown = " ".join(plan("resnet50", "--standbys", "1").stdout.split())
    assert "standbys: 102.2 MB of values more; on the shard's host they see what is pushed" in shown
    assert "on others each worker's 102.2 MB of gradients" in shown
    assert "standbys" not in plan("resnet50").stdout


def test_the_optimizers_state_is_as_large_as_the_values_for_each_of_its_buffers() -> None:
    planned = json.loads(plan("resnet50", "--state-buffers", "2", "--standbys", "1", "--json").stdout)
    assert planned["state_bytes"] == 2 * planned["bytes"]
    assert planned["standby_bytes"] == 3 * planned["bytes"]
    assert [shard["state_bytes"] for shard in planned["shards"]] == [2 * shard["bytes"] for shard in planned["shards"]]
    shown = plan("resnet50", "--state-buffers", "2", "--standbys", "1").stdout
    assert "state," in shown
    assert "standbys: 306.7 MB of values and state more" in shown
    assert "state" not in plan("resnet50").stdout


def test_a_model_may_be_named_without_a_flag() -> None:
    named, flagged = plan("resnet50", "--json"), plan("--shards", "2", "--model", "resnet50", "--json")
    assert (named.exit_code, named.stdout) == (0, flagged.stdout)


def test_shapes_come_from_a_file_and_may_be_empty_or_0_d(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text('{"weight": [1000, 1000], "scale": [], "empty": [0, 5]}')
    planned = json.loads(plan("--shards", "4", "--shapes", str(file), "--dtype", "float64", "--json").stdout)
    assert planned["parameters"] == 1_000_001
    assert planned["bytes"] == 8 * 1_000_001
    assert [shard["tensors"] for shard in planned["shards"]].count(0) == 0


def test_a_file_of_shapes_is_json_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text('{"größe": [3]}', encoding="utf-8")
    command = [sys.executable, "-m", "psstore.cli.main", "plan", "--shapes", str(file), "--json"]
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["parameters"] == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1, 2]", "expected an object of shapes by name"),
        ('{"weight": [2, "3"]}', "shape of 'weight'"),
        ('{"weight": [2, -3]}', "none negative"),
        ("{", "Expecting property name"),
        pytest.param(100_000 * "[", "is nested too deep: expected an object", id="deep"),
    ],
)
def test_a_file_that_holds_no_shapes_is_refused_with_the_reason(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(content)
    result = plan("--shards", "2", "--shapes", str(file))
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "needs either a model, which is one of resnet50, vgg16, gpt2, or --shapes FILE"),
        (("resnet50", "--shapes", "/nowhere.json"), "needs either a model"),
        (("alexnet",), "'alexnet' is not one of resnet50, vgg16, gpt2"),
        (("--model", "alexnet"), "'alexnet' is not one of resnet50, vgg16, gpt2"),
        (("gpt2", "--model", "vgg16"), "was given 'gpt2' and --model vgg16"),
        (("--shapes", "/nowhere.json"), "No such file"),
        (("--model", "gpt2", "--dtype", "int8"), "can't be stored"),
        (("gpt2", "--workers", "0"), "at least 1 worker"),
        (("gpt2", "--workers", "many"), "expected a number, or FEWEST:MOST"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(arguments: tuple[str, ...], sentence: str) -> None:
    result = plan("--shards", "2", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
