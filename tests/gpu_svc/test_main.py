"""What the process refuses to start with."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stacks import own_environment

from gpu_svc.__main__ import make_executor, table_cache
from gpu_svc.budget import check_kv_sizes
from gpu_svc.device_memory import DoesNotFitError
from gpu_svc.executor import Executor
from gpu_svc.limits import Limits
from svc_common.config import Config, ConfigError, parse
from svc_common.model.store import ModelFiles
from svc_common.policy import ExecutionPolicy

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


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_a_model_larger_than_the_device_is_streamed(
    dtype: str, checkpoint: Callable[[str], ModelFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the sizes decides: with room for all layers no file is written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = Limits(4, 32, 64)

    def start(memory_bytes: int | None) -> Executor:
        gpu = {"device": "cpu", "dtype": dtype, "kv_bytes": 100_000}
        if memory_bytes is not None:
            gpu["memory_bytes"] = memory_bytes
        source = str(checkpoint("llama-deep").directory)
        planner = {"max_running_sequences": 4, "max_batch_tokens": 32, "max_sequence_tokens": 64}
        return make_executor(parse({"model": {"source": source}, "planner": planner, "gpu": gpu}, "test"))

    roomy = start(None)
    roomy.open_epoch(1, limits, None)
    memory = roomy.memory
    assert memory is not None
    assert (roomy.resident_layers, roomy.streamed_bytes) == (7, 0)
    assert not (tmp_path / "neoflex" / "layers").exists()
    layer, other = memory.layer_bytes[0], memory.other_bytes

    activations = memory.activation_bytes
    tight = start(other + 5 * layer + activations + 100_000)
    tight.open_epoch(1, limits, None)
    assert (tight.resident_layers, tight.streamed_layers) == (3, range(4))
    assert tight.streamed_bytes == 4 * layer
    assert tight.status().weight_bytes == other + 3 * layer
    assert len(list((tmp_path / "neoflex" / "layers").glob("*.weights"))) == 1
    with pytest.raises(ConfigError, match=r"does not fit: 0 of 7 layers .* more than the \d+ bytes of the device"):
        start(other + 2 * layer + activations + 99_999)
    with pytest.raises(ConfigError, match=r"gpu.memory_bytes is .* bytes, there are .* bytes of memory"):
        start(2**60)

    # What was loaded without the file is streamed from it once a policy wants that.
    roomy.open_epoch(2, limits, None, ExecutionPolicy(2))
    assert (roomy.resident_layers, roomy.streamed_bytes) == (2, 5 * layer)
    for executor in (roomy, tight):
        executor.close()


def test_kv_takes_what_all_else_leaves(
    checkpoint: Callable[[str], ModelFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less a part that stays free; and where not all layers fit beside an iteration's KV, that much and the rest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(memory_bytes: int | None, **planner: int) -> Executor:
        gpu = {"device": "auto", "dtype": "fp32", "kv_bytes": "auto"}
        if memory_bytes is not None:
            gpu["memory_bytes"] = memory_bytes
        limits = {"max_running_sequences": 4, "max_batch_tokens": 40, "max_sequence_tokens": 64} | planner
        source = str(checkpoint("llama-deep").directory)
        executor = make_executor(parse({"model": {"source": source}, "planner": limits, "gpu": gpu}, "test"))
        executor.open_epoch(1, Limits(4, 40, 64), None)
        return executor

    with pytest.raises(ConfigError, match=r'gpu.kv_bytes "auto" on device "cpu" needs gpu.memory_bytes'):
        start(None)
    memory_bytes = 32 * 2**20
    executor = start(memory_bytes)
    memory, block_bytes = executor.memory, executor.kv_shape.block_bytes
    assert memory is not None
    held = memory.weight_bytes(7) + memory.activation_bytes
    assert memory.kv_bytes == memory_bytes - memory_bytes // 32 - held
    assert executor.num_gpu_blocks() == memory.kv_bytes // block_bytes
    assert executor.status().gpu_kv_bytes == executor.num_gpu_blocks() * block_bytes

    # Room for 40 tokens, three blocks of 16, beside five layers and two buffers, and for half a layer more.
    layer = memory.layer_bytes[0]
    wanted = memory.weight_bytes(3) + 2 * layer + memory.activation_bytes + 3 * block_bytes + layer // 2
    memory_bytes = wanted * 32 // 31 + 32
    tight = start(memory_bytes)
    assert (tight.resident_layers, tight.streamed_layers) == (3, range(4))
    assert tight.memory is not None
    assert 3 * block_bytes + layer // 2 <= tight.memory.kv_bytes < 3 * block_bytes + layer // 2 + 64

    # A planner that wants more than this service was told is refused before anything is computed.
    with pytest.raises(DoesNotFitError, match="activations of the largest batch"):
        executor.open_epoch(2, Limits(4, 400, 64), None)
    executor.open_epoch(3, Limits(3, 40, 64), None)
    with pytest.raises(ConfigError, match=r"does not fit: 0 of 7 layers .* activations of the largest batch \d{8},"):
        start(memory_bytes, max_batch_tokens=20_000)
    for one in (executor, tight):
        one.close()


def test_an_address_that_cannot_be_had_is_said(checkpoint: Callable[[str], ModelFiles], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\nsource = "{checkpoint("llama").directory}"\n'
        f'[gpu]\nlisten = "unix:{tmp_path}/none/s"\ndevice = "cpu"\ndtype = "fp32"\nkv_bytes = "1MiB"\n'
    )
    argv = [sys.executable, "-m", "gpu_svc", "--config", str(config)]
    done = subprocess.run(argv, env=own_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
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
