"""The files of compose/observability, judged by promtool, and against one another."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.prometheus import promtool

from svc_common.telemetry.instruments import INSTRUMENTS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "compose" / "observability"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments, cwd=FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_each_alert_is_tested_to_fire() -> None:
    tests = yaml.safe_load((FILES / "rules_test.yml").read_text())["tests"]
    fired = {item["alertname"] for test in tests for item in test["alert_rule_test"] if item["exp_alerts"]}
    assert fired == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_has_its_place_in_the_runbook(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in (ROOT / path).read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_jobs_of_the_rules_are_scraped() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load((FILES / "prometheus.yml").read_text())["scrape_configs"]}
    (down,) = (rule["expr"] for rule in ALERTS if rule["alert"] == "NeoFlexServiceDown")
    matched = re.search(r'job=~"([^"]+)"', down)
    assert matched is not None
    assert set(matched[1].split("|")) == jobs - {"prometheus"}


def test_metrics_of_the_runbook_exist() -> None:
    names = {instrument.prometheus_name for instrument in INSTRUMENTS} | {rule.get("record") for rule in RULES}
    text = (ROOT / "docs" / "runbook.md").read_text()
    for name in re.findall(r"`((?:neoflex|gen_ai|http|process)[_:][a-z0-9_:]+)[`{]", text):
        assert re.sub(r"_(bucket|sum|count)$", "", name) in names or name in names, name


def test_the_collectors_pipelines_are_made_of_what_it_declares() -> None:
    collector = yaml.safe_load((FILES / "otel-collector.yaml").read_text())
    pipelines = collector["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics", "logs"}
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines.values() for name in pipeline[kind]}
        assert used == set(collector[kind]), kind
    assert set(collector["service"]["extensions"]) == set(collector["extensions"])


def test_grafana_asks_the_prometheus_as_often_as_it_scrapes() -> None:
    provisioning = FILES / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "neoflex.yaml").read_text())["datasources"]
    scraping = yaml.safe_load((FILES / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert (source["type"], source["jsonData"]["timeInterval"]) == ("prometheus", scraping)
