"""The same tokens wherever layers are computed: the first X of decodes and P of prompts in cpu_attn_svc."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import BLOCK_TOKENS, LIMITS, Driver, load_decoder, load_placed, load_torch_decoder
from support.quantised import rounded_reference
from support.reference import Reference, Verdict, load_transformers

from cpu_attn_svc.host import AttentionHost, LayersUnavailableError, WantedLayers
from gpu_svc.cpu_attention_client import region_shape
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.kv_cache import KvShape
from gpu_svc.lower_pool import num_gpu_blocks
from svc_common.config import CpuAttnConfig
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.dtypes import DTYPES, dtype_name
from svc_common.model.store import ModelFiles
from svc_common.model.weight_types import WeightTypeName
from svc_common.plan import CohortStep, ExecutionError, NewSequence, PrefillChunk, Sampling, SubBatch, Swap, Tier
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import RegionShape, TensorPlane
from svc_common.trace import TraceKind

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
        resident_layers: int | None = None,
    ) -> Driver:
        decoder = decoder or load_decoder(files)
        spec = decoder.spec
        if resident_layers is None:
            resident_layers = spec.num_layers - prompt_layers
        policy = ExecutionPolicy(resident_layers, prompt_layers, decode_layers)
        shape = KvShape.of(spec, BLOCK_TOKENS, decoder.dtype, host_kv_dtype)
        executor = Executor(decoder, shape, num_gpu_blocks * shape.block_bytes, host_kv_bytes=KV_BYTES)
        region = region_shape(decoder, shape, LIMITS, policy, executor.num_gpu_blocks(policy))
        config = CpuAttnConfig(kv_bytes=KV_BYTES, num_threads=1, segment_dir=tmp_path)
        host = AttentionHost(config, "cpu_attn", 1, [], str(files.directory))
        hosts.append(host)
        opened = host.open_region(1, region, WantedLayers(dtype_name(decoder.weight_dtype), spec.digest))
        plane = TensorPlane.attach(opened.path, opened.endpoint, 1, region)
        drivers.append(Driver(executor, HostTier([HostPool(plane, 1)]), LIMITS, policy))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.executor.close()
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


@pytest.mark.parametrize(
    ("resident_layers", "prompt_layers", "decode_layers"), [(4, 0, 3), (2, 0, 3), (1, 2, 4), (3, 3, 3), (0, 7, 7)]
)
def test_beside_streamed_layers(
    resident_layers: int,
    prompt_layers: int,
    decode_layers: int,
    checkpoint: GetFiles,
    reference: GetReference,
    make_layers_driver: MakeDriver,
    cache_dir: Path,
) -> None:
    """Of 7 layers: those of prompts alone, or some above the CPU's too, come from host memory in each iteration."""
    files = checkpoint("llama-deep")
    decoder = load_placed(files, cache_dir / "neoflex" / "layers")
    driver = make_layers_driver(files, prompt_layers, decode_layers, decoder=decoder, resident_layers=resident_layers)
    streamed = 7 - resident_layers - prompt_layers
    assert len(driver.executor.streamed_layers) == max(0, streamed)
    serve_all_kinds(driver)
    assert_reference_tokens(reference("llama-deep"), driver)
    # As many as there are buffers stay there once they have come.
    assert (sum(result.timings.weight_bytes > 0 for result in driver.results) > 3) == (streamed > 2)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(("resident_layers", "prompt_layers", "decode_layers"), [(7, 0, 3), (2, 1, 3), (0, 7, 7)])
def test_quantised_layers(
    resident_layers: int,
    prompt_layers: int,
    decode_layers: int,
    dtype: WeightTypeName,
    checkpoint: GetFiles,
    make_layers_driver: MakeDriver,
    cache_dir: Path,
) -> None:
    """From one layer file of that type some layers are streamed, others computed where they are mapped."""
    files = checkpoint("llama-deep")
    decoder = load_placed(files, cache_dir / "neoflex" / "layers", DTYPES[dtype])
    driver = make_layers_driver(files, prompt_layers, decode_layers, decoder=decoder, resident_layers=resident_layers)
    assert len(driver.executor.streamed_layers) == 7 - resident_layers - prompt_layers
    serve_all_kinds(driver)
    assert_reference_tokens(rounded_reference(files, dtype), driver)


@pytest.mark.parametrize(("prompt_layers", "decode_layers"), [(0, 2), (2, 2), (3, 3)])
def test_kv_in_int8(
    prompt_layers: int, decode_layers: int, checkpoint: GetFiles, make_layers_driver: MakeDriver
) -> None:
    """The lower pool has the host's type: the same tokens whoever computes the layers over it."""
    tokens = []
    for split in ((prompt_layers, decode_layers), (0, decode_layers)):
        driver = make_layers_driver(checkpoint("llama"), *split, host_kv_dtype=torch.int8)
        for sequence_id in (1, 2):
            driver.prefill(sequence_id, PROMPTS[sequence_id], Tier.HOST, room_tokens=20)
        for _ in range(6):
            driver.run(SubBatch(cpu_decodes=(1, 2)))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def test_a_change_of_policy_amid_answers(
    checkpoint: GetFiles, reference: GetReference, make_layers_driver: MakeDriver
) -> None:
    """What the planner does: each epoch computes prompt and tokens so far again, and goes on."""
    answers: dict[int, list[int]] = {1: [], 2: []}
    for split in ((0, 1), (3, 3), (0, 3), (1, 2)):
        driver = make_layers_driver(checkpoint("llama"), *split)
        for sequence_id, tier in ((1, Tier.GPU), (2, Tier.HOST)):
            driver.prefill(sequence_id, PROMPTS[sequence_id] + answers[sequence_id], tier)
        for _ in range(3):
            driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(2,)))
        for sequence_id, tokens in driver.tokens.items():
            answers[sequence_id] += tokens
    verdict = Verdict()
    for sequence_id, tokens in answers.items():
        assert len(tokens) == 16
        reference("llama").judge(PROMPTS[sequence_id], tokens, verdict)
    assert not verdict.mismatches


def test_both_processors_work_at_once(checkpoint: GetFiles, make_layers_driver: MakeDriver) -> None:
    """The trace names who computed what: prompts' layers lie beside the decodes' on the CPU."""
    driver = make_layers_driver(checkpoint("llama"), 0, 2)
    driver.prefill(1, PROMPTS[1], room_tokens=20)
    driver.prefill(2, PROMPTS[2], Tier.HOST, room_tokens=20)
    new = NewSequence(6, np.array(PROMPTS[6], "i4"), Tier.GPU, driver.blocks(Tier.GPU, 90))
    work = SubBatch((PrefillChunk(6, 0, 69),), gpu_decodes=(1,), cpu_decodes=(2,))
    trace = driver.run(work, new_sequences=(new,), trace=True).trace
    assert trace is not None
    gpu, cpu = list(trace.events(trace.gpu)), list(trace.events(*trace.cpu))
    work_of_cpu = [(event.kind, event.layer) for event in cpu if event.kind is not TraceKind.CPU_WAIT]
    assert work_of_cpu == [(TraceKind.CPU_LAYER, 0), (TraceKind.CPU_LAYER, 1), (TraceKind.CPU_ATTEND, 2)]
    prompts = [event for event in gpu if event.kind is TraceKind.RUN_PROMPTS]
    assert [event.layer for event in prompts] == [0, 1]
    handed_over = next(event for event in gpu if event.kind is TraceKind.SUBMIT)
    first_layer = next(event for event in cpu if event.kind is TraceKind.CPU_LAYER)
    # Neither waits for the other's end.
    assert handed_over.end_ns <= prompts[0].start_ns
    assert handed_over.end_ns <= first_layer.end_ns
    assert prompts[-1].end_ns <= next(event for event in gpu if event.kind is TraceKind.WAIT).end_ns


def test_what_is_moved_is_counted(checkpoint: GetFiles, make_layers_driver: MakeDriver) -> None:
    driver = make_layers_driver(checkpoint("llama"), 1, 2)
    shape = driver.executor.kv_shape
    driver.prefill(1, PROMPTS[1], room_tokens=20)
    driver.prefill(2, PROMPTS[2], Tier.HOST, room_tokens=20)
    layer_bytes = shape.host_token_bytes // 3
    # Of a GPU sequence's prompt layer 1, of a host sequence's also layer 2.
    written = [len(PROMPTS[1]) * layer_bytes, len(PROMPTS[2]) * 2 * layer_bytes]
    assert [result.swapped_out_bytes for result in driver.results] == written
    swap = Swap(1, Tier.HOST, driver.blocks(Tier.HOST, 40))
    result = driver.run(SubBatch(cpu_decodes=(1,)), swaps=(swap,))
    assert result.swapped_out_bytes == -(-len(PROMPTS[1]) // BLOCK_TOKENS) * shape.host_block_bytes


SOME_SPLITS = pytest.mark.parametrize(("prompt_layers", "decode_layers"), [(0, 2), (1, 3), (2, 2), (3, 3)])


@SOME_SPLITS
def test_sequences_that_begin_in_the_same_blocks(
    prompt_layers: int,
    decode_layers: int,
    checkpoint: GetFiles,
    reference: GetReference,
    make_layers_driver: MakeDriver,
) -> None:
    """One of two owners moves to the host; its copy of the shared blocks' lower parts serves a third."""
    driver = make_layers_driver(checkpoint("llama"), prompt_layers, decode_layers)
    beginning = PROMPTS[6][: 3 * BLOCK_TOKENS]
    prompts = {1: [*beginning, 5, 7], 2: [*beginning, 11], 3: [*beginning, 5, 7, 13, 17, 19, 23]}

    def sharing(sequence_id: int, tier: Tier, shared: np.ndarray) -> tuple[NewSequence, PrefillChunk]:
        prompt = prompts[sequence_id]
        blocks = np.concatenate([shared, driver.blocks(tier, len(prompt) + 20 - len(beginning))])
        new = NewSequence(sequence_id, np.array(prompt, "i4"), tier, blocks, num_cached_tokens=len(beginning))
        return new, PrefillChunk(sequence_id, len(beginning), len(prompt) - len(beginning))

    blocks = driver.blocks(Tier.GPU, len(prompts[1]) + 20)
    first = NewSequence(1, np.array(prompts[1], "i4"), Tier.GPU, blocks)
    driver.run(SubBatch((PrefillChunk(1, 0, len(prompts[1])),)), new_sequences=(first,))
    second, rest = sharing(2, Tier.GPU, blocks[:3])
    driver.run(SubBatch((rest,), gpu_decodes=(1,)), new_sequences=(second,))
    on_host = driver.blocks(Tier.HOST, len(prompts[1]) + 20)
    driver.run(SubBatch(gpu_decodes=(2,), cpu_decodes=(1,)), swaps=(Swap(1, Tier.HOST, on_host),))
    third, rest = sharing(3, Tier.HOST, on_host[:3])
    driver.run(SubBatch((rest,), gpu_decodes=(2,), cpu_decodes=(1,)), new_sequences=(third,))
    for _ in range(6):
        driver.run(SubBatch(gpu_decodes=(2,)), SubBatch(cpu_decodes=(3, 1)))
    verdict = Verdict()
    for sequence_id, prompt in prompts.items():
        reference("llama").judge(prompt, driver.tokens[sequence_id], verdict, str(sequence_id))
    assert not verdict.mismatches, str(verdict)


@SOME_SPLITS
def test_log_probabilities_of_prompts(
    prompt_layers: int, decode_layers: int, checkpoint: GetFiles, make_layers_driver: MakeDriver
) -> None:
    """Of one on each tier, beside each other in two sub-batches, against transformers."""
    files, ids = checkpoint("llama"), (5, 6)
    driver = make_layers_driver(files, prompt_layers, decode_layers)
    driver.prefill(1, PROMPTS[1])
    tiers = {5: Tier.HOST, 6: Tier.GPU}
    asked = Sampling(num_prompt_logprobs=0)
    new = tuple(
        NewSequence(i, np.array(PROMPTS[i], "i4"), tiers[i], driver.blocks(tiers[i], len(PROMPTS[i]) + 4), asked)
        for i in ids
    )
    first = SubBatch((PrefillChunk(5, 0, 58), PrefillChunk(6, 0, 30)), gpu_decodes=(1,))
    result = driver.run(first, SubBatch((PrefillChunk(6, 30, 39),)), new_sequences=new)
    assert [(i, part.start) for i, part in result.prompt_logprobs] == [(5, 1), (6, 1), (6, 31)]
    model = load_transformers(files)
    for sequence_id in ids:
        prompt = torch.tensor([PROMPTS[sequence_id]])
        with torch.inference_mode():
            expected = torch.log_softmax(model(prompt).logits[0, :-1], -1).gather(1, prompt[0, 1:, None])[:, 0]
        chosen = [value for i, part in result.prompt_logprobs if i == sequence_id for value in part.chosen]
        assert chosen == pytest.approx(expected.tolist(), abs=2e-4)


def test_no_cohort_beside_cpu_layers(checkpoint: GetFiles, make_layers_driver: MakeDriver) -> None:
    driver = make_layers_driver(checkpoint("llama"), 1, 1)
    driver.prefill(1, PROMPTS[1], Tier.HOST)
    result = driver.try_run(cohort=CohortStep((1,), 0, 3))
    assert result.error is ExecutionError.INVALID_PLAN
    assert "a cohort, but the CPU computes layers" in result.error_message


def test_a_service_that_ends_amid_its_layers(checkpoint: GetFiles, make_layers_driver: MakeDriver) -> None:
    driver = make_layers_driver(checkpoint("llama"), 3, 3)
    driver.prefill(1, PROMPTS[1])
    assert driver.host is not None
    driver.host.close()
    result = driver.try_run(SubBatch(gpu_decodes=(1,)))
    assert result.error is ExecutionError.CPU_ATTENTION_LOST


def test_layers_of_another_model_are_refused(checkpoint: GetFiles, tmp_path: Path, cache_dir: Path) -> None:
    spec = load_decoder(checkpoint("llama")).spec
    config = CpuAttnConfig(kv_bytes=KV_BYTES, num_threads=1, segment_dir=tmp_path)
    host = AttentionHost(config, "cpu_attn", 1, [], str(checkpoint("qwen3").directory))
    shape = RegionShape(
        num_layers=3,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=8,
        block_tokens=4,
        kv_dtype="fp32",
        exchange_dtype="fp32",
        max_sequences=4,
        softmax_scale=1.0,
        num_cpu_layers=1,
        hidden_size=48,
        max_tokens=8,
    )
    with pytest.raises(LayersUnavailableError, match="is another model than the executor's: digest"):
        host.open_region(1, shape, WantedLayers("fp32", spec.digest))


@pytest.mark.parametrize(
    ("gpu_blocks", "host_blocks", "cpu_layers", "expected"),
    [
        (100, 300, 0, 100),
        # Of 300 host blocks' bytes a quarter goes to the lower halves of GPU blocks: 150 of them; 200 fit on the GPU.
        (100, 300, 2, 150),
        # Now the GPU's memory is what binds: it holds 400 blocks without three of four layers.
        (100, 3000, 3, 129),
        (100, 30000, 2, 199),
        # All layers on the CPU: a quarter of all blocks.
        (100, 300, 4, 75),
        (0, 300, 2, 0),
    ],
)
def test_blocks_of_the_gpu_tier(gpu_blocks: int, host_blocks: int, cpu_layers: int, expected: int) -> None:
    shape = KvShape(4, 2, 4, 8, torch.float32, torch.float32)
    sizes = [num * shape.block_bytes for num in (gpu_blocks, host_blocks)]
    assert num_gpu_blocks(shape, *sizes, cpu_layers) == expected
