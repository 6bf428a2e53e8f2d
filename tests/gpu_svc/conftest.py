"""Checkpoints, executors and drivers for the tests of gpu_svc; what they are made of is in support/gpu.py."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.gpu import BLOCK_TOKENS, LIMITS, Driver, save_checkpoint
from support.reference import Reference

from gpu_svc.attention import CpuAttention as CpuBackend
from gpu_svc.attention import TorchAttention, make_backend
from gpu_svc.cpu_attention_client import attach_pool, region_shape
from gpu_svc.executor import Executor
from gpu_svc.graph_options import GraphOptions
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from svc_common.decoder.decoder import Decoder
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles, resolve
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import RegionShape

MakeDriver = Callable[..., Driver]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tiny tensors gain nothing from more, and cpu_attn_svc wants the other core."""
    torch.set_num_threads(1)


@pytest.fixture
def make_driver() -> Iterator[MakeDriver]:
    """Drivers whose executors are closed at the end."""
    made: list[Driver] = []

    def make(
        decoder: Decoder,
        num_gpu_blocks: int = 200,
        cpu_attention: "CpuAttention | tuple[CpuAttention, ...]" = (),
        block_tokens: int = BLOCK_TOKENS,
        limits: Limits = LIMITS,
        kv_dtype: torch.dtype | None = None,
        host_kv_dtype: torch.dtype | None = None,
        policy: ExecutionPolicy | None = None,
        graphs: GraphOptions | None = None,
    ) -> Driver:
        shape = KvShape.of(decoder.spec, block_tokens, kv_dtype or decoder.dtype, host_kv_dtype)
        services = (cpu_attention,) if isinstance(cpu_attention, CpuAttention) else cpu_attention
        host_kv_bytes = sum(service.kv_bytes for service in services)
        gpu_kv_bytes = num_gpu_blocks * shape.block_bytes
        executor = Executor(decoder, shape, gpu_kv_bytes, host_kv_bytes=host_kv_bytes, graphs=graphs)
        region = region_shape(decoder, shape, limits, policy, executor.num_gpu_blocks(policy))
        host = HostTier([service.attach(decoder, region) for service in services]) if services else None
        driver = Driver(executor, host, limits, policy)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.executor.close_epoch()


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, as on device cpu, and torch's own operations, as on a GPU."""

    def make_torch(spec: ModelSpec, shape: KvShape, dtype: torch.dtype, device: torch.device) -> TorchAttention:
        assert isinstance(make_backend(spec, shape, dtype, device), CpuBackend)
        return TorchAttention(spec, shape.block_tokens, dtype, device)

    if request.param == "torch":
        monkeypatch.setattr("gpu_svc.epoch.make_backend", make_torch)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    """A variant's files; each is written once."""
    written: dict[str, ModelFiles] = {}

    def get(variant: str) -> ModelFiles:
        if variant not in written:
            written[variant] = save_checkpoint(variant, tmp_path_factory.mktemp(variant))
        return written[variant]

    return get


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], ModelFiles]) -> Callable[[str], Reference]:
    """transformers on a variant's files."""
    return lambda variant: Reference(checkpoint(variant))


@dataclass
class CpuAttention:
    """A real cpu_attn_svc process; epochs are counted up over all tests that share it."""

    process: subprocess.Popen[bytes]
    address: str
    epoch: int = 0

    kv_bytes: int = 0

    def attach(self, decoder: Decoder, region: RegionShape) -> HostPool:
        self.epoch += 1
        return asyncio.run(attach_pool(self.address, self.epoch, region, decoder))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def start_cpu_attention() -> Iterator[Callable[..., CpuAttention]]:
    """Starts processes with a pool of some size; all are ended with the session."""
    started: list[CpuAttention] = []
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:

        def start(kv_bytes: int = 4 * 2**20) -> CpuAttention:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            config = Path(directory) / f"{len(started)}.toml"
            config.write_text(
                f'[cpu_attn]\nlisten = "{address}"\nkv_bytes = {kv_bytes}\nnum_threads = 1\n'
                f'segment_dir = "{directory}"\n'
            )
            process = subprocess.Popen([sys.executable, "-m", "cpu_attn_svc", "--config", str(config)])
            started.append(CpuAttention(process, address, kv_bytes=kv_bytes))
            with socket.socket() as probe:
                while probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))):
                    assert process.poll() is None, "cpu_attn_svc did not start"
            return started[-1]

        yield start
        for service in started:
            with suppress(ProcessLookupError):
                service.process.terminate()
            service.process.wait(10)


@pytest.fixture(scope="session")
def cpu_attention(start_cpu_attention: Callable[[], CpuAttention]) -> CpuAttention:
    return start_cpu_attention()
