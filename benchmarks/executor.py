"""What the executor costs beside its kernels: Python and launches of an iteration with 32 decodes, per layer.

The model has 30 layers like the default one, and so little in each that its kernels take next to nothing: hidden size
32, one head of 16, a window of one token. What an iteration takes, over its layers, is then an upper bound of the
overhead. Twice as many layers tell what of it each layer adds, and what an iteration costs whatever its layers.

    python benchmarks/executor.py [--publish]
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from results import Row, arguments, publish

from gpu_svc.executor import Executor
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.weights import LayerWeights, MlpWeights, NormWeights
from svc_common.model.spec import ModelSpec, RopeSpec
from svc_common.plan import IterationPlan, Mode, NewSequence, PrefillChunk, SubBatch, Tier

NUM_LAYERS = 30
NUM_SEQUENCES = 32
PROMPT_TOKENS = 16
BLOCK_TOKENS = 16
WARM_UP, MEASURED = 20, 200
TARGET_US = 40.0

SPEC = ModelSpec(
    architecture="llama",
    num_layers=NUM_LAYERS,
    hidden_size=32,
    intermediate_size=16,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=64,
    context_tokens=1024,
    norm_eps=1e-5,
    rope=RopeSpec(1e4, 16),
    tie_embeddings=True,
    eos_token_ids=(),
    sliding_window=1,
    checkpoint_dtype="fp32",
)


def make_decoder(spec: ModelSpec) -> CpuDecoder:
    """Random weights."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, heads = spec.num_q_heads * head_dim, spec.num_q_heads + 2 * spec.num_kv_heads

    def layers() -> Iterator[LayerWeights]:
        for _ in range(spec.num_layers):
            yield LayerWeights(
                attention_norm=NormWeights(torch.ones(hidden)),
                qkv=noise(heads * head_dim, hidden),
                output=noise(hidden, q_size),
                mlp_norm=NormWeights(torch.ones(hidden)),
                mlp=MlpWeights(noise(2 * inner, hidden), noise(hidden, inner)),
            )

    embedding, final_norm = noise(spec.vocab_size, hidden), NormWeights(torch.ones(hidden))
    return CpuDecoder.packed(spec, torch.float32, embedding, layers(), final_norm, None)


def iteration_s(num_layers: int) -> float:
    """Median seconds of an iteration with NUM_SEQUENCES decodes on the GPU tier, plan to result."""
    spec = replace(SPEC, num_layers=num_layers)
    shape = KvShape.of(spec, BLOCK_TOKENS, torch.float32)
    total_tokens = PROMPT_TOKENS + WARM_UP + MEASURED + 1
    blocks_each = -(-total_tokens // BLOCK_TOKENS)
    executor = Executor(make_decoder(spec), shape, NUM_SEQUENCES * blocks_each * shape.block_bytes)
    executor.open_epoch(1, Limits(NUM_SEQUENCES, NUM_SEQUENCES * PROMPT_TOKENS, total_tokens), None)
    ids = tuple(range(NUM_SEQUENCES))
    prompt = tuple(range(PROMPT_TOKENS))
    new = tuple(NewSequence(i, prompt, Tier.GPU, tuple(range(i * blocks_each, (i + 1) * blocks_each))) for i in ids)
    chunks = tuple(PrefillChunk(i, 0, PROMPT_TOKENS) for i in ids)
    seconds = []
    for number in range(1, WARM_UP + MEASURED + 1):
        plan = (
            IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=new, sub_batches=(SubBatch(prefills=chunks),))
            if number == 1
            else IterationPlan(1, number, Mode.GPU_ONLY, sub_batches=(SubBatch(gpu_decodes=ids),))
        )
        start = time.perf_counter()
        result = executor.run(plan)
        if number > WARM_UP:
            seconds.append(time.perf_counter() - start)
        assert result.error is None, result.error_message
    executor.close_epoch()
    return statistics.median(seconds)


def main() -> None:
    args = arguments("Python and launch overhead of the executor on device cpu.").parse_args()
    torch.set_num_threads(1)  # Helpers have nothing to do here.
    once_s, twice_s = iteration_s(NUM_LAYERS), iteration_s(2 * NUM_LAYERS)
    layer_us = (twice_s - once_s) / NUM_LAYERS * 1e6
    rest_us = once_s * 1e6 - NUM_LAYERS * layer_us
    total_us = once_s / NUM_LAYERS * 1e6
    rows = [
        Row(
            "overhead per layer",
            total_us / TARGET_US,
            f"iteration / layers / {TARGET_US:g} us",
            1.0,
            at_least=False,
            detail=f"{total_us:.1f} us; {layer_us:.1f} us by each layer, {rest_us:.0f} us by each iteration",
        )
    ]
    about = (
        f"A batch of {NUM_SEQUENCES} decodes on device cpu, one thread, with a model of {NUM_LAYERS} layers so small "
        "that its kernels take next to nothing: an upper bound of what Python and launches cost."
    )
    publish("executor", "Executor overhead", "make bench-executor", about, rows, args.publish)


if __name__ == "__main__":
    main()
