"""The dashboard for Grafana shows metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psstore.launch.metric_names import METRICS

PROMTOOL = shutil.which("promtool")


def test_each_panel_of_the_dashboard_shows_metrics_that_there_are(repository: Path) -> None:
    dashboard = json.loads((repository / "docs" / "grafana.json").read_text())
    known = {one.name: one for one in METRICS}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"psstore_\w+", target["expr"])
            assert names, panel["title"]
            assert set(names) <= known.keys(), panel["title"]
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= set(known[names[0]].labels), panel["title"]
            is_rate = re.search(r"\b(rate|increase)\(", target["expr"]) is not None
            assert is_rate == known[names[0]].is_counter, f"{panel['title']}: a rate is of a counter"


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: apt-get install prometheus")
def test_prometheus_can_read_what_panels_and_the_page_ask_it(repository: Path, tmp_path: Path) -> None:
    """As rules, which are checked without a server."""
    dashboard = json.loads((repository / "docs" / "grafana.json").read_text())
    page = (repository / "docs" / "monitoring.md").read_text()
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = re.findall(r"^(?:bottomk|rate)\(.*", page, re.MULTILINE)
    alerts = re.findall(r"^\| `([^`]*(?:==|>)[^`]*)`", page, re.MULTILINE)
    assert all((panels, queries, alerts))
    asked = [one.replace("$__rate_interval", "1m") for one in (*panels, *queries, *alerts)]
    rules = [{"record": f"asked:{i}", "expr": one} for i, one in enumerate(asked)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "psstore", "rules": rules}]}))
    checked = subprocess.run([str(PROMTOOL), "check", "rules", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(rules)} rules found" in checked.stdout


def test_grafanas_own_types_know_every_key_of_it(repository: Path) -> None:
    """Those leave out what they do not know, and write the rest as it was read."""
    dashboard = json.loads((repository / "docs" / "grafana.json").read_text())
    assert not unknown_to_grafana(dashboard)
    dashboard["panels"][0]["tittle"] = dashboard["panels"][0].pop("title")
    assert unknown_to_grafana(dashboard) == {"/panels/0/tittle"}


def unknown_to_grafana(dashboard: dict[str, Any]) -> set[str]:
    if sys.version_info < (3, 11):
        pytest.skip("Grafana's types are for Python 3.11 and newer")
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    written = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(dashboard)))
    return {path for path, _ in values_at(dashboard).items() - values_at(written).items()}


def values_at(tree: object, path: str = "") -> dict[str, str]:
    """The leaves of a tree of JSON, by their paths."""
    if not isinstance(tree, dict | list):
        return {path: json.dumps(tree)}
    under = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {leaf: value for key, below in under for leaf, value in values_at(below, f"{path}/{key}").items()}


def test_its_panels_do_not_lie_on_each_other(repository: Path) -> None:
    dashboard = json.loads((repository / "docs" / "grafana.json").read_text())
    places = [tuple(panel["gridPos"][side] for side in ("x", "y")) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
