"""The committed dashboards are those that tools/dashboards writes, whole, and within Grafana's own classes."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from svc_common.telemetry.declaration import Kind
from svc_common.telemetry.instruments import INSTRUMENTS

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "compose" / "observability" / "grafana" / "dashboards"
NAMES = ["neoflex-capacity", "neoflex-machine", "neoflex-users"]
DASHBOARDS: dict[str, dict[str, Any]] = {name: json.loads((DIRECTORY / f"{name}.json").read_text()) for name in NAMES}
PANELS = [
    (name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard["panels"] if panel["type"] != "row"
]
WIDTH = 24


def test_the_committed_files_are_what_the_tool_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "dashboards" / "write.py", tmp_path], check=True)
    assert sorted(path.name for path in DIRECTORY.iterdir()) == [f"{name}.json" for name in NAMES]
    for path in DIRECTORY.iterdir():
        assert path.read_text() == (tmp_path / path.name).read_text(), "run tools/dashboards/write.py"


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_classes_read_a_dashboard_whole(name: str) -> None:
    """What they don't know would be lost on the way."""
    again = json.loads(json.dumps(Dashboard.from_json(DASHBOARDS[name]), cls=JSONEncoder))
    assert again == DASHBOARDS[name]


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    cells = Counter(
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) == WIDTH - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_variables_at_the_top_are_those_that_are_used(name: str) -> None:
    variables = {item["name"]: item for item in DASHBOARDS[name]["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(DASHBOARDS[name]["panels"])))
    assert used == set(variables)
    for item in variables.values():
        if item["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", item["query"]).groups()
            assert metric in {instrument.prometheus_name for instrument in INSTRUMENTS}
            assert label == "instance" or label in attributes(metric)


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=lambda part: part if isinstance(part, str) else part["title"])
def test_a_panel_is_described_and_asks_for_what_there_is(name: str, panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"] if panel["type"] != "heatmap" else panel["options"]["yAxis"]
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["legendFormat"]
        check_metrics(target["expr"])


def attributes(metric: str) -> set[str]:
    (instrument,) = (item for item in INSTRUMENTS if item.prometheus_name == metric)
    return {attribute.replace(".", "_") for attribute in instrument.attributes}


def check_metrics(expr: str) -> None:
    """Counters are only looked at as rates, histograms by their parts, and labels are those that the metric has."""
    for metric, selector in re.findall(r"\b((?:neoflex|gen_ai|http|process)_\w+)(?:\{([^}]*)\})?", expr):
        if metric in expr and re.search(rf"by \([^)]*{metric}", expr):
            continue  # A label.
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        (instrument,) = (item for item in INSTRUMENTS if item.prometheus_name in (metric, base))
        assert (instrument.kind is Kind.HISTOGRAM) == (instrument.prometheus_name == base != metric)
        if instrument.kind is not Kind.GAUGE:
            assert re.search(rf"(rate|increase)\({metric}\b", expr), metric
        labels = set(re.findall(r'(\w+)(?:=~|!=|!~|=)"', selector))
        assert labels <= attributes(instrument.prometheus_name) | {"instance", "le", "job"}, (metric, labels)
