"""Service classes in the simulator: who is served how, what is refused, and what is printed of it."""

import json
import sys
from collections import Counter
from dataclasses import replace

import pytest
from support.machines import SPEC

from planner_svc.simulator import __main__ as simulator
from planner_svc.simulator.classes import read_classes
from planner_svc.simulator.runs import run
from planner_svc.simulator.spec import parse_profile
from svc_common.workloads import InputError
from svc_common.workloads.generated import generate
from svc_common.workloads.workload import Arrival, load

BOX = parse_profile(SPEC, "box", "test")
CONFIG = """
[planner]
default_class = "batch"
[planner.classes.batch]
[planner.classes.chat]
ttft_s = 0.5
tpot_s = 0.05
priority = 1
on_overload = "ON_OVERLOAD"
"""


@pytest.fixture
def classes(tmp_path):
    """Those of CONFIG, by what chat does under overload."""

    def read(on_overload="queue"):
        (tmp_path / "classes.toml").write_text(CONFIG.replace("ON_OVERLOAD", on_overload))
        return read_classes(tmp_path / "classes.toml")

    return read


def mixed(num_requests=160):
    """Every other one is urgent; at one a second."""
    return [Arrival(float(number), 150, 30, "chat" if number % 2 else "") for number in range(num_requests)]


def by_name(metrics):
    return {item.name: item for item in metrics.classes}


def test_each_class_is_served_by_its_own_rules(classes):
    rate = 200.0  # More than it can serve.
    metrics = run("neoflex", BOX, mixed(), rate, classes=classes())
    chat, batch = by_name(metrics)["chat"], by_name(metrics)["batch"]
    assert (chat.requests, batch.requests, metrics.unfinished) == (80, 80, 0)
    assert batch.slo is None
    assert metrics.slo == chat.slo  # Nobody else has targets.
    assert chat.ttft_p95 < batch.ttft_p50


def replace_names(arrivals, name):
    return [replace(item, class_name=name) for item in arrivals]


def test_a_class_that_refuses_is_refused_in_time(classes):
    urgent = replace_names(mixed(), "chat")
    queued = run("neoflex", BOX, urgent, 200.0, classes=classes())
    metrics = run("neoflex", BOX, urgent, 200.0, classes=classes("refuse"))
    assert (queued.refused_late, queued.unfinished) == (0, 0)
    assert metrics.refused_late == by_name(metrics)["chat"].refused_late > 0
    assert metrics.unfinished == 0
    num_served = len(urgent) - metrics.refused_late
    assert metrics.slo * len(urgent) / num_served > queued.slo
    assert metrics.ttft_p95 < queued.ttft_p95
    # Nobody asks for a time, and so nobody is refused.
    assert run("neoflex", BOX, urgent, 0.0, classes=classes("refuse")).refused_late == 0


def test_workloads_name_classes(tmp_path):
    def read(text):
        path = tmp_path / "load"
        path.write_text(text)
        return [item.class_name for item in load(path).arrivals]

    assert read('[[0, 5, 2], [1, 6, 3, "chat"]]') == ["", "chat"]
    assert read('[{"prompt": 5, "max_tokens": 2, "class": "chat"}, {"prompt": 5, "max_tokens": 2}]') == ["chat", ""]
    assert read(
        "TIMESTAMP,ContextTokens,GeneratedTokens,Class\n"
        "2023-11-16 18:17:03.9799600,10,5,chat\n2023-11-16 18:17:04.9799600,10,5,\n"
    ) == ["chat", ""]
    row = '{"timestamp": 0, "input_length": 10, "output_length": 5, "class": "chat"}'
    assert read(row) == ["chat"]
    with pytest.raises(InputError, match="class must be a name, is 7"):
        read("[[0, 5, 2, 7]]")


def test_a_generated_workload_draws_classes_by_weight():
    text = "poisson:requests=4000,prompt=100,output=10,seed=3"
    plain, with_classes = generate(text), generate(f"{text},class=chat*3/batch")
    counts = Counter(item.class_name for item in with_classes.arrivals)
    assert counts.keys() == {"chat", "batch"}
    assert counts["chat"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert replace_names(with_classes.arrivals, "") == plain.arrivals
    with pytest.raises(InputError, match=r"class: must be from 0.001 to 1000, is 0"):
        generate(f"{text},class=chat*0")


@pytest.fixture
def simulate(monkeypatch, capsys, tmp_path):
    """Runs the command in a directory with the machine and CONFIG."""
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    (tmp_path / "classes.toml").write_text(CONFIG.replace("ON_OVERLOAD", "refuse"))
    (tmp_path / "bad.toml").write_text("[planner.classes.chat]\nttft_s = 1\n")
    monkeypatch.chdir(tmp_path)

    def run(*options: str):
        arguments = ["--spec", "spec.json", "--profile", "box", "--rate", "20", *options]
        monkeypatch.setattr(sys, "argv", ["neoflex simulate", *arguments])
        code = 0
        try:
            simulator.main()
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


LOAD = ("--workload", "poisson:requests=40,prompt=100,output=20,class=chat/batch")


def test_the_command_reports_by_class(simulate):
    code, out, err = simulate(*LOAD, "--classes", "classes.toml", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["classes"].keys() == {"batch", "chat"}
    assert sum(item["requests"] for item in found["classes"].values()) == 40
    assert found["classes"]["chat"]["slo"] == found["slo"]
    assert found["classes"]["batch"]["slo"] is None
    assert found["refused_late"] == found["classes"]["chat"]["refused_late"]
    rows = [line.split() for line in simulate(*LOAD, "--classes", "classes.toml")[1].splitlines()]
    assert [row[3] for row in rows if row[:2] == ["box", "neoflex"]] == ["batch", "chat"]
    several = (*LOAD, "--classes", "classes.toml", "--json", "--policy", "neoflex,neo")
    assert simulate(*several)[1] == simulate(*several, "--jobs", "2")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LOAD, "--workload: class 'batch' is not configured; there are default, see --classes"),
        ((*LOAD, "--classes", "none.toml"), "--classes: none.toml: No such file or directory"),
        ((*LOAD, "--classes", "bad.toml"), "planner.classes.chat"),
    ],
)
def test_what_is_wrong_with_classes_is_said(simulate, options, message):
    code, out, err = simulate(*options)
    assert (code, out) == (2, "")
    assert message in err
