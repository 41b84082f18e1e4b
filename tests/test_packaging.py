"""What is published: whom the metadata, the wheels and the release workflow say that it is for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psstore.launch.kubernetes.pods import USER

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def test_the_extra_of_benches_has_what_they_import(repository: Path) -> None:
    told = project(repository / "pyproject.toml")["project"]
    needed = [*told["dependencies"], *told["optional-dependencies"]["bench"]]
    names = {re.split(r"[^\w-]", one)[0] for one in needed}
    imported = {
        (one.module or "" if isinstance(one, ast.ImportFrom) else one.names[0].name).partition(".")[0]
        for path in repository.glob("bench/**/*.py")
        for one in ast.parse(path.read_text()).body  # what is imported further in may be missing
        if isinstance(one, ast.Import | ast.ImportFrom)
    }
    assert imported - sys.stdlib_module_names - {"bench", "psstore"} <= names
    assert "scikit-learn" in names, "whose digits some of them learn"


def test_wheels_are_built_for_each_python_that_is_named(repository: Path) -> None:
    told = project(repository / "pyproject.toml")
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(told["project"]["classifiers"]))
    built = re.findall(r"cp3(\d+)-", told["tool"]["cibuildwheel"]["build"])
    assert named == built == ["10", "11", "12", "13", "14"]
    assert told["project"]["requires-python"] == f">=3.{named[0]}"


def test_the_release_workflow_builds_for_both_processors_and_publishes_only_tags(repository: Path) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((repository / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"


def test_whoever_publishes_says_where_the_project_lives(repository: Path, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(repository / ".ci" / "add_urls", tmp_path / ".ci")
    shutil.copy(repository / "pyproject.toml", tmp_path)
    before = project(tmp_path / "pyproject.toml")
    subprocess.run([tmp_path / ".ci" / "add_urls", "https://example.org/o/psstore"], check=True)
    after = project(tmp_path / "pyproject.toml")
    assert after["project"].pop("urls") == {
        "Source": "https://example.org/o/psstore",
        "Documentation": "https://example.org/o/psstore/tree/main/docs",
        "Changelog": "https://example.org/o/psstore/blob/main/CHANGELOG.md",
        "Issues": "https://example.org/o/psstore/issues",
    }
    assert after == before


def test_the_image_runs_as_whom_the_manifests_say_and_has_what_a_wheel_is_built_from(repository: Path) -> None:
    lines = (repository / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == [f"USER {USER}:{USER}"]
    assert any(f"--uid {USER} " in line for line in lines)
    sent = {line.removeprefix("!/") for line in (repository / ".dockerignore").read_text().splitlines() if "!" in line}
    assert sent == {"CMakeLists.txt", "LICENSE", "README.md", "cmake", "csrc", "pyproject.toml", "python"}
    extras = project(repository / "pyproject.toml")["project"]["optional-dependencies"]
    (told,) = [line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS=")]
    assert set(told.split(",")) <= set(extras)
