"""Reads a simulation spec: machines (profiles) and models as figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner_svc.estimator import HardwareSpec, ModelFigures, RooflineEstimator
from planner_svc.scheduler import Capacity, Targets
from svc_common.workloads import InputError

_LARGEST = 1e18
"""Of any figure: far above all machines."""
_GIB = 2**30
_MOST_BLOCKS = 2**26
"""Of a tier; each is an entry of an allocator's list."""
_MOST_POOLS = 64
ANY_CONTEXT = 2**31
"""Of a model whose figures don't say."""
NO_CHANGES: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine with one model."""

    name: str
    hardware: HardwareSpec
    model: ModelFigures
    gpu_blocks: int
    """That fit beside the weights."""
    host_blocks: int
    block_tokens: int
    max_batch_tokens: int
    max_sequences: int
    targets: Targets
    believed_launch_s: float
    """What NEO takes one layer's launches for."""
    context_tokens: int = ANY_CONTEXT
    """Of prompt and output together, that the model can tell apart."""
    num_pools: int = 1
    """Services of attention on the CPU, among which host blocks, bandwidth and threads are divided equally."""

    @property
    def estimator(self) -> RooflineEstimator:
        """Its figures of the CPU are those of one pool."""
        hardware, num = self.hardware, self.num_pools
        one_pool = replace(
            hardware, cpu_bytes_per_s=hardware.cpu_bytes_per_s / num, cpu_sequence_s=hardware.cpu_sequence_s * num
        )
        return RooflineEstimator(one_pool, self.model)

    @property
    def host_pools(self) -> tuple[int, ...]:
        """Blocks of each; earlier ones have those that are left over."""
        size, more = divmod(self.host_blocks, self.num_pools)
        return tuple(size + (pool < more) for pool in range(self.num_pools))

    @property
    def offload_gpu_blocks(self) -> int:
        """With KV of one layer more, through which host-bound prompts pass."""
        return self.gpu_blocks * self.model.num_layers // (self.model.num_layers + 1)

    def capacity(self, gpu_blocks: int, host_pools: tuple[int, ...]) -> Capacity:
        """Of an engine that uses so much of the memory."""
        return Capacity(
            gpu_blocks=gpu_blocks,
            host_pools=host_pools,
            block_tokens=self.block_tokens,
            max_sequences=self.max_sequences,
            max_batch_tokens=self.max_batch_tokens,
            max_sequence_tokens=self.context_tokens,
            block_bytes=self.block_tokens * self.model.kv_bytes_per_token_layer * self.model.num_layers,
        )


class Spec:
    """The machines and models of one file."""

    def __init__(self, document: Any, origin: str) -> None:
        """`origin` is what messages call the file. Raises InputError."""
        profiles = document.get("profiles") if isinstance(document, dict) else None
        if not isinstance(profiles, dict) or not isinstance(document.get("models"), dict):
            raise InputError(f'{origin}: must hold the objects "profiles" and "models"')
        self._profiles, self._models, self._origin = profiles, document["models"], origin

    @property
    def names(self) -> tuple[str, ...]:
        """Of its profiles, in the file's order."""
        return tuple(self._profiles)

    def profile(self, name: str, changes: Mapping[str, float] = NO_CHANGES) -> Profile:
        """A profile with some figures of it or of its model replaced, named by their keys. Raises InputError."""
        origin = self._origin
        if name not in self._profiles:
            raise InputError(f"--profile: {name!r} is not in {origin}; it has {', '.join(sorted(self._profiles))}")
        fields = _Fields(self._profiles[name], f"{origin}: profiles.{name}", changes)
        model_name = fields.text("model")
        if model_name not in self._models:
            raise InputError(f"{origin}: profiles.{name}.model: {model_name!r} is not among the models")
        model_fields = _Fields(self._models[model_name], f"{origin}: models.{model_name}", changes)
        profile = _profile(name, fields, model_fields)
        known = fields.read | model_fields.read
        if unknown := changes.keys() - known:
            raise InputError(f"--set {min(unknown)}: no such figure; there are {', '.join(sorted(known))}")
        return profile


def read_spec(path: Path) -> Spec:
    """Raises InputError."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"--spec: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--spec: {path}: not JSON: {error}") from error
    return Spec(document, str(path))


def read_profile(path: Path, name: str) -> Profile:
    """Raises InputError."""
    return read_spec(path).profile(name)


def parse_profile(document: Any, name: str, origin: str) -> Profile:
    """Raises InputError."""
    return Spec(document, origin).profile(name)


def _profile(name: str, fields: "_Fields", model_fields: "_Fields") -> Profile:
    model = _model(model_fields)
    block_tokens = fields.count("bs")
    block_bytes = block_tokens * model.kv_bytes_per_token_layer * model.num_layers
    gpu_blocks, host_bytes = fields.count("gpu_blocks"), int(fields.number("swap_gb", lowest=0) * _GIB)
    num_pools = fields.count("pools", default=1)
    if num_pools > _MOST_POOLS:
        raise InputError(f"{fields.where('pools')}: must be at most {_MOST_POOLS}, is {num_pools}")
    for key, num_blocks in (("gpu_blocks", gpu_blocks), ("swap_gb", host_bytes // block_bytes)):
        if num_blocks > _MOST_BLOCKS:
            raise InputError(f"{fields.where(key)}: must be at most {_MOST_BLOCKS:,} blocks, is {num_blocks:,}")
    return Profile(
        name=name,
        hardware=_hardware(fields),
        model=model,
        gpu_blocks=gpu_blocks,
        host_blocks=host_bytes // block_bytes,
        block_tokens=block_tokens,
        max_batch_tokens=fields.count("max_tokens"),
        max_sequences=fields.count("max_seqs"),
        targets=Targets(ttft_s=fields.number("slo_ttft"), tpot_s=fields.number("slo_tpot")),
        believed_launch_s=fields.number("lnch_ms", lowest=0) / 1e3,
        context_tokens=model_fields.count("context", default=ANY_CONTEXT),
        num_pools=num_pools,
    )


def _hardware(fields: "_Fields") -> HardwareSpec:
    return HardwareSpec(
        gpu_flops_per_s=fields.number("F_gpu"),
        linear_efficiency=fields.number("eta_f"),
        attention_efficiency=fields.number("eta_a"),
        gpu_bytes_per_s=fields.number("B_gpu"),
        gpu_bandwidth_efficiency=fields.number("eta_b"),
        cpu_bytes_per_s=fields.number("B_cpu"),
        cpu_bandwidth_efficiency=fields.number("eta_c"),
        link_bytes_per_s=fields.number("B_link"),
        launch_s=fields.number("t_launch", lowest=0),
        cpu_sequence_s=fields.number("t_seq", lowest=0),
        cpu_hop_s=fields.number("t_hop", lowest=0),
        iteration_s=fields.number("t_iter", lowest=0),
    )


def _model(fields: "_Fields") -> ModelFigures:
    return ModelFigures(
        num_layers=fields.count("L"),
        hidden_size=fields.count("H"),
        intermediate_size=fields.count("inter"),
        num_q_heads=fields.count("nq"),
        num_kv_heads=fields.count("nkv"),
        head_dim=fields.count("hd"),
        vocab_size=fields.count("V"),
    )


class _Fields:
    """An object of the file, some of it replaced; what is wrong with a field is said with its path."""

    def __init__(self, values: Any, path: str, changes: Mapping[str, float]) -> None:
        if not isinstance(values, dict):
            raise InputError(f"{path}: must be an object")
        self._values, self._path, self._changes = values, path, changes
        self.read: set[str] = set()
        """Numbers that were asked for."""

    def number(self, name: str, lowest: float | None = None, default: float | None = None) -> float:
        """Greater than 0, or at least `lowest`. Without `default` it must be there."""
        self.read.add(name)
        value = self._changes.get(name, self._values.get(name, default))
        where = self.where(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{where}: must be a number, is {value!r}")
        if not (value > 0 if lowest is None else value >= lowest) or value > _LARGEST:
            limit = "greater than 0" if lowest is None else f"at least {lowest:g}"
            raise InputError(f"{where}: must be {limit} and at most {_LARGEST:g}, is {value}")
        if lowest == 1 and value != int(value):
            raise InputError(f"{where}: must be a whole number, is {value:g}")
        return float(value)

    def where(self, name: str) -> str:
        """What the caller knows it by."""
        return f"--set {name}" if name in self._changes else f"{self._path}.{name}"

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        return int(self.number(name, lowest=1, default=default))

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise InputError(f"{self._path}.{name}: must be a string, is {value!r}")
        return value
