"""Seconds of one layer on either processor, for one group of a batch.

Linear operations take max(FLOP / FLOP/s(tokens), bytes of the weights met / bandwidth), attention of a prompt
max(FLOP / FLOP/s, bytes of KV / bandwidth), that of a decode its bytes of KV / bandwidth (shared/papers.md, FlexInfer:
the roofline of one layer, with operations that follow one another summed).
"""

from dataclasses import dataclass

from planner_svc.policy.figures import DecoderFigures, LayerFigures
from planner_svc.policy.machine import Machine, Processor


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What one group of sequences asks of each layer in one iteration."""

    num_tokens: float
    """That pass the linear operations."""
    num_outputs: float
    """Sequences that get a token."""
    num_prompts: float = 0.0
    """Whole prompts of `prompt_tokens` that the group's chunks amount to."""
    prompt_tokens: int = 0
    num_decodes: float = 0.0
    num_host_decodes: float = 0.0
    """Of these, decodes whose KV of the GPU's layers lies on the host."""
    context_tokens: float = 0.0
    """Of each decode."""


def linear_s(layer: LayerFigures, processor: Processor, num_tokens: float) -> float:
    """Of all linear operations, experts included."""
    if num_tokens <= 0:
        return 0.0
    dense_s = max(
        processor.linear.seconds(num_tokens, 2 * layer.dense_parameters), layer.dense_bytes / processor.bytes_per_s
    )
    met = layer.experts_met(num_tokens)
    if met <= 0:
        return dense_s + processor.layer_s
    each = num_tokens * layer.experts_per_token / met
    compute_s = met * processor.linear.seconds(each, 2 * layer.expert_parameters)
    return dense_s + max(compute_s, met * layer.expert_bytes / processor.bytes_per_s) + processor.layer_s


def attention_s(layer: LayerFigures, processor: Processor, load: GroupLoad, num_decodes: float) -> float:
    """Of the group's prompts, and of so many of its decodes."""
    prompts_s = 0.0
    if load.num_prompts:
        flop = load.num_prompts * layer.prompt_pairs(load.prompt_tokens) * layer.pair_flop
        num_bytes = load.num_prompts * load.prompt_tokens * layer.kv_bytes_per_token
        prompts_s = max(flop / processor.attention_flops_per_s, num_bytes / processor.kv_bytes_per_s)
    return prompts_s + decode_attention_s(layer, processor, num_decodes, load.context_tokens)


def decode_attention_s(layer: LayerFigures, processor: Processor, num_decodes: float, context_tokens: float) -> float:
    """K and V of all tokens they see are read once."""
    if num_decodes <= 0:
        return 0.0
    return num_decodes * layer.seen_tokens(context_tokens) * layer.kv_bytes_per_token / processor.kv_bytes_per_s


def head_s(model: DecoderFigures, machine: Machine, num_outputs: float) -> float:
    """Of the output head, which lies on the GPU."""
    if num_outputs <= 0:
        return 0.0
    curve = machine.head or machine.gpu.linear
    compute_s = curve.seconds(num_outputs, 2 * model.head_parameters)
    return max(compute_s, model.head_bytes / machine.gpu.bytes_per_s)
