"""`neoflex model list` and `prune`, of packed weights."""

import os
import time
from pathlib import Path

import pytest
from support.command import Run

from svc_common.model.layer_cache import locked

DAY_S = 86_400.0


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of 40 days, one of today."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "neoflex" / "layers"
    directory.mkdir(parents=True)
    for name, days in (("old-model-bf16-00", 40), ("new-model-int8-00", 0)):
        path = directory / f"{name}.weights"
        path.write_bytes(b"x" * 3 * 2**20)
        used_s = time.time() - days * DAY_S
        os.utime(path, (used_s, used_s))
    return directory


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_list_says_what_packed_weights_lie_where(run: Run, layers: Path) -> None:
    lines = run("model", "list").out.splitlines()
    rows = [cells(line) for line in lines]
    assert ["new-model", "int8", "3.0 MiB", "today", "new-model-int8-00.weights"] in rows
    assert ["old-model", "bf16", "3.0 MiB", "40 days ago", "old-model-bf16-00.weights"] in rows


def test_prune_deletes_what_is_not_used(run: Run, layers: Path) -> None:
    ended = run("model", "prune")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "3.0 MiB deleted")
    assert [path.name for path in layers.iterdir()] == ["new-model-int8-00.weights"]
    ended = run("model", "prune")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"nothing in {layers} has been unused for 30 days\n"
    assert run("model", "prune", "--unused-days", "0").code == 0
    assert list(layers.iterdir()) == []


def test_prune_waits_for_nobody(run: Run, layers: Path) -> None:
    with locked(layers):
        ended = run("model", "prune")
    assert (ended.code, ended.err) == (
        1,
        f"error: a service packs or checks weights in {layers} just now; try again when it is ready\n",
    )
    assert len(list(layers.iterdir())) == 2
