"""What one iteration of a phase asks of each lane: seconds by layer and group, and bytes over the link."""

from dataclasses import dataclass

from planner_svc.policy.costs import GroupLoad, attention_s, decode_attention_s, head_s, linear_s
from planner_svc.policy.figures import DecoderFigures, LayerFigures
from planner_svc.policy.lanes import GroupTimes, IterationWork, Lane
from planner_svc.policy.machine import Machine
from planner_svc.policy.memory import first_held
from planner_svc.policy.mix import RequestMix
from svc_common.policy import ExecutionPolicy


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """One iteration of a phase, all its groups."""

    iteration: IterationWork
    busy_s: dict[Lane, float]
    up_bytes: float
    down_bytes: float


@dataclass(frozen=True, slots=True)
class _Load:
    """Of a phase's iteration, all groups together."""

    cpu_layers: int
    group: GroupLoad
    new_host_tokens: tuple[float, float]
    """Prompt tokens whose K and V go to the host from (layers that decode on the CPU, others)."""
    past_host_tokens: tuple[float, float]
    """Tokens before a chunk, whose K and V come from the host for its attention on the GPU; likewise."""


def prefill_work(
    model: DecoderFigures,
    machine: Machine,
    policy: ExecutionPolicy,
    mix: RequestMix,
    num_host_sequences: int,
    num_groups: int,
) -> PhaseWork:
    """An iteration with its share of all prompts."""
    num_prompts = mix.num_sequences / mix.num_prefill_iterations
    on_host = num_host_sequences / mix.num_sequences
    # A prompt longer than an iteration takes several chunks; before each lie half of the other chunks on average.
    past_tokens = max(0.0, (mix.prompt_tokens - mix.batch_tokens) / 2)
    load = _Load(
        policy.prefill_cpu_layers,
        GroupLoad(
            num_tokens=mix.prefill_tokens / num_groups,
            num_outputs=num_prompts / num_groups,
            num_prompts=num_prompts / num_groups,
            prompt_tokens=mix.prompt_tokens,
        ),
        (mix.prefill_tokens, on_host * mix.prefill_tokens),
        (past_tokens, on_host * past_tokens),
    )
    return _work(model, machine, policy, load, num_groups)


def decode_work(
    model: DecoderFigures,
    machine: Machine,
    policy: ExecutionPolicy,
    mix: RequestMix,
    num_host_sequences: int,
    num_groups: int,
) -> PhaseWork:
    """A token for each sequence, halfway through the answers."""
    load = _Load(
        policy.decode_cpu_layers,
        GroupLoad(
            num_tokens=mix.num_sequences / num_groups,
            num_outputs=mix.num_sequences / num_groups,
            num_decodes=mix.num_sequences / num_groups,
            num_host_decodes=num_host_sequences / num_groups,
            context_tokens=mix.mean_context_tokens,
        ),
        (0.0, 0.0),
        (0.0, 0.0),
    )
    return _work(model, machine, policy, load, num_groups)


def _work(model: DecoderFigures, machine: Machine, policy: ExecutionPolicy, load: _Load, num_groups: int) -> PhaseWork:
    num_layers, cpu_layers = model.num_layers, load.cpu_layers
    held = max(cpu_layers, first_held(num_layers, policy))
    new, past = (
        _kv_bytes(model, policy, load, load.new_host_tokens),
        _kv_bytes(model, policy, load, load.past_host_tokens),
    )
    streamed = [layer.weight_bytes for layer in model.layers[cpu_layers:held]]
    hidden_bytes = model.hidden_bytes * load.group.num_tokens if cpu_layers else 0.0
    up_bytes = num_groups * (sum(streamed) + hidden_bytes) + sum(past)
    down_bytes = num_groups * hidden_bytes + sum(new)
    up_per_s, down_per_s = machine.link.rates(up_bytes, down_bytes)
    stream_s = [layer.weight_bytes / up_per_s for layer in model.layers]
    times = _layer_times(model, machine, load)
    group = GroupTimes(
        layer_s=[linear for linear, _, _ in times],
        attention_s=[attention for _, attention, _ in times],
        host_attention_s=[host for _, _, host in times],
        kv_up_s=[num_bytes / num_groups / up_per_s for num_bytes in past],
        kv_down_s=[num_bytes / num_groups / down_per_s for num_bytes in new],
        hidden_up_s=hidden_bytes / up_per_s,
        hidden_down_s=hidden_bytes / down_per_s,
        head_s=head_s(model, machine, load.group.num_outputs),
    )
    iteration = IterationWork(
        num_layers=num_layers,
        cpu_layers=cpu_layers,
        first_held=held,
        stream_s=stream_s,
        groups=(group,) * num_groups,
        hop_s=machine.link.hop_s,
        overhead_s=machine.iteration_s,
    )
    on_cpu = sum(group.layer_s[:cpu_layers]) + sum(group.attention_s[:cpu_layers]) + sum(group.host_attention_s)
    on_gpu = sum(group.layer_s[cpu_layers:]) + sum(group.attention_s[cpu_layers:]) + group.head_s
    busy_s = {
        Lane.GPU: num_groups * on_gpu,
        Lane.CPU: num_groups * on_cpu,
        Lane.UP: up_bytes / up_per_s,
        Lane.DOWN: down_bytes / down_per_s,
    }
    return PhaseWork(iteration, busy_s, up_bytes, down_bytes)


def _kv_bytes(model: DecoderFigures, policy: ExecutionPolicy, load: _Load, tokens: tuple[float, float]) -> list[float]:
    """Of each layer, where the GPU computes it and the host keeps its K and V; 0 for CPU layers."""
    of_lower, of_upper = tokens
    return [
        0.0
        if index < load.cpu_layers
        else (of_lower if index < policy.decode_cpu_layers else of_upper) * layer.kv_bytes_per_token
        for index, layer in enumerate(model.layers)
    ]


def _layer_times(model: DecoderFigures, machine: Machine, load: _Load) -> list[tuple[float, float, float]]:
    """(linear operations, attention where the layer runs, attention on the CPU for the GPU) of each layer."""
    found: dict[tuple[LayerFigures, bool], tuple[float, float, float]] = {}
    times = []
    group = load.group
    for index, layer in enumerate(model.layers):
        key = (layer, index < load.cpu_layers)
        if key not in found:
            processor = machine.cpu if key[1] else machine.gpu
            num_host = 0.0 if key[1] else group.num_host_decodes
            found[key] = (
                linear_s(layer, processor, group.num_tokens),
                attention_s(layer, processor, group, group.num_decodes - num_host),
                decode_attention_s(layer, machine.cpu, num_host, group.context_tokens),
            )
        times.append(found[key])
    return times
