"""Turns planner.prefill_policy, decode_policy and cpu_layers of the configuration into an ExecutionPolicy."""

from svc_common.config import ConfigError, PhasePolicy, PlannerConfig
from svc_common.policy import ExecutionPolicy


def configured_policy(config: PlannerConfig, num_layers: int) -> ExecutionPolicy | None:
    """None where the executor is left to keep what fits on its device. Raises ConfigError naming the key."""
    if config.prefill_policy == config.decode_policy == "auto":
        return None
    if "partition" in (config.prefill_policy, config.decode_policy) and not 1 <= config.cpu_layers < num_layers:
        raise ConfigError(
            f"planner.cpu_layers must be from 1 to {num_layers - 1} of the model's {num_layers} layers for a "
            f"partition, is {config.cpu_layers}"
        )
    prefill = _cpu_layers(config.prefill_policy, config, num_layers)
    decode = _cpu_layers(config.decode_policy, config, num_layers)
    if prefill > decode:
        raise ConfigError(
            f'planner.prefill_policy "{config.prefill_policy}" computes {prefill} layers on the CPU, which must be at '
            f'most the {decode} of planner.decode_policy "{config.decode_policy}"'
        )
    return ExecutionPolicy(num_layers - prefill, prefill, decode)


def _cpu_layers(policy: PhasePolicy, config: PlannerConfig, num_layers: int) -> int:
    match policy:
        case "partition":
            return config.cpu_layers
        case "cpu_only":
            return num_layers
        case _:
            return 0
