"""A model and a machine of round figures, whose times can be worked out by hand."""

from dataclasses import replace

from planner_svc.policy import DecoderFigures, LayerFigures, Link, Machine, PolicyEstimator, Processor, RateCurve
from planner_svc.policy import RequestMix as Mix

LAYER = LayerFigures(
    dense_parameters=500_000_000,
    dense_bytes=1_000_000_000,
    expert_parameters=0,
    expert_bytes=0,
    num_experts=0,
    experts_per_token=0,
    kv_bytes_per_token=100_000,
    pair_flop=1_000_000,
    window=0,
)
MIX = Mix(prompt_tokens=100, output_tokens=11, num_sequences=2, batch_tokens=10_000)


def model(num_layers: int = 4, layer: LayerFigures = LAYER) -> DecoderFigures:
    """4 GB of layers, and 1 GB of vocabulary that is all head."""
    return DecoderFigures(
        layers=(layer,) * num_layers,
        hidden_bytes=10_000,
        head_parameters=500_000_000,
        head_bytes=1_000_000_000,
        vocabulary_bytes=1_000_000_000,
        activation_bytes_per_token=100_000,
        logit_bytes=1_000_000,
    )


def machine(
    gpu_bytes: float = 100e9,
    host_bytes: float = 100e9,
    link_per_s: float = 5e9,
    gpu_per_s: float = 100e9,
    cpu_per_s: float = 10e9,
    cpu_flops: float = 1e12,
    hop_s: float = 0.001,
    both_share: float = 0.8,
) -> Machine:
    """The GPU reads ten times as fast as the CPU and computes a hundred times as fast."""
    gpu = Processor(RateCurve(((1, 1e14),)), 1e13, gpu_per_s, gpu_per_s, int(gpu_bytes))
    return Machine(
        name="box",
        gpu=gpu,
        cpu=replace(
            gpu,
            linear=RateCurve(((1, cpu_flops),)),
            attention_flops_per_s=1e11,
            bytes_per_s=cpu_per_s,
            kv_bytes_per_s=cpu_per_s,
            memory_bytes=int(host_bytes),
        ),
        link=Link(link_per_s, link_per_s, both_share * link_per_s, hop_s),
        iteration_s=0.002,
    )


def estimator(num_layers: int = 4, **figures: float) -> PolicyEstimator:
    return PolicyEstimator(model(num_layers), machine(**figures))
