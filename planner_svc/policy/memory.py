"""Which memory a policy takes on either side, and how many sequences' KV the GPU has room for."""

from dataclasses import dataclass, replace

from planner_svc.policy.figures import DecoderFigures
from planner_svc.policy.machine import Machine
from planner_svc.policy.mix import RequestMix
from svc_common.policy import ExecutionPolicy

NUM_BUFFERS = 2
"""Of streamed layers: one computes while the next arrives. No more layers than that stay in them."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Bytes in one memory."""

    weights: int = 0
    buffers: int = 0
    """That layers are streamed through."""
    kv: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.kv + self.activations


@dataclass(frozen=True, slots=True)
class MemoryUse:
    gpu: TierUse
    host: TierUse
    num_host_sequences: int
    """Of the mix, whose KV of the GPU's layers lies on the host, where the CPU attends over it (NEO)."""

    def fits(self, machine: Machine) -> bool:
        host_pool = machine.cpu.kv_bytes
        if host_pool is not None and self.host.kv > host_pool:
            return False
        return self.gpu.total <= machine.gpu.memory_bytes and self.host.total <= machine.cpu.memory_bytes


def first_held(num_layers: int, policy: ExecutionPolicy) -> int:
    """The first of the layers that no iteration streams: those that are resident, or that the buffers hold for good."""
    first_resident = num_layers - policy.resident_layers
    first_on_gpu = min(policy.prefill_cpu_layers, policy.decode_cpu_layers)
    return first_on_gpu if first_resident - first_on_gpu <= NUM_BUFFERS else first_resident


def memory_use(model: DecoderFigures, machine: Machine, policy: ExecutionPolicy, mix: RequestMix) -> MemoryUse:
    """With as many sequences' KV on the GPU as it has room for. Whether it fits is for the caller to see.

    Host memory holds each weight that is not resident once, for CPU layers and for streaming.
    """
    num_layers, decode_cpu = model.num_layers, policy.decode_cpu_layers
    first_resident = num_layers - policy.resident_layers
    resident = model.weight_sums[-1] - model.weight_sums[first_resident]
    first_streamed = min(policy.prefill_cpu_layers, policy.decode_cpu_layers)
    streamed = [layer.weight_bytes for layer in model.layers[first_streamed:first_resident]]
    num_tokens = max(min(mix.batch_tokens, mix.prompt_tokens * mix.num_sequences), mix.num_sequences)
    fixed = TierUse(
        weights=resident + model.vocabulary_bytes,
        buffers=min(NUM_BUFFERS, len(streamed)) * max(streamed, default=0),
        activations=model.activation_bytes_per_token * num_tokens + model.logit_bytes * mix.num_sequences,
    )
    upper_kv = mix.sequence_tokens * (model.kv_sums[-1] - model.kv_sums[decode_cpu])
    lower_kv = mix.sequence_tokens * model.kv_sums[decode_cpu]
    on_gpu = mix.num_sequences
    pool_bytes = machine.gpu.kv_bytes
    if upper_kv:
        room_bytes = machine.gpu.memory_bytes - fixed.total if pool_bytes is None else pool_bytes
        on_gpu = max(0, min(on_gpu, room_bytes // upper_kv))
    on_host = mix.num_sequences - on_gpu
    runs_cpu_layers = max(policy.prefill_cpu_layers, decode_cpu) > 0
    return MemoryUse(
        gpu=replace(fixed, kv=on_gpu * upper_kv if pool_bytes is None else pool_bytes),
        host=TierUse(
            weights=model.weight_sums[first_resident],
            kv=on_host * upper_kv + mix.num_sequences * lower_kv,
            activations=model.activation_bytes_per_token * num_tokens if runs_cpu_layers else 0,
        ),
        num_host_sequences=on_host,
    )
