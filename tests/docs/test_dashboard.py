"""The dashboard for Grafana shows metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from psstore.launch.metric_names import METRICS


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
            is_rate = target["expr"].startswith(("rate(", "increase("))
            assert is_rate == known[names[0]].is_counter, f"{panel['title']}: a rate is of a counter"


def test_its_panels_do_not_lie_on_each_other(repository: Path) -> None:
    dashboard = json.loads((repository / "docs" / "grafana.json").read_text())
    places = [tuple(panel["gridPos"][side] for side in ("x", "y")) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
