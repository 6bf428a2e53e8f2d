"""A machine as its executor measured it: operations' tables instead of published figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.policy.figures import DecoderFigures, LayerFigures
from planner_svc.policy.machine import Link, Machine, Processor, RateCurve


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """What the two services have, and what weights take there as they are kept."""

    gpu_bytes: int
    """For weights, buffers and KV."""
    gpu_kv_bytes: int
    host_bytes: int
    host_kv_bytes: int
    layer_bytes: int
    """Of the largest layer."""
    other_bytes: int
    """Embedding, head, norms."""


def measured_figures(model: DecoderFigures, memory: ServiceMemory) -> DecoderFigures:
    """The model as the services keep it: each layer as large as the largest, activations in no budget.

    A layer's experts count as what they were measured at: `linear` of the tables holds them.
    """
    layers = []
    for layer in model.layers:
        met = layer.experts_per_token * layer.expert_parameters
        layers.append(
            replace(
                layer,
                dense_parameters=layer.dense_parameters + met,
                dense_bytes=memory.layer_bytes,
                expert_parameters=0,
                expert_bytes=0,
                num_experts=0,
                experts_per_token=0,
            )
        )
    return replace(
        model,
        layers=tuple(layers),
        vocabulary_bytes=memory.other_bytes,
        activation_bytes_per_token=0,
        logit_bytes=0,
    )


def measured_machine(tables: OperationTables, model: DecoderFigures, memory: ServiceMemory) -> Machine:
    """`model` by `measured_figures`. Raises ValueError where the tables know no layers on the CPU.

    Times of linear operations and the head are those of the tables between their points; attention counts by the rate
    of the largest point measured.
    """
    if not (tables.linear and tables.cpu_linear):
        raise ValueError("the tables know no layers on the CPU")
    layer = model.layers[0]
    gpu = Processor(
        linear=_curve(tables.linear, layer.dense_parameters),
        attention_flops_per_s=_prompt_rate(tables.prefill, layer),
        bytes_per_s=inf,
        kv_bytes_per_s=_decode_rate(tables.gpu_decode, layer),
        memory_bytes=memory.gpu_bytes,
        kv_bytes=memory.gpu_kv_bytes,
    )
    cpu = Processor(
        linear=_curve(tables.cpu_linear, layer.dense_parameters),
        attention_flops_per_s=_prompt_rate(tables.cpu_prefill, layer),
        bytes_per_s=inf,
        kv_bytes_per_s=_decode_rate(tables.cpu_decode, layer),
        memory_bytes=memory.host_bytes,
        kv_bytes=memory.host_kv_bytes,
    )
    link_per_s = tables.link_bytes_per_s or inf
    link = Link(link_per_s, link_per_s, link_per_s, tables.cpu_signal_s)
    head = _curve(tables.head, model.head_parameters) if tables.head else None
    return Machine("this machine", gpu, cpu, link, tables.iteration_s, head)


def _curve(points: Sequence[LinearPoint], num_parameters: int) -> RateCurve:
    """More tokens never take less: a point above a later one was disturbed."""
    found: list[tuple[float, float]] = []
    least_s = inf
    for point in sorted(points, key=lambda point: point.num_tokens, reverse=True):
        least_s = min(least_s, point.seconds)
        flop = 2 * num_parameters * point.num_tokens
        found.append((point.num_tokens, flop / max(least_s, 1e-9)))
    return RateCurve(tuple(reversed(found)))


def _prompt_rate(points: Sequence[PrefillPoint], layer: LayerFigures) -> float:
    """FLOP/s at the longest chunk with nothing before it."""
    first = [point for point in points if point.past_tokens == 0 and point.seconds > 0]
    if not first:
        return inf
    longest = max(first, key=lambda point: point.chunk_tokens)
    return layer.prompt_pairs(longest.chunk_tokens) * layer.pair_flop / longest.seconds


def _decode_rate(points: Sequence[DecodePoint], layer: LayerFigures) -> float:
    """Bytes/s at the most tokens."""
    known = [point for point in points if point.seconds > 0]
    if not known:
        return inf
    largest = max(known, key=lambda point: point.context_tokens)
    return largest.context_tokens * layer.kv_bytes_per_token / largest.seconds
