"""`neoflex up`: the services on this machine, supervised until Ctrl-C."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize

from neoflex.cli.supervise import run_directory, supervise
from neoflex.cli.voice import JsonVoice, PlainVoice
from neoflex.supervisor import LocalStack, StackError
from svc_common.config import (
    MAX_PORT,
    Config,
    ConfigError,
    CpuAttnConfig,
    GatewayConfig,
    GpuConfig,
    KvConfig,
    ModelConfig,
    PlannerConfig,
    Section,
    parse,
)
from svc_common.cores import usable_cores
from svc_common.memory import size_text
from svc_common.model.shapes import find_model

_NO_HTTP = "off"
# By what name the user gave the value of a key.
_TYPED = {
    ("gateway", "listen"): "--http",
    ("model", "load_format"): "--load-format",
    ("kv", "dtype"): "--kv-dtype",
    ("kv", "host_dtype"): "--host-kv-dtype",
    ("planner", "mode"): "--mode",
    ("planner", "max_batch_tokens"): "--max-batch-tokens",
    ("planner", "max_sequence_tokens"): "--max-sequence-tokens",
    ("gpu", "device"): "--device",
    ("gpu", "dtype"): "--dtype",
    ("gpu", "kv_bytes"): "--gpu-kv-bytes",
    ("gpu", "memory_bytes"): "--gpu-memory-bytes",
    ("gpu", "num_threads"): "--gpu-threads",
    ("cpu_attn", "kv_bytes"): "--host-kv-bytes",
    ("cpu_attn", "num_threads"): "--cpu-threads",
    ("cpu_attn", "elastic"): "--elastic-cpu",
}
_MAX_SERVICES = 16


def _default(section: type[Section], key: str) -> str:
    """What holds where neither an option nor the file says anything."""
    value = section.model_fields[key].default
    return size_text(value) if isinstance(value, ByteSize) else str(value)


def _setting(section: type[Section], key: str, text: str) -> Any:
    """An option that stands for a key of the file; its help names the key's default."""
    return typer.Option(help=text, show_default=_default(section, key))


def _check_port(port: int | None) -> int | None:
    """Not by typer's `max`, whose words name one end of the range alone."""
    if port is not None and not 0 <= port <= MAX_PORT:
        raise typer.BadParameter(f"must be from 0 to {MAX_PORT}, is {port}")
    return port


_MODEL = typer.Argument(
    help="Built-in name, directory, GGUF file or hub id.", show_default=_default(ModelConfig, "source")
)
_PORT = typer.Option(
    help="Port on 127.0.0.1; 0 takes a free one. The TOML file sets other addresses, as planner.listen.",
    callback=_check_port,
    show_default=_default(PlannerConfig, "listen").rpartition(":")[2],
)
_HTTP = typer.Option(
    help='Address of the OpenAI-compatible HTTP service, host:port or unix:path; port 0 takes a free one; "off": none.',
    show_default=f"{_default(GatewayConfig, 'listen')}, or a free port where it is taken",
)
_SEQUENCE = typer.Option(help="Tokens of prompt and answer at most.", show_default="the model's context length")
_SERVICES = typer.Option(
    help="Services of attention on the CPU, say one for each NUMA node; they share out pool and threads.",
    show_default="those of the TOML file, or 1",
)
_MEMORY = typer.Option(
    help="Cap of all that lies on the GPU; layers that do not fit are streamed.", show_default="what it has free"
)
_DTYPES = "auto, fp32, bf16, fp16"


def up(
    model: Annotated[str | None, _MODEL] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file; options below win over it.")] = None,
    load_format: Annotated[
        str | None,
        _setting(ModelConfig, "load_format", "auto; dummy: random weights, of a shape known by name or a config.json."),
    ] = None,
    mode: Annotated[
        str | None, _setting(PlannerConfig, "mode", "auto, gpu_only, asymmetric, same_layer or decoupled.")
    ] = None,
    gpu_kv_bytes: Annotated[
        str | None, _setting(GpuConfig, "kv_bytes", "GPU KV cache, as 64MiB; 0: none; auto: what is left.")
    ] = None,
    gpu_memory_bytes: Annotated[str | None, _MEMORY] = None,
    host_kv_bytes: Annotated[
        str | None, _setting(CpuAttnConfig, "kv_bytes", "Host KV pools together; 0 runs without cpu_attn_svc.")
    ] = None,
    kv_dtype: Annotated[str | None, _setting(KvConfig, "dtype", f"Type of keys and values: {_DTYPES}.")] = None,
    host_kv_dtype: Annotated[
        str | None, _setting(KvConfig, "host_dtype", f"The same on the host: {_DTYPES}, int8; auto: as on the GPU.")
    ] = None,
    device: Annotated[str | None, _setting(GpuConfig, "device", "auto, cuda or cpu.")] = None,
    dtype: Annotated[
        str | None, _setting(GpuConfig, "dtype", f"Type to compute in: {_DTYPES}; int8, int4: of the weights, on cpu.")
    ] = None,
    port: Annotated[int | None, _PORT] = None,
    cpu_threads: Annotated[
        int | None, _setting(CpuAttnConfig, "num_threads", "Threads of attention on the CPU, together.")
    ] = None,
    cpu_attn_services: Annotated[int | None, _SERVICES] = None,
    elastic_cpu: Annotated[
        bool | None, _setting(CpuAttnConfig, "elastic", "Let the planner change these threads by load.")
    ] = None,
    gpu_threads: Annotated[
        int | None, _setting(GpuConfig, "num_threads", "Threads of the cpu device; 0: what is left.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, _setting(PlannerConfig, "max_batch_tokens", "Tokens one iteration computes at most.")
    ] = None,
    max_sequence_tokens: Annotated[int | None, _SEQUENCE] = None,
    http: Annotated[str | None, _HTTP] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where sockets and logs go.", show_default="a temporary one")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Keep the services' logs off the terminal.")] = False,
) -> None:
    """Start and supervise the services; Ctrl-C lets running requests end, a second Ctrl-C does not."""
    options: dict[tuple[str, str], object] = {
        ("model", "source"): model,
        ("model", "load_format"): load_format,
        ("kv", "dtype"): kv_dtype,
        ("kv", "host_dtype"): host_kv_dtype,
        ("planner", "mode"): mode,
        ("planner", "listen"): None if port is None else f"127.0.0.1:{port}",
        ("planner", "max_batch_tokens"): max_batch_tokens,
        ("planner", "max_sequence_tokens"): max_sequence_tokens,
        ("gpu", "device"): device,
        ("gpu", "dtype"): dtype,
        ("gpu", "kv_bytes"): gpu_kv_bytes,
        ("gpu", "memory_bytes"): gpu_memory_bytes,
        ("gpu", "num_threads"): gpu_threads,
        ("cpu_attn", "kv_bytes"): host_kv_bytes,
        ("cpu_attn", "num_threads"): cpu_threads,
        ("cpu_attn", "elastic"): elastic_cpu,
        ("gateway", "listen"): None if http == _NO_HTTP else http,
    }
    config = effective_config(config_file, options)
    if cpu_attn_services is not None:
        config = divide_cpu_attn(config, cpu_attn_services)
    config = pin_model(with_gateway(config, http == _NO_HTTP))
    voice = JsonVoice() if config.logging.format == "json" else PlainVoice()
    try:
        with run_directory(run_dir, voice) as directory:
            stack = LocalStack(config, directory, on_event=voice.note)
            supervise(stack, quiet, voice)
    except StackError as error:
        voice.fail(str(error))


def effective_config(config_file: Path | None, options: dict[tuple[str, str], object]) -> Config:
    """The file's values with those options over them that are not None. Raises ConfigError."""
    values: dict[str, object] = {}
    if config_file is not None:
        try:
            values = tomllib.loads(config_file.read_text())
        except OSError as error:
            raise ConfigError(f"{config_file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{config_file}: not TOML: {error}") from error
    for (section, key), value in options.items():
        if value is not None:
            table = values.setdefault(section, {})
            if section == "cpu_attn" and isinstance(table, list):
                if len(table) > 1:
                    raise ConfigError(f"{_TYPED[section, key]}: {config_file} has several [[cpu_attn]]; set it there")
                table = table[0] if table else None
            if isinstance(table, dict):  # Else `parse` says what is wrong with it.
                table[key] = value
    typed = {".".join(key): _TYPED[key] for key, value in options.items() if value is not None and key in _TYPED}
    return parse(values, str(config_file or "options"), typed)


def divide_cpu_attn(config: Config, num_services: int) -> Config:
    """The one service of attention as several that share out its pool and its threads. Raises ConfigError."""
    option = "--cpu-attn-services"
    if not 1 <= num_services <= _MAX_SERVICES:
        raise ConfigError(f"{option} must be from 1 to {_MAX_SERVICES}, is {num_services}")
    if num_services == len(config.cpu_attn):
        return config
    whole = config.cpu_attn[0]
    if len(config.cpu_attn) > 1:
        raise ConfigError(f"{option} is {num_services}, the file has {len(config.cpu_attn)} [[cpu_attn]]")
    if "listen" in whole.model_fields_set:
        raise ConfigError(f"{option} is {num_services}, cpu_attn.listen is the address of one")
    if whole.kv_bytes < num_services:
        raise ConfigError(f"{option} is {num_services}, cpu_attn.kv_bytes has nothing to share out: {whole.kv_bytes}")
    values = [
        whole.model_dump(exclude={"listen"})
        | {
            "kv_bytes": whole.kv_bytes // num_services,
            "num_threads": _share(whole.num_threads, num_services, index),
            "min_threads": _share(whole.min_threads, num_services, index),
            "max_threads": _share(whole.max_threads or usable_cores(), num_services, index),
        }
        for index in range(num_services)
    ]
    for value in values:  # Where there are fewer cores than threads were asked for.
        value["max_threads"] = max(value["max_threads"], value["num_threads"], value["min_threads"])
    services = tuple(CpuAttnConfig.model_validate(value) for value in values)
    return config.model_copy(update={"cpu_attn": services})


def _share(total: int, num_shares: int, index: int) -> int:
    """Of so many in all, for each at least one."""
    return max(1, total // num_shares + (index < total % num_shares))


def with_gateway(config: Config, off: bool) -> Config:
    """Unless it is off there is one, also where the file says nothing of it."""
    return config.model_copy(update={"gateway": None if off else config.gateway or GatewayConfig()})


def pin_model(config: Config) -> Config:
    """Finds the model once, so that a wrong name or a download shows here and not in each service's log."""
    files = find_model(config.model.source, config.model.load_format)
    source = str(files.gguf or files.directory)
    model = config.model.model_copy(update={"source": source, "name": config.model.name or files.name})
    return config.model_copy(update={"model": model})
