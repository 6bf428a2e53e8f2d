"""One TOML file, loaded once by each service's `__main__`; every constructor is handed its own part.

Sizes accept units ("256MiB"). Unknown keys and values out of range are refused, naming the key.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
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
PhasePolicy = Literal["auto", "resident", "offload", "partition", "cpu_only"]


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
    chat_template: Path | None = None
    """File of a Jinja template by which conversations are written, in place of the model's own."""


class KvConfig(Section):
    """Blocks and types of the KV cache, on both tiers."""

    block_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in a block."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of keys and values; "auto": the compute type, and beside int8 or int4 weights bf16."""
    host_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of keys and values on the host; "auto": as on the GPU. "int8" has a scale for each block and head: a quarter
    of fp32's bytes or half of 16-bit types', for numbers off by some 0.4 % of the largest beside them."""
    prefix_cache: bool = True
    """KV of what requests begin with is kept while there is room, and shared by those that begin alike."""


_MAX_CLASSES = 32
_CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TARGET_S = 86_400.0


class ClassConfig(Section):
    """A service class: how its requests are served beside others'. [planner.classes.NAME]"""

    ttft_s: Annotated[float, Field(gt=0, le=MAX_TARGET_S)] | None = None
    """Target of the time from arrival to the first token. Together with `tpot_s` or not at all: a class without targets
    gets what throughput allows."""
    tpot_s: Annotated[float, Field(gt=0, le=MAX_TARGET_S)] | None = None
    """Target of the mean time from each token to the next."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Among prompts that wait, those of a higher priority go first, and they are preempted last. A prompt that has
    waited 20 times its `ttft_s` (of 60 s where it has none; of a target that it brings itself, no less than the class's
    or 1 s) goes with the highest priority that waits."""
    share: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """Among classes of one priority that all have prompts waiting, tokens of prompts and answers are shared out in
    proportion to this. A class that needs less leaves the rest to the others, and saves up nothing."""
    on_overload: Literal["queue", "refuse"] = "queue"
    """A request that by prediction will miss its targets waits behind those that can keep theirs, or is refused at once
    with RESOURCE_EXHAUSTED and the time after which to try again."""

    @model_validator(mode="after")
    def _has_both_targets_or_none(self) -> "ClassConfig":
        if (self.ttft_s is None) != (self.tpot_s is None):
            missing = "ttft_s" if self.ttft_s is None else "tpot_s"
            raise ValueError(f"ttft_s and tpot_s go together, {missing} is missing")
        return self


def _checked_classes(classes: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
    if not 1 <= len(classes) <= _MAX_CLASSES:
        raise ValueError(f"must be from 1 to {_MAX_CLASSES} classes, are {len(classes)}")
    for name in classes:
        if not _CLASS_NAME.fullmatch(name):
            raise ValueError(f"a name must be of 1 to 64 letters, digits, - and _, is {name!r}")
    return classes


class PlannerConfig(Section):
    """planner_svc: the door, the queues and the scheduler."""

    listen: Address = "127.0.0.1:50051"
    """Address of the public gRPC service; `host:port` or `unix:path`."""
    mode: Mode = "auto"
    """"auto" chooses each iteration by predicted throughput. The others force how sequences on the host decode: not at
    all, in two sub-batches where both have work, in one batch, or as a cohort at its own pace."""
    prefill_policy: PhasePolicy = "auto"
    """Where the model's layers run for prompts: on the device, "resident" or "offload", which streams the weights of
    those that don't fit there; the first `cpu_layers` in cpu_attn_svc, "partition"; or all of them there, "cpu_only",
    with embedding, head and sampling still in gpu_svc. "auto": on the device; for both phases, where not all fit
    there, the planner chooses, by what it measured and by the requests that come."""
    decode_policy: PhasePolicy = "auto"
    """The same for decodes, which must have at least as many layers in cpu_attn_svc as prompts."""
    cpu_layers: Annotated[int, Field(ge=0)] = 0
    """Layers of a "partition" that cpu_attn_svc computes; from 1 to one less than the model has."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait; further ones are refused."""
    max_running_sequences: Annotated[int, Field(ge=1, le=4096)] = 256
    """Sequences that hold KV blocks at a time."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Tokens one iteration computes at most: decodes and prefill chunks together."""
    max_sequence_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and answer together; default: the model's context length."""
    classes: Annotated[dict[str, ClassConfig], AfterValidator(_checked_classes)] = {"default": ClassConfig()}
    """Service classes by name, at most 32. Where the file has none there is one, "default", without targets."""
    default_class: str = "default"
    """Class of requests that name none; one of `classes`."""


class GpuConfig(Section):
    """gpu_svc: the device and what lies on it."""

    listen: Address = "127.0.0.1:50052"
    """Address of the executor's gRPC service."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto": cuda where there is one."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """Type to compute in; "auto" measures fp32 and 16 bits at start-up. "int8" and "int4" are types of the weights
    alone, on device "cpu" only: less memory, faster decodes, and other tokens; see docs/performance.md."""
    kv_bytes: Size = ByteSize(512 * 2**20)
    """Cap of the GPU KV cache. 0 keeps all KV on the host."""
    memory_bytes: Size | None = None
    """Cap of weights, buffers for weights and KV on the device together; default: what the device has. Layers that do
    not fit beside `kv_bytes` stay in host memory and are streamed to the device in each iteration."""
    link_bytes_per_s: Size = ByteSize(0)
    """On device "cpu": bandwidth of the emulated link, each way, that streamed weights and swapped KV cross; 0: as fast
    as copies go."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch on the CPU device; 0: the cores this process may use, less those of cpu_attn_svc."""
    profile: Literal["auto", "always"] = "auto"
    """Operations are measured at start-up, which takes seconds to minutes. "auto" keeps what was measured in the user's
    cache directory, and takes it from there where machine, model and limits are the same; "always" measures at each
    start and keeps nothing."""

    @model_validator(mode="after")
    def _has_quantised_weights_on_the_cpu_only(self) -> "GpuConfig":
        if self.device == "cuda" and self.dtype in ("int8", "int4"):
            raise ValueError(f'dtype "{self.dtype}" is for device "cpu"; on cuda it is not built')
        return self


class CpuAttnConfig(Section):
    """cpu_attn_svc: the host tier. [cpu_attn]; of several services, say one for each NUMA node, each has a table of its
    own, [[cpu_attn]], and holds whole sequences."""

    listen: Address = "127.0.0.1:50053"
    """Address of the control gRPC service."""
    kv_bytes: Size = ByteSize(1024 * 2**20)
    """Size of the service's pool of host KV. 0, of a single one, runs without the service."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Threads at start; changes live by RPC."""
    elastic: bool = False
    """The planner raises the number of threads while the executor waits for them, and lowers it while they idle.

    Not by default: where the device is the CPU, threads beyond `num_threads` run on cores that gpu_svc computes on.
    """
    min_threads: Annotated[int, Field(ge=1)] = 1
    """Fewest threads that the planner leaves."""
    max_threads: Annotated[int, Field(ge=0)] = 0
    """Most threads, by the planner or by RPC; 0: the cores this process may use."""
    instruction_set: Literal["auto", "scalar", "avx2", "avx512", "avx512_bf16", "neon"] = "auto"
    """Kernel to use; "auto": the best this processor runs."""
    segment_dir: Path = Path("/dev/shm")
    """Directory of the shared region."""

    @model_validator(mode="after")
    def _has_threads_within_limits(self) -> "CpuAttnConfig":
        most = self.max_threads or max(self.num_threads, self.min_threads)
        if self.elastic and not self.min_threads <= self.num_threads <= most:
            raise ValueError(
                f"with elastic, num_threads must be from min_threads, {self.min_threads}, "
                f"to max_threads, {self.max_threads or 'the cores there are'}; is {self.num_threads}"
            )
        return self


_MAX_BODY_BYTES = 48 * 2**20
"""Leaves room in the planner's largest message for what JSON writes shorter than protobuf."""


class GatewayConfig(Section):
    """gateway_svc: the OpenAI-compatible HTTP face. [gateway] starts it beside the other services; `neoflex up` does
    without being told."""

    listen: Address = "127.0.0.1:8000"
    """Address of the HTTP service; `host:port` or `unix:path`. Where it is not set and the port is taken, `neoflex up`
    takes a free one."""
    api_keys_file: Path | None = None
    """API keys, one a line, "#" begins a comment; read again when it changes. All but /health and the console's files
    then asks for `Authorization: Bearer KEY`. Default: whoever reaches the address may call."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call, e.g. "https://chat.example.com"; "*" for any. None by default."""
    max_body_bytes: Annotated[Size, Field(ge=1024, le=_MAX_BODY_BYTES)] = ByteSize(8 * 2**20)
    """Largest body of a request."""
    console: bool = True
    """Serves a page at / with a chat and what the server does at the moment."""


def _listed(value: object) -> object:
    """One table stands for a list of one."""
    return [value] if isinstance(value, dict) else value


class Config(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    planner: PlannerConfig = PlannerConfig()
    gpu: GpuConfig = GpuConfig()
    cpu_attn: Annotated[tuple[CpuAttnConfig, ...], BeforeValidator(_listed), Field(min_length=1, max_length=16)] = (
        CpuAttnConfig(),
    )
    """One for each service; a single table is a list of one."""
    gateway: GatewayConfig | None = None

    @property
    def cpu_attn_services(self) -> tuple[CpuAttnConfig, ...]:
        """Those that are to run: none where the only pool has no bytes."""
        return tuple(service for service in self.cpu_attn if service.kv_bytes)

    def cpu_attn_key(self, index: int) -> str:
        """How messages name a service's table."""
        return "cpu_attn" if len(self.cpu_attn) == 1 else f"cpu_attn[{index}]"

    @model_validator(mode="after")
    def _has_services_apart(self) -> "Config":
        if len(self.cpu_attn) > 1:
            for index, service in enumerate(self.cpu_attn):
                if service.kv_bytes == 0:
                    raise ValueError(f"cpu_attn[{index}].kv_bytes is 0: of several services each needs a pool")
        listens = [service.listen if "listen" in service.model_fields_set else None for service in self.cpu_attn]
        _check_apart(listens)
        return self

    @model_validator(mode="after")
    def _has_somewhere_to_keep_kv(self) -> "Config":
        has_pool = bool(self.cpu_attn_services)
        if self.gpu.kv_bytes == 0 and not has_pool:
            raise ValueError("gpu.kv_bytes and cpu_attn.kv_bytes are both 0: there is no place for KV")
        if self.planner.mode not in ("auto", "gpu_only") and not has_pool:
            raise ValueError(f'planner.mode "{self.planner.mode}" needs cpu_attn.kv_bytes greater than 0')
        if self.kv.host_dtype != "auto" and not has_pool:
            raise ValueError(f'kv.host_dtype "{self.kv.host_dtype}" needs cpu_attn.kv_bytes greater than 0')
        if self.cpu_attn[0].elastic and not has_pool:
            raise ValueError("cpu_attn.elastic needs cpu_attn.kv_bytes greater than 0")
        for key in ("prefill_policy", "decode_policy"):
            policy = getattr(self.planner, key)
            if policy in ("partition", "cpu_only") and not has_pool:
                raise ValueError(f'planner.{key} "{policy}" needs cpu_attn.kv_bytes greater than 0')
            if policy in ("partition", "cpu_only") and len(self.cpu_attn) > 1:
                raise ValueError(f'planner.{key} "{policy}" needs a single [cpu_attn], there are {len(self.cpu_attn)}')
            if policy in ("partition", "cpu_only") and self.planner.mode == "decoupled":
                raise ValueError(f'planner.{key} "{policy}" has no cohort: planner.mode must not be "decoupled"')
        if self.planner.mode == "gpu_only" and self.gpu.kv_bytes == 0:
            raise ValueError('planner.mode "gpu_only" needs gpu.kv_bytes greater than 0')
        return self

    @model_validator(mode="after")
    def _has_its_default_class(self) -> "Config":
        planner = self.planner
        if planner.default_class not in planner.classes:
            names = ", ".join(sorted(planner.classes))
            raise ValueError(f"planner.default_class must be one of {names}, is {planner.default_class!r}")
        return self


def _check_apart(listens: Sequence[str | None]) -> None:
    """Raises ValueError where two services of attention listen at one address."""
    for index, listen in enumerate(listens):
        first = listens.index(listen)
        if listen is not None and first < index:
            raise ValueError(f"cpu_attn[{index}].listen is that of cpu_attn[{first}], {listen}: each needs its own")


def load(path: Path) -> Config:
    """Reads a TOML file. Raises ConfigError naming each bad key."""
    try:
        with path.open("rb") as file:
            config = parse(tomllib.load(file), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # Bytes that are no UTF-8 included.
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        _check_apart([service.listen for service in config.cpu_attn])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def parse(values: dict[str, object], origin: str, typed: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Checks values as read from TOML. Raises ConfigError naming each bad key.

    `typed`: how the user wrote a key that does not come from `origin`, e.g. {"planner.mode": "--mode"}.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        ours, theirs = [], []
        for item in error.errors():
            key = _key(item["loc"], has_several=_num_cpu_attn(values) > 1)
            if key in typed:
                ours.append(f"{typed[key]}: {_complaint(item)}")
            else:
                theirs.append(f"{key}: {_complaint(item)}" if key else _complaint(item))
        from_origin = [f"{origin}: {'; '.join(theirs)}"] if theirs else []
        raise ConfigError("; ".join(ours + from_origin)) from error


def _num_cpu_attn(values: Mapping[str, object]) -> int:
    services = values.get("cpu_attn")
    return len(services) if isinstance(services, list) else 1


def _key(place: tuple[int | str, ...], has_several: bool) -> str:
    """As the user knows it: a single service is no list."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return key if has_several else key.replace("cpu_attn[0]", "cpu_attn", 1)


def _complaint(item: ErrorDetails) -> str:
    """What pydantic found, in words for somebody who does not know pydantic."""
    value = item["input"]
    match item["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "model_type" | "dict_type":
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
    return _load_or_exit(service, sys.argv[2])


def load_cpu_attn_from_argv(service: str) -> tuple[Config, int]:
    """And which of `Config.cpu_attn` this process is; exits as `load_from_argv`."""
    arguments = sys.argv[1:]
    has_index = len(arguments) == 4 and arguments[2] == "--index" and arguments[3].isdecimal()
    if not arguments or arguments[0] != "--config" or not (len(arguments) == 2 or has_index):
        print(f"usage: python -m {service} --config FILE.toml [--index NUMBER]", file=sys.stderr)
        raise SystemExit(2)
    config = _load_or_exit(service, arguments[1])
    index = int(arguments[3]) if has_index else 0
    if index >= len(config.cpu_attn):
        print(f"{service}: --index must be from 0 to {len(config.cpu_attn) - 1}, is {index}", file=sys.stderr)
        raise SystemExit(2)
    return config, index


def _load_or_exit(service: str, path: str) -> Config:
    try:
        return load(Path(path))
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
