"""What the process refuses to start with."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stacks import own_environment

from gpu_svc.__main__ import check_kv_sizes, check_weights_fit, table_cache
from svc_common.config import Config, ConfigError, parse
from svc_common.model.store import ModelFiles

BLOCK_BYTES, HOST_BLOCK_BYTES = 1000, 600
MEMORY_BYTES = 1_000_000


@pytest.mark.parametrize(
    ("gpu_kv_bytes", "host_kv_bytes", "complaint"),
    [
        (999, 0, "gpu.kv_bytes is 999 bytes, a KV block of kv.block_tokens = 16 tokens takes 1000"),
        (1000, 599, "cpu_attn.kv_bytes is 599 bytes, a KV block of kv.block_tokens = 16 tokens takes 600"),
        (1_000_001, 0, "gpu.kv_bytes is 1000001 bytes, there are 1000000 bytes of memory"),
    ],
)
def test_a_tier_that_holds_no_block_or_exceeds_the_device(
    gpu_kv_bytes: int, host_kv_bytes: int, complaint: str
) -> None:
    config = parse({"gpu": {"kv_bytes": gpu_kv_bytes}, "cpu_attn": {"kv_bytes": host_kv_bytes}}, "test")
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        check_kv_sizes(config, BLOCK_BYTES, HOST_BLOCK_BYTES, MEMORY_BYTES)


@pytest.mark.parametrize(("gpu_kv_bytes", "host_kv_bytes"), [(0, 600), (1000, 0), (1_000_000, 10**12)])
def test_tiers_that_can_be_had(gpu_kv_bytes: int, host_kv_bytes: int) -> None:
    config = parse({"gpu": {"kv_bytes": gpu_kv_bytes}, "cpu_attn": {"kv_bytes": host_kv_bytes}}, "test")
    check_kv_sizes(config, BLOCK_BYTES, HOST_BLOCK_BYTES, MEMORY_BYTES)


def test_weights_that_the_device_cannot_hold() -> None:
    check_weights_fit("tiny", MEMORY_BYTES, MEMORY_BYTES)
    with pytest.raises(ConfigError, match="tiny: its weights take 1000001 bytes, the device has 1000000"):
        check_weights_fit("tiny", MEMORY_BYTES + 1, MEMORY_BYTES)


def test_an_address_that_cannot_be_had_is_said(checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\nsource = "{checkpoint("llama").directory}"\n'
        f'[gpu]\nlisten = "unix:{tmp_path}/none/s"\ndevice = "cpu"\ndtype = "fp32"\nkv_bytes = "1MiB"\n'
    )
    argv = [sys.executable, "-m", "gpu_svc", "--config", str(config)]
    done = subprocess.run(argv, env=own_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"gpu.listen: cannot listen on unix:{tmp_path}/none/s" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def homeless(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert table_cache(parse({"gpu": {"profile": "always"}}, "test")) is None
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert table_cache(Config()) is None
    assert caplog.messages == [
        "measured operations are not kept: the user has no home directory: set HOME, or XDG_CACHE_HOME"
    ]
