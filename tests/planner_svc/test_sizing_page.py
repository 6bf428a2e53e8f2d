"""docs/sizing.md: its commands run and print what it shows, its tables and its arithmetic are right."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from planner_svc.advisor import __main__ as advisor
from planner_svc.advisor.models import find_spec
from planner_svc.policy.figures import decoder_figures
from planner_svc.simulator import __main__ as simulator

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "sizing.md").read_text()
EXAMPLES = re.findall(r"```sh\nneoflex (\w+)(.*?)\n```\n\n```text\n(.*?)```", PAGE, flags=re.S)
PROGRAMS = {"plan": advisor.main, "simulate": simulator.main}
ROWS = re.findall(r"^\| ([a-z][\w.-]+) \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, flags=re.M)
BLOCK_TOKENS = 16


@pytest.mark.parametrize(("command", "arguments", "shown"), EXAMPLES, ids=[command for command, *_ in EXAMPLES])
def test_a_command_prints_what_the_page_shows(
    command: str,
    arguments: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (spec,) = re.findall(r"```json\n(.*?)```", (DOCS / "simulate.md").read_text(), flags=re.S)
    (tmp_path / "machine.json").write_text(spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command, *shlex.split(arguments)])
    PROGRAMS[command]()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    places = [printed.index(line.split()) for line in shown.splitlines()]
    assert len(places) > 3
    assert places == sorted(places)


def test_both_commands_are_there() -> None:
    assert [command for command, *_ in EXAMPLES] == ["plan", "simulate"]


@pytest.mark.parametrize(("model", "weights", "kv", "host_kv"), ROWS, ids=[row[0] for row in ROWS])
def test_a_model_takes_what_the_table_says(model: str, weights: str, kv: str, host_kv: str) -> None:
    spec = find_spec(model)
    figures = decoder_figures(spec, 2, 2)
    assert float(weights) == pytest.approx((figures.weight_sums[-1] + figures.vocabulary_bytes) / 1e9, abs=0.005)
    numbers = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    assert int(kv.replace(",", "")) == figures.kv_sums[-1] == 2 * numbers
    scales = 4 * 2 * spec.num_layers * spec.num_kv_heads / BLOCK_TOKENS
    assert int(host_kv.replace(",", "")) == numbers + scales


def test_the_arithmetic_of_the_page() -> None:
    bytes_per_token = 131_072
    assert f"{bytes_per_token:,}" in PAGE
    requests = 2.2 * (4 + 200 * 0.08)
    tokens = requests * (1000 + 200 / 2)
    assert (round(requests), round(tokens)) == (44, 48_400)
    assert f"{tokens * bytes_per_token / 1e9:.1f} GB of KV" in PAGE
    assert "2 GB, or 15,000 tokens" in PAGE
    read_bytes = 76e9 * 0.65 * 0.040
    assert (round(read_bytes / 1e9), round(read_bytes / bytes_per_token, -3)) == (2, 15_000)
