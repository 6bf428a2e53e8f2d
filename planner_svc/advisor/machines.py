"""Reads machines: those of machines.toml by name, or a file of the caller's."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError

from planner_svc.advisor.errors import InputError
from planner_svc.policy import Link, Machine, Processor, RateCurve

_Rate = Annotated[float, Field(gt=0, le=1e18)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Seconds = Annotated[float, Field(ge=0, le=10)]
_Memory = Annotated[ByteSize, Field(gt=0, le=2**50)]


def _checked_curve(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    RateCurve(points)
    return points


_Curve = Annotated[tuple[tuple[_Rate, _Rate], ...], AfterValidator(_checked_curve)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_S = TypeVar("_S", bound=_Section)


class LinkSection(_Section):
    """Between host and device, bytes/s."""

    up_bytes_per_s: _Rate
    """To the device, nothing going the other way."""
    down_bytes_per_s: _Rate
    both_bytes_per_s: _Rate
    """Each way, while both go at once."""
    hop_s: _Seconds = 5e-5
    """From one processor's result to the other's start."""


class GpuSection(_Section):
    """A GPU and its link."""

    flops_per_s: _Rate
    """Dense, in the type that is computed in."""
    bytes_per_s: _Rate
    """Of its memory."""
    memory: _Memory
    link: LinkSection
    host: str = ""
    """The host that it stands beside where none is named."""
    reserved: Annotated[ByteSize, Field(ge=0)] = ByteSize(2**30)
    """Of its memory, for context and libraries."""
    linear_shares: _Curve = ((16, 0.15), (128, 0.45), (1024, 0.6))
    """[tokens, share of FLOP/s] that linear operations reach."""
    attention_share: _Share = 0.35
    """Of FLOP/s, in attention of prompts."""
    bandwidth_share: _Share = 0.8
    layer_s: _Seconds = 5e-5
    """Launches of a layer."""
    iteration_s: _Seconds = 2e-3
    """Of an iteration, beside its layers and head."""


class HostSection(_Section):
    """A host's processor and memory."""

    linear: _Curve
    """[tokens, FLOP/s] of linear operations."""
    bytes_per_s: _Rate
    """Sustained."""
    memory: _Memory
    layer_s: _Seconds = 5e-5
    """Fork and join of its threads, in each layer."""


class _Table(_Section):
    gpus: dict[str, GpuSection]
    hosts: dict[str, HostSection]


class _MachineFile(_Section):
    gpu: GpuSection
    host: HostSection


def read_machine(name: str) -> Machine:
    """`GPU`, beside its usual host; `GPU+HOST`; or a TOML file with [gpu] and [host]. Raises InputError."""
    if name.endswith(".toml"):
        found = _parse(_MachineFile, _toml(Path(name)), f"--hardware: {name}")
        return _machine(Path(name).stem, found.gpu, found.host)
    table = _known()
    gpu_name, _, host_name = name.partition("+")
    if gpu_name not in table.gpus:
        raise InputError(
            f"--hardware: {gpu_name!r} is neither a .toml file nor a known GPU; there are {', '.join(table.gpus)}"
        )
    gpu = table.gpus[gpu_name]
    host_name = host_name or gpu.host
    if host_name not in table.hosts:
        raise InputError(f"--hardware: {host_name!r} is no known host; there are {', '.join(table.hosts)}")
    return _machine(f"{gpu_name}+{host_name}", gpu, table.hosts[host_name])


def with_memory(machine: Machine, gpu_bytes: int | None, host_bytes: int | None) -> Machine:
    """The same machine with other memories, where given."""
    gpu, cpu = machine.gpu, machine.cpu
    return replace(
        machine,
        gpu=gpu if gpu_bytes is None else replace(gpu, memory_bytes=gpu_bytes),
        cpu=cpu if host_bytes is None else replace(cpu, memory_bytes=host_bytes),
    )


def known_machines() -> tuple[str, ...]:
    """Names of GPUs, each with its usual host."""
    return tuple(f"{name}+{gpu.host}" for name, gpu in _known().gpus.items())


def _known() -> _Table:
    return _Table.model_validate(tomllib.loads((files("planner_svc.advisor") / "machines.toml").read_text()))


def _machine(name: str, gpu: GpuSection, host: HostSection) -> Machine:
    return Machine(
        name=name,
        gpu=Processor(
            linear=RateCurve(tuple((tokens, share * gpu.flops_per_s) for tokens, share in gpu.linear_shares)),
            attention_flops_per_s=gpu.attention_share * gpu.flops_per_s,
            bytes_per_s=gpu.bandwidth_share * gpu.bytes_per_s,
            kv_bytes_per_s=gpu.bandwidth_share * gpu.bytes_per_s,
            memory_bytes=max(0, gpu.memory - gpu.reserved),
            layer_s=gpu.layer_s,
        ),
        cpu=Processor(
            linear=RateCurve(host.linear),
            # Attention of prompts runs on vectors, as linear operations of few tokens do.
            attention_flops_per_s=host.linear[0][1],
            bytes_per_s=host.bytes_per_s,
            kv_bytes_per_s=host.bytes_per_s,
            memory_bytes=host.memory,
            layer_s=host.layer_s,
        ),
        link=Link(
            up_bytes_per_s=gpu.link.up_bytes_per_s,
            down_bytes_per_s=gpu.link.down_bytes_per_s,
            both_bytes_per_s=gpu.link.both_bytes_per_s,
            hop_s=gpu.link.hop_s,
        ),
        iteration_s=gpu.iteration_s,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"--hardware: {path}: {error.strerror}") from error
    except ValueError as error:  # Bytes that are no UTF-8 included.
        raise InputError(f"--hardware: {path}: not TOML: {error}") from error


def _parse(section: type[_S], values: dict[str, Any], origin: str) -> _S:
    try:
        return section.model_validate(values)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise InputError(f"{origin}: {found}") from error
