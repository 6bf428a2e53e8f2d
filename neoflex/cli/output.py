"""How the command speaks: answers on standard output, everything else on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.status import Status
from rich.text import Text

from neoflex.generation import Usage
from neoflex.types import Counters, MemoryUse, ModelInfo, ServerInfo
from svc_common.memory import size_text
from svc_common.model import fetch
from svc_common.model.store import ModelFiles
from svc_common.wording import counted, times

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

STARTING = "starting the services (they load the model and measure this machine) ..."


def fail(text: str, code: int = 1) -> NoReturn:
    """Prints what went wrong and exits."""
    err.print(Text.assemble(("error:", "bold red"), " ", text), soft_wrap=True)
    raise SystemExit(code)


def starting() -> Status:
    """A spinner for the time until a stack is ready; one line where the output is no terminal."""
    if not err.is_terminal:
        err.print(STARTING)
    return err.status(STARTING)


def describe_device(device: str) -> str:
    """For those who wonder what "the GPU" is in numbers from a machine without one; empty where there is one."""
    return "no GPU here: torch on the CPU plays the GPU, in a process of its own" if device == "cpu" else ""


def explain_device(device: str) -> None:
    """Prints that."""
    if explanation := describe_device(device):
        err.print(explanation, style="dim")


def describe_kv(server: ServerInfo, model: ModelInfo) -> str:
    """How much KV each tier holds, and in which type."""
    gpu, host = (
        size_text(server.gpu_blocks * server.block_bytes),
        size_text(server.host_blocks * server.host_block_bytes),
    )
    return f"KV {gpu} in {model.kv_dtype} on the GPU and {host} in {model.host_kv_dtype} on the host"


def memory_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """What lies where, in bytes, as rows of a table."""
    device, host = [("weights", use.device_weight_bytes)], [("KV", use.host_kv_bytes)]
    if use.device_buffer_bytes:
        device.append(("buffers for streamed weights", use.device_buffer_bytes))
    if use.device_graph_bytes:
        device.append(("graphs", use.device_graph_bytes))
    if use.device_activation_bytes:
        device.append(("activations", use.device_activation_bytes))
    device.append(("KV", use.device_kv_bytes))
    if use.device_memory_bytes:
        device.append(("free", use.device_memory_bytes - use.device_bytes))
    if use.host_weight_bytes:
        host.insert(0, ("weights", use.host_weight_bytes))
    return [("on the device", _sizes(device)), ("in host memory", _sizes(host))]


def _sizes(parts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in parts)


def describe_usage(usage: Usage) -> str:
    """Tokens and the two latencies, in one line."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{counted(usage.prompt_tokens, 'token')} in{cached}, {usage.completion_tokens:,} out"]
    parts.append(f"TTFT {usage.time_to_first_token_s * 1e3:.0f} ms")
    if usage.completion_tokens > 1:
        parts.append(f"TPOT {usage.time_per_output_token_s * 1e3:.1f} ms")
    if usage.recomputations:
        parts.append(f"recomputed {times(usage.recomputations)}")
    if usage.targets_met is not None:
        parts.append("in time" if usage.targets_met else "late")
    return " · ".join(parts)


def counter_rows(counters: Counters) -> list[tuple[str, str]]:
    """What the two processors did, as rows of a table."""
    return [
        ("iterations, GPU-only", f"{counters.gpu_only_iterations:,}"),
        ("iterations, asymmetric", f"{counters.asymmetric_iterations:,}"),
        ("iterations, same-layer", f"{counters.same_layer_iterations:,}"),
        ("iterations, decoupled", f"{counters.decoupled_iterations:,}"),
        ("tokens attended on the GPU", f"{counters.gpu_attended_tokens:,}"),
        ("tokens attended on the CPU", f"{counters.cpu_attended_tokens:,}"),
        ("KV moved to the host", size_text(counters.swapped_out_bytes)),
        ("KV moved to the GPU", size_text(counters.swapped_in_bytes)),
        ("tokens prefilled", f"{counters.prefilled_tokens:,}"),
        ("tokens cached", f"{counters.cached_tokens:,}"),
        ("tokens generated", f"{counters.generated_tokens:,}"),
        ("preemptions", f"{counters.preemptions:,}"),
        ("tokens recomputed", f"{counters.recomputed_tokens:,}"),
        ("losses of the executor", f"{counters.executor_losses:,}"),
        ("executor busy", f"{counters.executor_busy_ns / 1e9:.2f} s"),
        ("of it waiting for the CPU", f"{counters.cpu_wait_ns / 1e9:.2f} s"),
        ("CPU busy in iterations", f"{counters.cpu_attention_ns / 1e9:.2f} s"),
        ("CPU threads given, taken", f"{times(counters.cpu_threads_grown)}, {times(counters.cpu_threads_shrunk)}"),
        ("planning", f"{counters.planning_ns / 1e9:.2f} s"),
        ("stalls", f"{counters.stalls:,}"),
    ]


@contextmanager
def fetch_progress() -> Iterator[fetch.Progress]:
    """A progress bar for `fetch`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(stage: str, done_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=stage, completed=done_bytes, total=total_bytes)

        yield report


def fetch_model(name: str) -> ModelFiles:
    """Fetches a built-in model with a progress bar."""
    with fetch_progress() as report:
        return fetch.fetch(name, progress=report)
