"""Measures what attention on the CPU takes, there and back, through the real tensor plane; under the profiler."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_svc.host_tier import CpuWork, HostPool
from gpu_svc.limits import Int32Array
from gpu_svc.stopwatch import LONG_S
from svc_common.decoder.decoder import Decoder

_RUNS = 3


@dataclass(frozen=True, slots=True)
class CpuTrip:
    """A layer's decodes on the CPU, and where their time goes; seconds of one layer."""

    num_sequences: int
    context_tokens: int
    """Of all sequences together."""
    attention_s: float
    copy_s: float
    signal_s: float


def cpu_trip(decoder: Decoder, pool: HostPool, num_sequences: int, context_tokens: int, tables: Int32Array) -> CpuTrip:
    """Of so many sequences with so many tokens each, in the pool's blocks `tables` [num_sequences, width].

    Raises PlaneError when the service is lost.
    """
    spec = decoder.spec
    num_layers = spec.num_layers - pool.first_layer
    q = noise(decoder, num_sequences, spec.num_q_heads, spec.head_dim)
    kv = noise(decoder, num_sequences, 2, spec.num_kv_heads, spec.head_dim)
    out = torch.empty_like(q)
    work = CpuWork(0, np.full(num_sequences, context_tokens, np.int32), tables, slice(0, num_sequences))
    passes: list[tuple[int, int, int]] = []
    while len(passes) < _RUNS and sum(map(sum, passes)) < LONG_S * 1e9:
        passes.append(_pass_ns(num_layers, pool, work, q, kv, out))
    # The least: what disturbs a measurement only adds. To waiting it may do either.
    attention_ns, copy_ns, signal_ns = zip(*passes, strict=True)
    return CpuTrip(
        num_sequences,
        num_sequences * context_tokens,
        attention_s=min(attention_ns) / num_layers / 1e9,
        copy_s=min(copy_ns) / num_layers / 1e9,
        signal_s=statistics.median(signal_ns) / num_layers / 1e9,
    )


def _pass_ns(
    num_layers: int, pool: HostPool, work: CpuWork, q: Tensor, kv: Tensor, out: Tensor
) -> tuple[int, int, int]:
    """Nanoseconds of attention, of copies and of waiting for doorbells, through so many layers.

    A device that rings by itself copies on streams of their own: such copies hold up no kernel, they only take time on
    the way, as doorbells do.
    """
    pool.begin([work], 0)
    waited_before_ns, start_ns = pool.wait_ns, time.perf_counter_ns()
    for _ in range(num_layers):
        pool.submit(work.slot, q, kv, work.rows)
        pool.wait(work.slot, out, work.rows)
    if pool.rings_by_itself:
        attended_ns = pool.finish().compute_ns
        return attended_ns, 0, max(0, time.perf_counter_ns() - start_ns - attended_ns)
    total_ns, waited_ns = time.perf_counter_ns() - start_ns, pool.wait_ns - waited_before_ns
    attended_ns = pool.finish().compute_ns
    return attended_ns, total_ns - waited_ns, max(0, waited_ns - attended_ns)


def noise(decoder: Decoder, *shape: int) -> Tensor:
    """Normally distributed, in the decoder's type and on its device."""
    return torch.randn(shape, dtype=torch.float32).to(device=decoder.device, dtype=decoder.dtype)
