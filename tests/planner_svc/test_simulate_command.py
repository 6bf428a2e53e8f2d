"""`neoflex simulate` as a user meets it: options, tables, JSON, pictures, traces, and its page of documentation."""

import json
import math
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.machines import SPEC

from planner_svc.simulator import __main__ as simulator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulate.md"
LOAD = "poisson:requests=30,prompt=100,output=20"


@pytest.fixture
def simulate(monkeypatch, capsys, tmp_path):
    """Runs it in a directory with `spec.json`; returns exit code, standard output and standard error."""
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    monkeypatch.chdir(tmp_path)

    def run(*options: str, spec: str = "spec.json", profile: str = "box", workload: str = LOAD):
        arguments = ["--spec", spec, "--profile", profile, "--workload", workload, *options]
        monkeypatch.setattr(sys, "argv", ["neoflex simulate", *arguments])
        code = 0
        try:
            simulator.main()
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


def test_one_run_as_json(simulate):
    code, out, err = simulate("--rate", "5", "--json")
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert {key: found[key] for key in ("policy", "profile", "set", "workload", "rate", "requests")} == {
        "policy": "neoflex",
        "profile": "box",
        "set": {},
        "workload": LOAD,
        "rate": 5.0,
        "requests": 30,
    }
    assert (found["refused"], found["empty"], found["unfinished"]) == (0, 0, 0)
    assert found["slo"] == 1.0
    assert found["goodput"] == found["thr_makespan"] > 0
    assert found["tokens_per_s"] == pytest.approx(20 * found["thr_makespan"])
    assert found["ttft"]["p50"] <= found["ttft"]["p95"] <= found["ttft"]["p99"] < 0.5
    assert found["tpot"].keys() == {"p50", "p95", "p99"}
    assert found["gap"].keys() == {"p50", "p99", "max"}
    assert found["busy"]["cpu"] == 0 < found["busy"]["gpu"] <= 1


def test_rows_for_each_combination_in_order(simulate):
    options = ["--rates", "2,8", "--policy", "gpu-only,neo", "--set", "swap_gb=0.25,1", "--json"]
    _, out, _ = simulate(*options)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["set"]["swap_gb"], row["policy"], row["rate"]) for row in rows] == [
        (size, policy, rate) for size in (0.25, 1.0) for policy in ("gpu-only", "neo") for rate in (2.0, 8.0)
    ]
    _, beside, _ = simulate(*options, "--jobs", "2")
    assert beside == out


def test_a_table_of_several(simulate):
    code, out, _ = simulate("--rate", "1:3:3", "--policy", "all")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(" box")]
    assert [row[:3] for row in rows[:3]] == [["box", "neoflex", rate] for rate in ("1", "2", "3")]
    assert [len(row) for row in rows] == 15 * [8] + 15 * [5]
    assert max(map(len, out.splitlines())) <= 80


def test_a_changed_figure_has_its_effect(simulate):
    """Half the bandwidth, and next to nothing else that counts: decodes take twice the time."""
    figures = ["--set", "t_launch=0", "--set", "t_iter=0", "--set", "B_gpu=2e10,1e10"]
    _, out, _ = simulate(*figures, "--json", workload="regular:requests=1,prompt=10,output=50")
    fast, slow = (json.loads(line)["tpot"]["p50"] for line in out.splitlines())
    assert slow == pytest.approx(2 * fast, rel=0.01)


def test_host_pools_side_by_side(simulate):
    load = "regular:requests=30,prompt=150,output=40"
    _, out, _ = simulate("--set", "pools=1,2", "--rate", "0", "--json", workload=load)
    one, two = (json.loads(line) for line in out.splitlines())
    assert [row["set"] for row in (one, two)] == [{"pools": 1}, {"pools": 2}]
    assert two["unfinished"] == 0
    assert two["busy"]["cpu"] > 0
    # Neither pool can help out the other, so a little is lost.
    assert 0.9 * one["thr_makespan"] <= two["thr_makespan"] <= 1.02 * one["thr_makespan"]


def test_the_capacity_of_several(simulate):
    options = ["--find-capacity", "0.9", "--tolerance", "0.05", "--policy", "gpu-only,gpu-only-slo", "--json"]
    _, out, _ = simulate(*options, "--png", "bars.png", workload="poisson:requests=100,prompt=150,output=30")
    for row in map(json.loads, out.splitlines()):
        assert row["slo"] >= 0.9
        code, above, _ = simulate(
            "--rate",
            str(1.06 * row["rate"]),
            "--policy",
            row["policy"],
            "--json",
            workload="poisson:requests=100,prompt=150,output=30",
        )
        assert (code, json.loads(above)["slo"] < 0.9) == (0, True)
    assert Path("bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_capacity_that_does_not_exist(simulate):
    _, out, _ = simulate("--find-capacity", "0.9", "--set", "slo_ttft=1e-6", "--json")
    found = json.loads(out)
    assert found["rate"] == 0
    assert "slo" not in found
    assert "none" in simulate("--find-capacity", "0.9", "--set", "slo_ttft=1e-6")[1]


def test_curves_are_drawn(simulate):
    assert simulate("--rate", "1,4", "--policy", "neo,gpu-only", "--png", "curves.png")[0] == 0
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_too_large_is_refused_and_counted(simulate):
    Path("mixed.json").write_text("[[0, 100, 10], [1, 5000, 10], [2, 100, 10], [3, 100, 10]]")
    _, out, _ = simulate("--policy", "neoflex,gpu-only", "--json", workload="mixed.json")
    both, alone = map(json.loads, out.splitlines())
    # 60 blocks of 16 tokens on the GPU, 8192 on the host.
    assert (both["refused"], alone["refused"]) == (0, 1)
    assert alone["slo"] == 0.75
    _, out, _ = simulate("--set", "context=2000", "--json", workload="mixed.json")
    assert json.loads(out)["refused"] == 1
    code, _, err = simulate("--set", "context=50", workload="mixed.json")
    assert code == 2
    assert err == "error: --workload: with neoflex on box context=50 no request fits: the largest may have 50 tokens\n"


def test_a_policy_that_stalls_is_a_result(simulate):
    _, out, _ = simulate("--policy", "neo", "--json", workload="regular:requests=1,prompt=700,output=200")
    found = json.loads(out)
    assert (found["unfinished"], found["slo"], found["pertok_mean"]) == (1, 0, None)


def test_a_recorded_rate(simulate):
    lines = [json.dumps({"timestamp": 500 * n, "input_length": 50, "output_length": 5}) for n in range(9)]
    Path("trace.jsonl").write_text("\n".join(lines))
    _, out, _ = simulate("--rate", "1x,3x", "--requests", "5", "--json", workload="trace.jsonl")
    found = [json.loads(line) for line in out.splitlines()]
    assert [(row["rate"], row["requests"]) for row in found] == [(2.0, 5), (6.0, 5)]
    code, _, err = simulate("--rate", "2x")
    assert (code, err) == (2, "error: --rate 2x: the workload has no recorded times; give requests per second\n")


def test_iterations_for_perfetto(simulate):
    load = "regular:requests=20,prompt=150,output=30"
    _, out, _ = simulate("--rate", "0", "--trace", "iterations.json", "--json", workload=load)
    events = json.loads(Path("iterations.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(lanes.values()) == ["iterations", "GPU", "CPU", "link to host", "link to GPU"]
    spans = [event for event in events if event["ph"] == "X"]
    iterations = [event for event in spans if lanes[event["tid"]] == "iterations"]
    for before, after in pairwise(iterations):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    end_us = iterations[-1]["ts"] + iterations[-1]["dur"]
    for lane, key in (("GPU", "gpu"), ("CPU", "cpu"), ("link to host", "link_out"), ("link to GPU", "link_in")):
        work_us = sum(e["dur"] for e in spans if lanes[e["tid"]] == lane and e["name"] != "bubble")
        assert work_us / end_us == pytest.approx(json.loads(out)["busy"][key]), lane
    batches = [batch for event in iterations for batch in event["args"]["sub_batches"]]
    assert sum(batch["prefill_tokens"] for batch in batches) >= 20 * 150
    assert sum(batch["gpu_decodes"] + batch["cpu_decodes"] for batch in batches) == 20 * 29
    counters = [event for event in events if event["ph"] == "C"]
    assert max(event["args"].get("waiting", 0) for event in counters) > 0
    assert max(event["args"].get("host", 0) for event in counters) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "-1"], "argument --rate/--rates: must be from 0 to 1e+06, is -1"),
        (["--rate", "1e-300"], "argument --rate/--rates: must be 0 or at least 1e-06, is 1e-300"),
        (["--set", "swap_gb=1e18"], "--set swap_gb: must be at most 67,108,864 blocks, is "),
        (["--set", "gpu_blocks=1e8"], "--set gpu_blocks: must be at most 67,108,864 blocks, is 100,000,000"),
        (["--rate", "nan"], "argument --rate/--rates: must be from 0 to 1e+06, is nan"),
        (["--rate", "1,x"], "argument --rate/--rates: must be a number, is ''"),
        (["--rate", "1,1"], "argument --rate/--rates: names one more than once: '1,1'"),
        (["--rate", "3:1:2"], "argument --rate/--rates: must rise, both ends in the same unit, is '3:1:2'"),
        (["--rate", "1:3:1"], "argument --rate/--rates: must be from 2 to 1000, is 1"),
        (["--rate", "1:3"], "argument --rate/--rates: must be FROM:TO:POINTS, is '1:3'"),
        (["--requests", "0"], "argument --requests: must be at least 1, is 0"),
        (["--jobs", "many"], "argument --jobs: must be a whole number, is 'many'"),
        (["--policy", "best"], "argument --policy: must be one of all, neoflex, neo, gpu-only, gpu-only-knee,"),
        (["--policy", "neo,neo"], "argument --policy: names one more than once: 'neo,neo'"),
        (["--find-capacity", "1.5"], "argument --find-capacity: must be from 0 to 1, is 1.5"),
        (["--find-capacity", "0.9", "--rate", "0"], "--rate: must be greater than 0 with --find-capacity, is 0"),
        (["--find-capacity", "0.9", "--rate", "1,2"], "--rate: with --find-capacity it is where the search begins"),
        (["--tolerance", "0.1"], "argument --tolerance: only with --find-capacity"),
        (["--set", "B_cpu"], "argument --set: must be KEY=VALUE[,VALUE], is 'B_cpu'"),
        (["--set", "B_cpu=1,fast"], "argument --set: must be a number, is 'fast'"),
        (["--set", "B_cpu=1", "--set", "B_cpu=2"], "argument --set: B_cpu is given more than once"),
        (["--set", "B_cpu=0"], "--set B_cpu: must be greater than 0 and at most 1e+18, is 0"),
        (["--set", "pools=65"], "--set pools: must be at most 64, is 65"),
        (["--set", "pools=2", "--elastic", "1:2"], "error: --elastic: profile box must have 1 host pool, has 2"),
        (["--set", "bs=1.5"], "--set bs: must be a whole number, is 1.5"),
        (["--set", "speed=2"], "--set speed: no such figure; there are B_cpu, B_gpu"),
        (["--png", "a.png"], "argument --png: curves need at least 2 rates"),
        (["--png", "no/a.png", "--rate", "1,2"], "argument --png: cannot write no/a.png: No such file or directory"),
        (["--trace", "a.json", "--rate", "1,2"], "--trace: needs a single run, these are 2"),
    ],
)
def test_a_bad_option_is_named_with_its_limit(simulate, options, message):
    code, out, err = simulate(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_bad_files_are_named(simulate):
    assert simulate(spec="none.json")[2] == "error: --spec: none.json: No such file or directory\n"
    assert simulate(profile="shed")[2] == "error: --profile: 'shed' is not in spec.json; it has box\n"
    assert simulate(workload="none")[2] == "error: --workload: none: No such file or directory\n"


def test_the_page_describes_what_is_printed(monkeypatch, capsys, tmp_path):
    """Its example machine and its commands run; its table of keys is complete."""
    text = PAGE.read_text()
    (spec,) = re.findall(r"```json\n(.*?)```", text, flags=re.S)
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    monkeypatch.chdir(tmp_path)
    Path("machine.json").write_text(spec)
    printed = []
    for command in commands.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        simulator.main()
        printed.append(capsys.readouterr().out)
    rows = [json.loads(line) for line in printed[2].splitlines()]
    assert [row["set"]["B_cpu"] for row in rows] == [40e9, 76e9]
    assert all(row["slo"] >= 0.9 and math.isfinite(row["rate"]) for row in rows)
    assert json.loads(Path("iterations.json").read_text())["traceEvents"]
    assert Path("curves.png").exists()
    keys = text[text.index("## JSON") :]
    assert not [key for key in rows[0] if f"`{key}`" not in keys]
