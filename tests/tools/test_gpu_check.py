"""benchmarks/gpu_check.sh, small and on the CPU: all of it, and what it leaves out where something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODES = ("asymmetric", "same-layer overlap", "decoupled cohort", "swap out and in")

ONLY_ON_CUDA = {
    "tokens, doorbells and swaps by the executor's thread",
    "tokens, with graphs",
    "launches with graphs",
    "memory of activations",
    "decodes, GPU-only, without graphs",
    "graphs",
    "hops by the device's streams",
}


def check(out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What it writes, by the interpreter of the tests."""
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu_check.sh", "--device", "cpu", "--tiny", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out)},
        cwd=out,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    assert done.stdout.endswith(f" s; {out}/gpu_check.json\n")
    return document


def statuses(document: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(row["stage"], row["what"]): row["status"] for row in document["rows"]}


def test_all_of_it(tmp_path: Path) -> None:
    document = check(tmp_path)
    found = statuses(document)
    only_on_cuda = [row for row in document["rows"] if row["status"] == "NOT RUN"]
    assert {row["detail"].split(" has no")[0] for row in only_on_cuda} == {"device cpu"}, only_on_cuda
    assert {row["what"] for row in only_on_cuda} == ONLY_ON_CUDA
    assert set(found.values()) == {"PASS", "MEASURED", "NOT RUN"}, document["rows"]
    assert list(dict.fromkeys(stage for stage, _ in found)) == [
        "machine",
        "kernels",
        "modes",
        "policies",
        "transformers",
        "launches",
        "loads, Llama-3.1-8B",
        "serving, Llama-3.1-8B",
        "loads, Llama-2-7B",
        "serving, Llama-2-7B",
        "peer",
    ]
    assert {found["modes", f"tokens, {mode}, against device cpu"] for mode in (*MODES, "GPU-only")} == {"PASS"}
    assert found["transformers", "tokens, GPU-only, against transformers"] == "PASS"
    assert found["modes", "what was chosen"] == "MEASURED"
    assert document["device"] == "cpu"
    assert document["packages"]["torch"]
    assert "CPUs" in document["machine"]["processor"]
    rows = {(row["stage"], row["what"]): row for row in document["rows"]}
    for case in ("Llama-3.1-8B", "Llama-2-7B"):
        for stage, what, figure in (("loads", "decodes", "tokens_per_s"), ("serving", "served", "output_tokens_per_s")):
            ours, alone = (rows[f"{stage}, {case}", f"{what}, {mode}"] for mode in ("asymmetric", "GPU-only"))
            assert ours["ratio"] == pytest.approx(ours["figures"][figure] / alone["figures"][figure])
    events = json.loads((tmp_path / "iterations-8b.json").read_text())["traceEvents"]
    assert {"attend", "submit", "post-attention"} <= {event["name"] for event in events}


def test_what_is_missing_takes_only_what_needs_it(tmp_path: Path) -> None:
    document = check(tmp_path, "--without", "zmq", "--without", "transformers", "--stages", "modes,transformers")
    found = statuses(document)
    assert found["modes", "tokens, GPU-only, against device cpu"] == "PASS"
    assert {found["modes", f"tokens, {mode}, against device cpu"] for mode in MODES} == {"NOT RUN"}
    assert found["transformers", "tokens, GPU-only, against transformers"] == "NOT RUN"
    assert {"zmq", "transformers"} <= set(document["missing"])
    assert all(
        "pyzmq" in row["detail"] for row in document["rows"] if row["stage"] == "modes" and "NOT" in row["status"]
    )


ENDINGS = """
import os, sys, time
from pathlib import Path
from types import ModuleType
from gpu_check import absent
absent.install()
from gpu_check import stages
from gpu_check.setting import Setting

def crash(setting, report):
    report.check("before", True)
    os.abort()

def fail(setting, report):
    raise ValueError("one\\ntwo")

def hang(setting, report):
    if not os.fork():
        print(os.getpid(), file=open(setting.out / "child", "w"), flush=True)
    time.sleep(600)

for run in (crash, fail, hang):
    module = sys.modules[f"gpu_check.{run.__name__}"] = ModuleType(run.__name__)
    module.run = run
stages._TINY_GRACE_S = 2.0
out = Path(sys.argv[1])
found = stages.run_all(
    Setting("cpu", True, 0.0, out, out),
    [stages.Stage(name, name, 1.0, is_check=name != "hang") for name in ("crash", "fail", "hang")],
    0.0,
)
for row in found:
    print(row.stage, row.what, row.status.value, row.detail, sep="|")
state = Path("/proc") / (out / "child").read_text().strip() / "stat"
while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
print("gone")
"""


def test_a_stage_that_ends_badly_costs_itself_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDINGS, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{BENCHMARKS.parent}:{BENCHMARKS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "crash|before|PASS|",
        "crash|all|FAIL|ended by SIGABRT",
        "fail|all|FAIL|two",
        "hang|all|ERROR|ended by force after 2 s",
        "gone",
    ]
    assert "ValueError: one" in (tmp_path / "gpu_check.log").read_text()
