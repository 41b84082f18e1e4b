"""`psstore checkpoint`: what it prints, and the exit status that says whose matter it is."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner, Result

from psstore.checkpoint.local_storage import LocalStorage
from psstore.checkpoint.reader import verify
from psstore.cli.main import app
from psstore.types import TensorSpec
from tests.checkpoint.support import make_model, write_model


def checkpoint(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Versions 7 and 9, and 11 that was never finished."""
    storage = LocalStorage(tmp_path / "place")
    for version in (7, 9, 11):
        specs = [TensorSpec(name="w", shape=(300,), rule="adam"), TensorSpec(name="b", shape=(3,), rule="adam")]
        write_model(storage, make_model(specs, decision=version, whole=True), 2)
    storage.remove("v000000000011/manifest.json")
    return storage.root


def damage(place: Path, version: int) -> Path:
    file = sorted((place / f"v{version:012d}").glob("shard-*"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def test_ls_lists_what_is_there(place: Path) -> None:
    result = checkpoint("ls", place)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if "complete" in line or "unfinished" in line]
    assert [row[1] for row in rows] == ["7", "9", "11"]
    assert "2001-09-09 01:46" in result.stdout
    lines = [json.loads(line) for line in checkpoint("ls", place, "--json").stdout.splitlines()]
    assert [(line["version"], line["status"]) for line in lines] == [
        (7, "complete"),
        (9, "complete"),
        (11, "unfinished"),
    ]
    assert (lines[0]["shards"], lines[0]["tensors"]) == (2, 2)
    assert lines[0]["bytes"] == sum(path.stat().st_size for path in (place / "v000000000007").glob("shard-*"))
    (only,) = checkpoint("ls", f"{place}@7", "--json").stdout.splitlines()
    assert json.loads(only) == lines[0]


def test_ls_cuts_no_figure_where_the_terminal_is_narrow(place: Path) -> None:
    (found,) = (json.loads(line) for line in checkpoint("ls", f"{place}@7", "--json").stdout.splitlines())
    result = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["checkpoint", "ls", str(place)])
    assert "\u2026" not in result.stdout
    assert f"{found['bytes']:,}" in result.stdout


def test_ls_says_what_is_damaged(place: Path) -> None:
    file = sorted((place / "v000000000007").glob("shard-*"))[0]
    file.write_bytes(b"")
    result = checkpoint("ls", place)
    assert result.exit_code == 0
    assert f"{file} is damaged: it has 0 bytes" in result.stdout


def test_ls_of_nothing_says_so(tmp_path: Path) -> None:
    result = checkpoint("ls", tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'nowhere'} has no checkpoints\n")


def test_ls_of_a_version_that_is_not_there_says_so(place: Path) -> None:
    result = checkpoint("ls", f"{place}@8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no complete checkpoint of version 8" in result.stderr
    assert "unfinished" in checkpoint("ls", f"{place}@11").stdout


def test_verify_of_all_where_there_are_none_says_so(place: Path) -> None:
    result = checkpoint("verify", "--all", f"{place}/typo")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{place}/typo has no complete checkpoint; check the URL" in result.stderr


def test_verify_says_what_is_right(place: Path) -> None:
    for url, version in ((place, 9), (f"{place}@latest", 9), (f"{place}@7", 7)):
        result = checkpoint("verify", url)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"version {version}: ")
    assert checkpoint("verify", place, "--all").stdout.count("are right") == 2
    result = checkpoint("verify", f"{place}@7", "--all")
    assert result.exit_code == 2
    assert "leave out @7" in result.stderr


def test_verify_fails_with_the_file_that_is_wrong(place: Path) -> None:
    file = damage(place, 9)
    result = checkpoint("verify", place)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"psstore: {file} is damaged: ")
    result = checkpoint("verify", place, "--all")
    assert result.exit_code == 1
    assert "version 7: " in result.stdout
    assert str(file) in result.stderr
    assert "1 of 2 checkpoints are damaged, or can't be read" in result.stderr


@pytest.mark.parametrize(
    ("url", "exit_code", "message"),
    [
        ("@8", 1, "no complete checkpoint of version 8"),
        ("@11", 1, "no complete checkpoint of version 11"),
        ("@eight", 2, "expected a version's number or 'latest' behind the '@'"),
        ("/nothing", 1, "has no complete checkpoint"),
    ],
)
def test_what_is_not_there_is_said(place: Path, url: str, exit_code: int, message: str) -> None:
    for command in (["verify", f"{place}{url}"], ["export", f"{place}{url}", place / "out"]):
        result = checkpoint(*command)
        assert result.exit_code == exit_code
        assert message in result.stderr


def test_export_and_import_are_each_others_way_back(place: Path, tmp_path: Path) -> None:
    result = checkpoint("export", f"{place}@7", tmp_path / "out")
    assert result.exit_code == 0
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "model.pt",
        "model.safetensors",
        "optimizer.pt",
    ]
    assert all(str(path) in result.stdout for path in (tmp_path / "out").iterdir())
    for source in ("model.pt", "model.safetensors"):
        back = tmp_path / source.replace(".", "_")
        result = checkpoint(
            "import", back, tmp_path / "out" / source, "--optimizer", tmp_path / "out" / "optimizer.pt", "--version", 3
        )
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith(f"{back}@3: 2 tensors, ")
        assert result.stdout.endswith("rules: adam\n")
        verify(LocalStorage(back), 3)
        checkpoint("export", back, tmp_path / "again")
        for name in ("model.pt", "optimizer.pt"):
            first, second = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("out", "again"))
            assert str(first) == str(second)


def test_a_format_whose_package_is_not_here_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own writer looks for it once it has begun to write."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "dcp").mkdir()
    for command in (["export", f"{place}@7", tmp_path / "out"], ["import", tmp_path / "new", tmp_path / "dcp"]):
        result = checkpoint(*command, *(["--format", "dcp"] if command[0] == "export" else []))
        assert (result.exit_code, "pip install safetensors" in result.stderr) == (3, True)


def test_a_disk_that_is_full_for_torch_is_no_failure_of_torchs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: object, **__: object) -> None:
        raise CheckpointException("write", {0: (full, StackSummary())})

    monkeypatch.setattr("psstore.checkpoint.exchange.dcp.save", fail)
    assert checkpoint("export", f"{place}@7", tmp_path / "out", "--format", "dcp").exception is full


def test_import_reads_names_from_a_file(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(net.state_dict(), tmp_path / "model.pt")
    torch.save(torch.optim.SGD(net.parameters(), lr=0.1).state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "names").write_text("".join(f"{name}\n" for name, _ in net.named_parameters()))
    command = ["import", tmp_path / "place", tmp_path / "model.pt", "--optimizer", tmp_path / "optimizer.pt"]
    result = checkpoint(*command)
    assert result.exit_code == 2
    assert "--names FILE" in result.stderr
    result = checkpoint(*command, "--names", tmp_path / "names")
    assert result.exit_code == 0
    assert result.stdout.endswith("rules: sgd, assign\n")
    (tmp_path / "names").write_bytes(b"w\xff\n")
    result = checkpoint(*command, "--names", tmp_path / "names")
    assert result.exit_code == 2
    assert "expected names of parameters, one a line, in UTF-8" in result.stderr


def test_import_refuses_what_it_does_not_understand(place: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    for version in (10**18, 10**20):
        result = checkpoint("import", tmp_path / "new", tmp_path / "model.pt", "--version", version)
        assert (result.exit_code, "versions go up to 999999999999999999" in result.stderr) == (2, True)
    result = checkpoint("import", f"{place}@3", tmp_path / "model.pt")
    assert (result.exit_code, "--version 3" in result.stderr) == (2, True)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    result = checkpoint("import", tmp_path / "new", tmp_path / "model.safetensors")
    assert (result.exit_code, "is no safetensors file" in result.stderr) == (2, True)
    result = checkpoint("import", tmp_path / "new", tmp_path / "model.safetensors", "--rule", "lbfgs")
    assert (result.exit_code, "rule 'lbfgs' is none that trains" in result.stderr) == (2, True)
    assert "or delayed_nesterov" in result.stderr
    torch.save({"model": {"w": torch.zeros(2)}, "epoch": 3}, tmp_path / "both.pt")
    result = checkpoint("import", tmp_path / "new", tmp_path / "both.pt")
    assert (result.exit_code, "['model'], 'model.pt')" in result.stderr) == (2, True)
