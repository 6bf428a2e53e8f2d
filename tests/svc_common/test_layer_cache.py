"""What lies in the directory of layer files, and what goes when nobody has used it."""

import os
from pathlib import Path

import pytest

from svc_common.model.layer_cache import layers_dir, locked, note_use, prune, stored_layers

DAY_S = 86_400.0
NOW_S = 1_000 * DAY_S


def store(directory: Path, name: str, unused_days: float, num_bytes: int = 10_000) -> Path:
    directory.mkdir(exist_ok=True, parents=True)
    path = directory / name
    path.write_bytes(b"x" * num_bytes)
    used_s = NOW_S - unused_days * DAY_S
    os.utime(path, (used_s, used_s))
    return path


def test_the_latest_used_comes_first(tmp_path: Path) -> None:
    store(tmp_path, "llama-2-7b-bf16-0123456789abcdef01234567.weights", 3)
    store(tmp_path, "tiny-int8-0123456789abcdef01234567.weights", 1, num_bytes=1)
    store(tmp_path, "odd.weights", 9)
    (tmp_path / "tmpxyz.part").touch()
    found = stored_layers(tmp_path)
    assert [(item.model, item.dtype) for item in found] == [("tiny", "int8"), ("llama-2-7b", "bf16"), ("odd", "")]
    assert [item.used_s for item in found] == [NOW_S - days * DAY_S for days in (1, 3, 9)]
    assert 1 <= found[0].num_bytes <= found[1].num_bytes
    assert found[1].num_bytes >= 10_000


def test_what_is_not_used_goes(tmp_path: Path) -> None:
    old = store(tmp_path, "a-fp32-00.weights", 31)
    new = store(tmp_path, "b-fp32-00.weights", 29)
    half = tmp_path / "tmpxyz.part"
    half.touch()
    assert [item.path for item in prune(tmp_path, 30, NOW_S)] == [old]
    assert sorted(tmp_path.iterdir()) == [new]
    assert [item.path for item in prune(tmp_path, 0, NOW_S)] == [new]
    assert list(tmp_path.iterdir()) == []


def test_a_use_is_noted(tmp_path: Path) -> None:
    path = store(tmp_path, "a-fp32-00.weights", 500)
    note_use(path)
    assert prune(tmp_path, 1) == ()
    note_use(tmp_path / "nothing")


def test_nothing_goes_while_somebody_packs(tmp_path: Path) -> None:
    path = store(tmp_path, "a-fp32-00.weights", 500)
    with locked(tmp_path), pytest.raises(BlockingIOError):
        prune(tmp_path, 1)
    assert path.exists()


def test_no_directory_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert layers_dir() == tmp_path / "neoflex" / "layers"
    assert stored_layers(layers_dir()) == ()
    assert prune(layers_dir(), 0) == ()
    assert list(tmp_path.iterdir()) == []
