"""One TOML file, loaded once by each service's `__main__`; every constructor is handed its own part.

Sizes accept units ("256MiB"). Unknown keys and values out of range are refused, naming the key.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

MAX_PORT = 65535
_SIZE = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")

Mode = Literal["auto", "gpu_only", "asymmetric", "same_layer", "decoupled"]


class ConfigError(Exception):
    """The configuration cannot be used. The text names the key and the limit."""


def checked_address(address: str) -> str:
    """The address itself. Raises ValueError."""
    if re.fullmatch(r"unix:.+", address):
        return address
    match = re.fullmatch(r"(?:[^:]+|\[[0-9a-fA-F:.]+\]):(\d+)", address)
    if not match:
        raise ValueError(f'must be "host:port" or "unix:path", is {address!r}')
    if int(match[1]) > MAX_PORT:
        raise ValueError(f"the port must be from 0 to {MAX_PORT}, is {match[1]}")
    return address


def _checked_size(value: object) -> object:
    """pydantic takes True for 1 byte, and of "1,5GiB" no more than the 1."""
    if isinstance(value, bool) or (isinstance(value, str) and not _SIZE.fullmatch(value)):
        raise ValueError(_no_size(value))
    return value


def _no_size(value: object) -> str:
    return f"not a size such as 64MiB, is {value!r}"


Address = Annotated[str, AfterValidator(checked_address)]
Size = Annotated[ByteSize, BeforeValidator(_checked_size), Field(le=2**63 - 1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """Which model, and how it is presented."""

    source: str = "smollm2-135m-instruct"
    """Built-in name, directory of safetensors, GGUF file, or hub id."""
    name: str = ""
    """Name in answers; default: the source's last part."""


class KvConfig(Section):
    """Blocks and types of the KV cache, on both tiers."""

    block_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in a block."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of keys and values; "auto": the compute type."""
    host_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of keys and values on the host; "auto": as on the GPU. "int8" has a scale for each block and head: a quarter
    of fp32's bytes or half of 16-bit types', for numbers off by some 0.4 % of the largest beside them."""


class PlannerConfig(Section):
    """planner_svc: the door, the queues and the scheduler."""

    listen: Address = "127.0.0.1:50051"
    """Address of the public gRPC service; `host:port` or `unix:path`."""
    mode: Mode = "auto"
    """"auto" chooses each iteration by predicted throughput. The others force how sequences on the host decode: not at
    all, in two sub-batches where both have work, in one batch, or as a cohort at its own pace."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait; further ones are refused."""
    max_running_sequences: Annotated[int, Field(ge=1, le=4096)] = 256
    """Sequences that hold KV blocks at a time."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Tokens one iteration computes at most: decodes and prefill chunks together."""
    max_sequence_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and answer together; default: the model's context length."""


class GpuConfig(Section):
    """gpu_svc: the device and what lies on it."""

    listen: Address = "127.0.0.1:50052"
    """Address of the executor's gRPC service."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto": cuda where there is one."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type to compute in; "auto" measures at start-up."""
    kv_bytes: Size = ByteSize(512 * 2**20)
    """Cap of the GPU KV cache. 0 keeps all KV on the host."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch on the CPU device; 0: the cores this process may use, less those of cpu_attn_svc."""
    profile: Literal["auto", "always"] = "auto"
    """Operations are measured at start-up, which takes seconds to minutes. "auto" keeps what was measured in the user's
    cache directory, and takes it from there where machine, model and limits are the same; "always" measures at each
    start and keeps nothing."""


class CpuAttnConfig(Section):
    """cpu_attn_svc: the host tier."""

    listen: Address = "127.0.0.1:50053"
    """Address of the control gRPC service."""
    kv_bytes: Size = ByteSize(1024 * 2**20)
    """Size of the host KV pool. 0 runs without the service."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Threads at start; changes live by RPC."""
    max_threads: Annotated[int, Field(ge=0)] = 0
    """Most threads by RPC; 0: the cores this process may use."""
    instruction_set: Literal["auto", "scalar", "avx2", "avx512", "avx512_bf16", "neon"] = "auto"
    """Kernel to use; "auto": the best this processor runs."""
    segment_dir: Path = Path("/dev/shm")
    """Directory of the shared region."""


class Config(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    planner: PlannerConfig = PlannerConfig()
    gpu: GpuConfig = GpuConfig()
    cpu_attn: CpuAttnConfig = CpuAttnConfig()

    @model_validator(mode="after")
    def _has_somewhere_to_keep_kv(self) -> "Config":
        if self.gpu.kv_bytes == 0 and self.cpu_attn.kv_bytes == 0:
            raise ValueError("gpu.kv_bytes and cpu_attn.kv_bytes are both 0: there is no place for KV")
        if self.planner.mode not in ("auto", "gpu_only") and self.cpu_attn.kv_bytes == 0:
            raise ValueError(f'planner.mode "{self.planner.mode}" needs cpu_attn.kv_bytes greater than 0')
        if self.kv.host_dtype != "auto" and self.cpu_attn.kv_bytes == 0:
            raise ValueError(f'kv.host_dtype "{self.kv.host_dtype}" needs cpu_attn.kv_bytes greater than 0')
        if self.planner.mode == "gpu_only" and self.gpu.kv_bytes == 0:
            raise ValueError('planner.mode "gpu_only" needs gpu.kv_bytes greater than 0')
        return self


def load(path: Path) -> Config:
    """Reads a TOML file. Raises ConfigError naming each bad key."""
    try:
        with path.open("rb") as file:
            return parse(tomllib.load(file), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # Bytes that are no UTF-8 included.
        raise ConfigError(f"{path}: not TOML: {error}") from error


def parse(values: dict[str, object], origin: str, typed: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Checks values as read from TOML. Raises ConfigError naming each bad key.

    `typed`: how the user wrote a key that does not come from `origin`, e.g. {"planner.mode": "--mode"}.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        ours, theirs = [], []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            if key in typed:
                ours.append(f"{typed[key]}: {_complaint(item)}")
            else:
                theirs.append(f"{key}: {_complaint(item)}" if key else _complaint(item))
        from_origin = [f"{origin}: {'; '.join(theirs)}"] if theirs else []
        raise ConfigError("; ".join(ours + from_origin)) from error


def _complaint(item: ErrorDetails) -> str:
    """What pydantic found, in words for somebody who does not know pydantic."""
    value = item["input"]
    match item["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "model_type":
            return f"must be a table of keys, is {value!r}"
        case "byte_size" | "byte_size_unit":
            return _no_size(value)
        case "value_error":  # One of ours.
            return item["msg"].removeprefix("Value error, ")
        case _:
            return f"{item['msg'].replace('Input should be', 'must be', 1)}, is {value!r}"


def load_from_argv(service: str) -> Config:
    """The file named on a service's command line; prints what is wrong and exits with 2 otherwise."""
    if len(sys.argv) != 3 or sys.argv[1] != "--config":
        print(f"usage: python -m {service} --config FILE.toml", file=sys.stderr)
        raise SystemExit(2)
    try:
        return load(Path(sys.argv[2]))
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
