"""`neoflex demo`: the whole path once, on this machine, with numbers, and nothing left afterwards."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from neoflex.cli.arguments import check_prompt
from neoflex.cli.output import counter_rows, describe_kv, err, explain_device, out, starting
from neoflex.cli.own_stack import own_stack_config
from neoflex.client import Client
from neoflex.generation import Completion, Message
from neoflex.supervisor import LocalStack, StackError
from neoflex.types import Counters
from svc_common.config import Config
from svc_common.wording import counted

_SUBJECTS = ("rivers", "volcanoes", "bees", "bridges", "clocks", "glaciers", "lighthouses", "bread", "maps", "owls")


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the demo saw from the outside."""

    first_token_s: float
    answer_s: float
    answer_tokens: int
    all_s: float
    all_tokens: int
    counters: Counters

    @property
    def per_token_s(self) -> float:
        """Mean time between the answer's tokens after the first."""
        return (self.answer_s - self.first_token_s) / max(1, self.answer_tokens - 1)


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = "Why is the sky blue?",
    mode: Annotated[str, typer.Option(help="auto, gpu_only, asymmetric, same_layer or decoupled.")] = "auto",
    gpu_kv_bytes: Annotated[str, typer.Option(help="GPU KV cache: small, so that the host gets work, too.")] = "8MiB",
    host_kv_bytes: Annotated[str, typer.Option(help="Host KV pool.")] = "512MiB",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, the shown one included.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 96,
) -> None:
    """Fetch the default model, serve it, stream an answer, say what happened, stop everything."""
    check_prompt(prompt)
    with own_stack_config(mode, gpu_kv_bytes, host_kv_bytes) as (config, directory):
        measured = _serve_once(config, directory, prompt, concurrency, max_tokens)
        for service in config.cpu_attn:
            _check_nothing_left(service.segment_dir)
    out.print(_table(measured, concurrency))


def _serve_once(config: Config, directory: Path, prompt: str, concurrency: int, max_tokens: int) -> _Measured:
    stack = LocalStack(config, directory, on_event=lambda line: err.print(line, markup=False))
    pids: dict[str, int] = {}
    with stack:
        started = time.monotonic()
        with starting():
            stack.wait_ready()
        pids = stack.pids
        info = stack.server_info()
        kv = describe_kv(info, stack.model_info())
        names = ", ".join(f"{name} ({pid})" for name, pid in pids.items())
        err.print(f"ready after {time.monotonic() - started:.1f} s: {names}")
        err.print(f"device {info.device}, {kv}, mode {config.planner.mode}")
        explain_device(info.device)
        err.print(f"{concurrency - 1} more requests run beside this one, to give both processors work\n")
        measured = _drive(stack, prompt, concurrency, max_tokens)
        err.print("\nstopping")
    if left := [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]:
        raise StackError(f"still running: {', '.join(left)}")
    return measured


def _drive(stack: LocalStack, prompt: str, concurrency: int, max_tokens: int) -> _Measured:
    """Streams the answer to the terminal while the other requests run."""
    # The client inside the pool: on Ctrl-C it is closed first, which ends the requests that the pool waits for.
    with ThreadPoolExecutor(max(1, concurrency - 1)) as pool, stack.connect() as client:
        before = client.server_info().counters
        started = time.monotonic()
        others = [pool.submit(_ask_beside, client, i, max_tokens) for i in range(concurrency - 1)]
        first_token_s, num_tokens = 0.0, 0
        with client.stream(messages=[Message("user", prompt)], temperature=0, max_tokens=max_tokens) as stream:
            try:
                for delta in stream:
                    if delta.token_ids and not num_tokens:
                        first_token_s = time.monotonic() - started
                    num_tokens += len(delta.token_ids)
                    out.print(delta.text, end="", markup=False, soft_wrap=True)
            finally:  # Also before an error's line.
                out.print()
        answer_s = time.monotonic() - started
        all_tokens = num_tokens + _tokens_of(others)
        all_s = time.monotonic() - started
        done = client.server_info().counters.since(before)
    return _Measured(first_token_s, answer_s, num_tokens, all_s, all_tokens, done)


def _ask_beside(client: Client, number: int, max_tokens: int) -> Completion:
    subject = _SUBJECTS[number % len(_SUBJECTS)]
    messages = [Message("user", f"Tell me a long story about {subject}, number {number}.")]
    return client.generate(messages=messages, max_tokens=max_tokens, seed=number, ignore_eos=True)


def _tokens_of(futures: list[Future[Completion]]) -> int:
    return sum(future.result().usage.completion_tokens for future in futures)


def _check_nothing_left(segment_dir: Path) -> None:
    if left := sorted(path.name for path in segment_dir.iterdir()):
        raise StackError(f"shared segments left in {segment_dir}: {', '.join(left)}")
    err.print("nothing is left: all services ended, shared memory is released\n")


def _table(measured: _Measured, concurrency: int) -> Table:
    table = Table(title="what happened", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right", overflow="fold")
    table.add_row("time to first token", f"{measured.first_token_s * 1e3:.0f} ms")
    table.add_row("time per output token", f"{measured.per_token_s * 1e3:.1f} ms")
    rate = measured.answer_tokens / measured.answer_s
    table.add_row("this answer", f"{counted(measured.answer_tokens, 'token')}, {rate:.1f} per second")
    all_rate = measured.all_tokens / measured.all_s
    table.add_row(f"all {concurrency} answers", f"{measured.all_tokens} tokens, {all_rate:.1f} per second")
    table.add_section()
    for name, value in counter_rows(measured.counters):
        table.add_row(name, value)
    return table
