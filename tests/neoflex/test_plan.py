"""`neoflex plan` hands its options on to the planner's program, and its exit code back."""

import json
import subprocess
import sys


def plan(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neoflex.cli", "plan", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_options_reach_it_and_its_errors_come_back() -> None:
    ended = plan("--model", "llama-3.1-8b", "--hardware", "l4", "--batch", "3", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (
        json.loads(ended.stdout)["title"]
        == "llama-3.1-8b in bf16 on l4+icelake-8352y: 3 requests, 512 tokens in, 32 out"
    )
    ended = plan("--model", "llama-3.1-8b", "--hardware", "l4", "--batch", "0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "neoflex plan: error: argument --batch: must be from 1 to 100,000, is 0" in ended.stderr
