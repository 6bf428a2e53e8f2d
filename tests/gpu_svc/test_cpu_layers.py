"""The same tokens wherever layers are computed: the first X of decodes and P of prompts in cpu_attn_svc."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import BLOCK_TOKENS, LIMITS, Driver, load_decoder, load_torch_decoder
from support.reference import Reference, Verdict

from cpu_attn_svc.host import AttentionHost, WantedLayers
from gpu_svc.cpu_attention_client import region_shape
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import KvShape
from svc_common.config import CpuAttnConfig
from svc_common.decoder.decoder import Decoder
from svc_common.model.store import ModelFiles
from svc_common.plan import NewSequence, PrefillChunk, SubBatch, Swap, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import TensorPlane

GetFiles = Callable[[str], ModelFiles]
GetReference = Callable[[str], Reference]
MakeDriver = Callable[..., Driver]

KV_BYTES = 8 * 2**20
PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 7)}
VARIANTS = ("mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "qwen2-moe")
# (layers of prompts, layers of decodes) of 3 in all
ALL_SPLITS = [(p, x) for x in (1, 2, 3) for p in range(x + 1)]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where layer files are written, each once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_layers_driver(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDriver]:
    """Drivers under a policy, beside the service's own code in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    hosts: list[AttentionHost] = []
    drivers: list[Driver] = []

    def make(
        files: ModelFiles,
        prompt_layers: int,
        decode_layers: int,
        num_gpu_blocks: int = 100,
        decoder: Decoder | None = None,
        host_kv_dtype: torch.dtype | None = None,
    ) -> Driver:
        decoder = decoder or load_decoder(files)
        spec = decoder.spec
        policy = ExecutionPolicy(spec.num_layers - prompt_layers, prompt_layers, decode_layers)
        shape = KvShape.of(spec, BLOCK_TOKENS, decoder.dtype, host_kv_dtype)
        executor = Executor(decoder, shape, num_gpu_blocks * shape.block_bytes, host_kv_bytes=KV_BYTES)
        region = region_shape(decoder, shape, LIMITS, policy, executor.num_gpu_blocks(policy))
        config = CpuAttnConfig(kv_bytes=KV_BYTES, num_threads=1, segment_dir=tmp_path)
        host = AttentionHost(config, 1, [], str(files.directory))
        hosts.append(host)
        opened = host.open_region(1, region, WantedLayers("fp32", spec.digest))
        plane = TensorPlane.attach(opened.path, opened.endpoint, 1, region)
        drivers.append(Driver(executor, HostTier(plane, 1), LIMITS, policy))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.executor.close_epoch()
    for host in hosts:
        host.close_region()


def assert_reference_tokens(reference: Reference, driver: Driver, ids: Any = tuple(PROMPTS)) -> None:
    verdict = Verdict()
    for sequence_id in ids:
        reference.judge(PROMPTS[sequence_id], driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


def serve_all_kinds(driver: Driver) -> None:
    """Both tiers, chunked prompts beside decodes, two sub-batches, a prompt in both of them, swaps both ways."""
    tiers = {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST, 4: Tier.GPU}
    for sequence_id, tier in tiers.items():
        driver.prefill(sequence_id, PROMPTS[sequence_id], tier, chunk_tokens=9 + sequence_id, room_tokens=30)
    for step in range(4):
        second = SubBatch(cpu_decodes=(2,)) if step % 2 else SubBatch()
        driver.run(SubBatch(gpu_decodes=(1, 4), cpu_decodes=(3,)), second)
    new = tuple(
        NewSequence(i, np.array(PROMPTS[i], "i4"), tier, driver.blocks(tier, len(PROMPTS[i]) + 30))
        for i, tier in ((5, Tier.HOST), (6, Tier.GPU))
    )
    # 58 tokens of 5; 69 of 6, in each iteration some in both sub-batches.
    for start, middle, end in ((0, 13, 30), (30, 37, 58)):
        driver.run(
            SubBatch((PrefillChunk(5, start, end - start), PrefillChunk(6, start, middle - start)), gpu_decodes=(1, 4)),
            SubBatch((PrefillChunk(6, middle, end - middle),), cpu_decodes=(2, 3)),
            new_sequences=() if start else new,
        )
    # A sub-batch of prompts need not wait for the decodes of the other.
    driver.run(SubBatch(gpu_decodes=(4, 1), cpu_decodes=(5,)), SubBatch((PrefillChunk(6, 58, 11),)))
    to_host = {i: driver.blocks(Tier.HOST, len(PROMPTS[i]) + 30) for i in (1, 6)}
    to_gpu = {i: driver.blocks(Tier.GPU, len(PROMPTS[i]) + 30) for i in (2, 5)}
    swaps = (
        *(Swap(i, Tier.HOST, blocks) for i, blocks in to_host.items()),
        *(Swap(i, Tier.GPU, blocks) for i, blocks in to_gpu.items()),
    )
    driver.run(SubBatch(gpu_decodes=(5, 4, 2), cpu_decodes=(3, 1)), SubBatch(cpu_decodes=(6,)), swaps=swaps)
    for _ in range(3):
        driver.run(SubBatch(gpu_decodes=(2, 5, 4)), SubBatch(cpu_decodes=(1, 3, 6)))


@pytest.mark.parametrize(("prompt_layers", "decode_layers"), ALL_SPLITS)
def test_every_split(
    prompt_layers: int,
    decode_layers: int,
    checkpoint: GetFiles,
    reference: GetReference,
    make_layers_driver: MakeDriver,
) -> None:
    driver = make_layers_driver(checkpoint("llama"), prompt_layers, decode_layers)
    serve_all_kinds(driver)
    assert_reference_tokens(reference("llama"), driver)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("split", ["prompts_on_gpu", "partition", "cpu_only"])
def test_every_family(
    variant: str, split: str, checkpoint: GetFiles, reference: GetReference, make_layers_driver: MakeDriver
) -> None:
    files = checkpoint(variant)
    decoder = load_decoder(files)
    num_layers = decoder.spec.num_layers
    splits = {"prompts_on_gpu": (0, 1), "partition": (num_layers // 2,) * 2, "cpu_only": (num_layers,) * 2}
    driver = make_layers_driver(files, *splits[split], decoder=decoder)
    serve_all_kinds(driver)
    assert_reference_tokens(reference(variant), driver)


@pytest.mark.parametrize(("prompt_layers", "decode_layers"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_beside_torch(
    prompt_layers: int,
    decode_layers: int,
    checkpoint: GetFiles,
    reference: GetReference,
    make_layers_driver: MakeDriver,
) -> None:
    """The decoder of a GPU makes new hidden states where the CPU's overwrites them."""
    files = checkpoint("llama")
    driver = make_layers_driver(files, prompt_layers, decode_layers, decoder=load_torch_decoder(files))
    serve_all_kinds(driver)
    assert_reference_tokens(reference("llama"), driver)
