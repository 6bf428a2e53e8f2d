"""`neoflex up`: the three services on this machine, supervised until Ctrl-C."""

import shutil
import signal
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from neoflex.cli.output import err, size
from neoflex.logs import LogFollower
from neoflex.supervisor import LocalStack
from svc_common.config import Config, ConfigError, parse
from svc_common.model.store import resolve

_POLL_S = 0.1
_COLOURS = {"planner_svc": "cyan", "gpu_svc": "green", "cpu_attn_svc": "yellow"}


def up(
    model: Annotated[str | None, typer.Argument(help="Built-in name, directory, GGUF file or hub id.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file; options below win over it.")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, gpu_only or asymmetric.")] = None,
    gpu_kv_bytes: Annotated[str | None, typer.Option(help="GPU KV cache, e.g. 64MiB; 0 for none.")] = None,
    host_kv_bytes: Annotated[str | None, typer.Option(help="Host KV pool; 0 runs without cpu_attn_svc.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of keys and values: auto, fp32, bf16, fp16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda or cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type to compute in: auto, fp32, bf16, fp16.")] = None,
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = None,
    cpu_threads: Annotated[int | None, typer.Option(help="Threads of attention on the CPU.")] = None,
    gpu_threads: Annotated[int | None, typer.Option(help="Threads of the cpu device; 0: what is left.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens one iteration computes at most.")] = None,
    max_sequence_tokens: Annotated[int | None, typer.Option(help="Tokens of prompt and answer at most.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where sockets and logs go; default: a temporary one.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Keep the services' logs off the terminal.")] = False,
) -> None:
    """Start and supervise the services; Ctrl-C lets running requests end, a second Ctrl-C does not."""
    options: dict[tuple[str, str], object] = {
        ("model", "source"): model,
        ("kv", "dtype"): kv_dtype,
        ("planner", "mode"): mode,
        ("planner", "listen"): None if port is None else f"127.0.0.1:{port}",
        ("planner", "max_batch_tokens"): max_batch_tokens,
        ("planner", "max_sequence_tokens"): max_sequence_tokens,
        ("gpu", "device"): device,
        ("gpu", "dtype"): dtype,
        ("gpu", "kv_bytes"): gpu_kv_bytes,
        ("gpu", "num_threads"): gpu_threads,
        ("cpu_attn", "kv_bytes"): host_kv_bytes,
        ("cpu_attn", "num_threads"): cpu_threads,
    }
    config = pin_model(effective_config(config_file, options))
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
            if isinstance(table, dict):  # Else `parse` says what is wrong with it.
                table[key] = value
    return parse(values, str(config_file or "options"))


def pin_model(config: Config) -> Config:
    """Finds the model once, so that a wrong name or a download shows here and not in each service's log."""
    files = resolve(config.model.source)
    source = str(files.gguf or files.directory)
    model = config.model.model_copy(update={"source": source, "name": config.model.name or files.name})
    return config.model_copy(update={"model": model})


@contextmanager
def run_directory(path: Path | None) -> Iterator[Path]:
    """The given directory, or a private temporary one, which is kept only where something failed."""
    if path is not None:
        yield path
        return
    directory = Path(tempfile.mkdtemp(prefix="neoflex-"))
    try:
        yield directory
    except Exception:
        err.print(f"logs are kept in {directory}", style="dim", markup=False)
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


class _StopSignals:
    """Counts Ctrl-C, SIGTERM and SIGHUP; from the second one on the services are killed."""

    def __init__(self, stack: LocalStack) -> None:
        self.received = 0
        self._stack = stack
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

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
        with err.status("starting") as spinner:
            while not signals.received and not stack.is_ready():
                _print_logs(follower)
                spinner.update(f"starting, {time.monotonic() - started:.0f} s")
                time.sleep(_POLL_S)
        _print_logs(follower)
        if not signals.received:
            _print_ready(stack, time.monotonic() - started)
        while not signals.received:
            stack.check()
            _print_logs(follower)
            time.sleep(_POLL_S)
        err.print("stopping: running requests may end; again to stop at once", style="bold")
    finally:
        stack.stop()
        _print_logs(follower)


def _print_logs(follower: LogFollower) -> None:
    for name, line in follower.new_lines():
        err.print(f"[{_COLOURS[name]}]{name:>12}[/] | ", end="")
        err.print(line, markup=False, soft_wrap=True)


def _print_ready(stack: LocalStack, start_s: float) -> None:
    info = stack.server_info()
    gpu, host = (size(blocks * info.block_bytes) for blocks in (info.gpu_blocks, info.host_blocks))
    err.print(f"[bold green]ready[/] on [bold]{stack.address}[/] after {start_s:.1f} s: {stack.config.model.name}")
    err.print(f"  device {info.device}, KV {gpu} on the GPU and {host} on the host, mode {stack.config.planner.mode}")
    err.print(f"  logs in {stack.run_dir}", markup=False)
    err.print(f"  try: neoflex generate --address {stack.address} 'Hello!'", markup=False)
