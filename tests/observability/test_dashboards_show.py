"""Every expression of every dashboard and rule, asked of a real Prometheus that scraped the real stack under load."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.prometheus import Prometheus, free_port, running_prometheus
from support.traffic import send_traffic

from neoflex.supervisor import LocalStack
from svc_common.config import parse
from svc_common.telemetry.instruments import CPU_ATTN, GATEWAY, GPU, INSTRUMENTS, PLANNER

ROOT = Path(__file__).parents[2]
FILES = ROOT / "compose" / "observability"
PICTURES = ROOT / "build" / "observability"
SCRAPE_S = 1
CLASSES = {"batch": {}, "chat": {"ttft_s": 1.0, "tpot_s": 0.1, "priority": 1, "on_overload": "refuse"}}
JOBS = {"planner": PLANNER, "gpu": GPU, "cpu-attn": CPU_ATTN, "gateway": GATEWAY}
PANELS = [
    (f"{path.stem}: {panel['title']}", target["expr"])
    for path in sorted((FILES / "grafana" / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
SELDOM = {"neoflex_epochs_ended_total"}
"""Metrics without a series until something goes wrong that does not go wrong here."""


@dataclass(frozen=True)
class Scraped:
    prometheus: Prometheus
    outcomes: Counter[str]
    start: float
    end: float
    """Of the load."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory, load_s: float) -> Iterator[Scraped]:
    directory = tmp_path_factory.mktemp("observability")
    listens = {job: f"127.0.0.1:{free_port()}" for job in JOBS}
    config = scrape_config(directory, listens)
    with stack(directory / "run", listens) as running, running_prometheus(config) as prometheus:
        running.wait_ready(120)
        assert running.http_url is not None
        # The first scrape comes before the first request: a rate needs to see counters begin.
        until(lambda: prometheus.value('sum(up{job!="prometheus"})') == len(JOBS), prometheus)
        start = time.time()
        outcomes = asyncio.run(send_traffic(running.address, running.http_url, load_s))
        # The last answer is in what was scraped.
        answers = outcomes["batch"] + outcomes["chat in time"] + outcomes["chat late"] + outcomes["HTTP 200"]
        until(lambda: (prometheus.value("sum(neoflex_request_success_total)") or 0) >= answers, prometheus)
        yield Scraped(prometheus, outcomes, start, time.time())


def scrape_config(directory: Path, listens: dict[str, str]) -> Path:
    """The committed files, with this stack's addresses, and scraped more often."""
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], f"{SCRAPE_S}s")
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [listens[job["job_name"]]]}] if job["job_name"] in listens else []
    shutil.copy(FILES / "rules.yml", directory)
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def stack(run_dir: Path, listens: dict[str, str]) -> LocalStack:
    """The "GPU" has room for some six of the requests, and a queue that is soon full."""
    values: dict[str, Any] = {
        "model": {"source": "smollm2-135m-instruct"},
        "planner": {
            "listen": "127.0.0.1:0",
            "metrics_listen": listens["planner"],
            "classes": CLASSES,
            "default_class": "batch",
            "max_waiting_requests": 64,
        },
        "gpu": {"device": "cpu", "kv_bytes": "16MiB", "metrics_listen": listens["gpu"]},
        "cpu_attn": {"kv_bytes": "96MiB", "elastic": True, "max_threads": 2, "metrics_listen": listens["cpu-attn"]},
        "gateway": {"listen": listens["gateway"]},
        "telemetry": {"layer_sample_s": 0.2},
    }
    return LocalStack(parse(values, "test"), run_dir)


def until(condition: Any, prometheus: Prometheus) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, prometheus.get("targets")
        time.sleep(0.2)


def test_every_service_is_scraped_with_the_metrics_it_declares(scraped: Scraped) -> None:
    for job, service in JOBS.items():
        series = scraped.prometheus.get("series", **{"match[]": f'{{job="{job}"}}'})
        found = {re.sub(r"_(bucket|count|sum)$", "", item["__name__"]) for item in series}
        declared = {item.prometheus_name for item in INSTRUMENTS if service in item.services}
        assert declared - found <= SELDOM, job
        assert not [name for name in found - declared if name.startswith("neoflex_")], job


def test_the_load_was_of_every_kind(scraped: Scraped) -> None:
    assert scraped.outcomes["batch"] > 0
    assert scraped.outcomes["HTTP 200"] > 0
    assert scraped.outcomes["mistake CONTEXT_EXCEEDED"] + scraped.outcomes["mistake EXCEEDS_CONTEXT"] > 0
    assert scraped.outcomes["left"] > 0
    for counter in (
        'neoflex_attended_tokens_total{device="cpu"}',
        'neoflex_requests_by_slo_total{service_class="chat"}',
    ):
        counted = scraped.prometheus.value(f"sum({counter})")
        assert counted is not None, counter
        assert counted > 0, counter


@pytest.mark.parametrize(("panel", "expr"), PANELS, ids=[f"{panel} {index}" for index, (panel, _) in enumerate(PANELS)])
def test_an_expression_of_a_dashboard_returns_data(scraped: Scraped, panel: str, expr: str) -> None:
    asked = re.sub(r"\$(planner|class|host)\b", ".*", expr.replace("$__rate_interval", f"{4 * SCRAPE_S}s"))
    assert "$" not in asked
    found = scraped.prometheus.get(
        "query_range", query=asked, start=str(scraped.start), end=str(scraped.end), step=f"{SCRAPE_S}s"
    )["result"]
    values = [float(value) for series in found for _, value in series["values"]]
    assert any(map(math.isfinite, values)), asked


def test_rules_are_evaluated_without_an_error(scraped: Scraped) -> None:
    groups = scraped.prometheus.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {rule.get("alert") or rule.get("record") for rule in RULES}
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    # Nothing was down; what else may fire depends on the machine.
    assert rules["NeoFlexServiceDown"]["state"] == rules["NeoFlexNotReady"]["state"] == "inactive"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_the_metrics_of_a_rule_are_there(scraped: Scraped, rule: dict[str, Any]) -> None:
    names = set(scraped.prometheus.get("label/__name__/values"))
    used = set(re.findall(r"\b(?:up|(?:neoflex|http|process)[_:][\w:]+)\b(?=[{ \[)]|$)", rule["expr"], flags=re.M))
    assert used
    labels = {"http_response_status_code", "http_route"}
    assert used - labels <= names | SELDOM


def test_the_dashboards_are_drawn(scraped: Scraped) -> None:
    """For those without Grafana; the pictures stay in build/observability."""
    subprocess.run(
        [
            *(sys.executable, ROOT / "tools" / "dashboards" / "draw.py", "--url", scraped.prometheus.url),
            *("--start", str(scraped.start), "--end", str(scraped.end), "--scrape", str(SCRAPE_S), "--out", PICTURES),
        ],
        check=True,
    )
    for name in ("users", "machine", "capacity"):
        assert (PICTURES / f"neoflex-{name}.png").read_bytes().startswith(b"\x89PNG")
