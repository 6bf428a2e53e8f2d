"""`neoflex up`: the services on this machine, supervised until Ctrl-C."""

import shutil
import signal
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic import ByteSize
from rich.text import Text

from neoflex.cli.output import STARTING, describe_kv, err, explain_device, memory_rows, starting
from neoflex.logs import LogFollower
from neoflex.supervisor import LocalStack
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
from svc_common.memory import size_text, usable_memory_bytes
from svc_common.model.shapes import find_model

_POLL_S = 0.1
_NO_HTTP = "off"
_NAME_CHARS = len("cpu_attn_svc")
_COLOURS = {"planner_svc": "cyan", "gpu_svc": "green", "cpu_attn_svc": "yellow", "gateway_svc": "magenta"}
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
    with run_directory(run_dir) as directory:
        stack = LocalStack(config, directory, on_event=lambda line: err.print(line, style="bold", markup=False))
        supervise(stack, quiet)


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


@contextmanager
def run_directory(path: Path | None) -> Iterator[Path]:
    """The given directory, or a private temporary one, which is kept only where something failed and left logs, or
    where a service wrote its state."""
    if path is not None:
        yield path
        return
    directory = Path(tempfile.mkdtemp(prefix="neoflex-"))
    keep = False
    try:
        yield directory
    except Exception:
        keep = any(directory.glob("*.log"))
        raise
    finally:
        keep = keep or any(directory.glob("*.dump"))
        if keep:
            err.print(f"logs are kept in {directory}", style="dim", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


class _StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP; from the second one on the services are killed. SIGUSR1 goes on to them."""

    def __init__(self, stack: LocalStack) -> None:
        self.received = 0
        self._stack = stack
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR1, lambda number, frame: stack.ask_for_dumps())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received += 1
        if self.received > 1:
            self._stack.kill()


def supervise(stack: LocalStack, quiet: bool) -> None:
    signals = _StopSignals(stack)
    started = time.monotonic()
    follower = LogFollower({} if quiet else stack.log_paths)
    stack.start()
    try:
        with starting() as spinner:
            while not signals.received and not stack.is_ready():
                _print_logs(follower)
                spinner.update(f"{STARTING} {time.monotonic() - started:.0f} s")
                time.sleep(_POLL_S)
        _print_logs(follower)
        ready = not signals.received
        if ready:
            _print_ready(stack, time.monotonic() - started)
        while not signals.received:
            stack.check()
            _print_logs(follower)
            time.sleep(_POLL_S)
        drain_s = stack.config.planner.drain_s
        mercy = f": running requests have {drain_s:g} s to end; a second Ctrl-C stops at once" if ready else ""
        err.print(f"stopping{mercy}", style="bold")
    finally:
        stack.stop()
        _print_logs(follower)


def _print_logs(follower: LogFollower) -> None:
    for name, line in follower.new_lines():
        # In one piece: a spinner's redraw wipes out what has not yet come to the end of its line.
        colour = _COLOURS[name.partition("-")[0]]
        err.print(
            Text.assemble((f"{name:>{max(_NAME_CHARS, follower.name_width)}}", colour), f" | {line}"), soft_wrap=True
        )


def _print_ready(stack: LocalStack, start_s: float) -> None:
    info, model = stack.server_info(), stack.model_info()
    kv = describe_kv(info, model)
    chosen = ", the faster by measurement" if stack.config.gpu.dtype == "auto" and info.device == "cpu" else ""
    err.print(f"[bold green]ready[/] on [bold]{stack.address}[/] after {start_s:.1f} s: {stack.config.model.name}")
    err.print(f"  device {info.device}, computes in {model.compute_dtype}{chosen}")
    err.print(f"  {kv}, mode {stack.config.planner.mode}")
    if info.memory_use:
        for place, what in memory_rows(info.memory_use):
            err.print(f"  {place}: {what}", markup=False)
        in_host = info.memory_use.host_bytes + (info.memory_use.device_bytes if info.device == "cpu" else 0)
        err.print(f"  host memory asked for: {size_text(in_host)} of {size_text(usable_memory_bytes())}", markup=False)
    explain_device(info.device, indent=2)
    if stack.http_url:
        err.print(f"  OpenAI-compatible HTTP: {stack.http_url}", markup=False)
        if stack.console_url:
            err.print(f"  console: {stack.console_url}", markup=False)
    err.print(f"  logs in {stack.run_dir}", markup=False)
    access = "".join(_access_options(stack.config))
    # Made-up weights have nothing to say, and often no tokenizer to be asked by.
    command, prompt = ("bench", "") if stack.config.model.load_format == "dummy" else ("generate", " 'Hello!'")
    err.print(f"  try: neoflex {command} --address {stack.address}{access}{prompt}", markup=False, soft_wrap=True)


def _access_options(config: Config) -> Iterator[str]:
    """How a client on this machine gets in. Of client certificates each has its own."""
    if config.tls and config.tls.ca and not config.planner.listen.startswith("unix:"):
        yield f" --ca-file {config.tls.ca}"
        if config.tls.server_name:
            yield f" --server-name {config.tls.server_name}"
    if config.planner.client_certificates:
        yield " --certificate-file YOURS --key-file YOURS"
    if config.planner.api_keys_file:
        yield " --api-key-file YOURS"
