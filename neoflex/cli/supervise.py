"""What `neoflex up` does from the start of the services to their end: shows their logs, and passes signals on."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.markup import escape

from neoflex.cli.output import STARTING, describe_device, describe_kv, memory_rows
from neoflex.cli.voice import PlainVoice, Voice
from neoflex.logs import LogFollower
from neoflex.supervisor import LocalStack
from svc_common.config import Config
from svc_common.memory import size_text, usable_memory_bytes

_POLL_S = 0.1


@contextmanager
def run_directory(path: Path | None, voice: Voice | None = None) -> Iterator[Path]:
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
            (voice or PlainVoice()).say(f"logs are kept in {directory}")
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


def supervise(stack: LocalStack, quiet: bool, voice: Voice) -> None:
    """Raises StackError."""
    signals = _StopSignals(stack)
    started = time.monotonic()
    follower = LogFollower({} if quiet else stack.log_paths)
    stack.start()
    try:
        with voice.starting() as spinner:
            while not signals.received and not stack.is_ready():
                print_logs(follower, voice)
                spinner.update(f"{STARTING} {time.monotonic() - started:.0f} s")
                time.sleep(_POLL_S)
        print_logs(follower, voice)
        ready = not signals.received
        if ready:
            for line in ready_lines(stack, time.monotonic() - started):
                voice.say(line, markup=True)
        while not signals.received:
            stack.check()
            print_logs(follower, voice)
            time.sleep(_POLL_S)
        drain_s = stack.config.planner.drain_s
        mercy = f": running requests have {drain_s:g} s to end; a second Ctrl-C stops at once" if ready else ""
        voice.say(f"[bold]stopping{mercy}[/]", markup=True)
    finally:
        stack.stop()
        print_logs(follower, voice)


def print_logs(follower: LogFollower, voice: Voice) -> None:
    for name, line in follower.new_lines():
        voice.log(name, line, follower.name_width)


def ready_lines(stack: LocalStack, start_s: float) -> Iterator[str]:
    """What there is to know of a stack that has begun to serve, in rich's markup."""
    info, model = stack.server_info(), stack.model_info()
    chosen = ", the faster by measurement" if stack.config.gpu.dtype == "auto" and info.device == "cpu" else ""
    name = escape(stack.config.model.name)
    yield f"[bold green]ready[/] on [bold]{escape(stack.address)}[/] after {start_s:.1f} s: {name}"
    yield f"  device {info.device}, computes in {model.compute_dtype}{chosen}"
    yield f"  {describe_kv(info, model)}, mode {stack.config.planner.mode}"
    if info.memory_use:
        for place, what in memory_rows(info.memory_use):
            yield f"  {place}: {what}"
        in_host = info.memory_use.host_bytes + (info.memory_use.device_bytes if info.device == "cpu" else 0)
        yield f"  host memory asked for: {size_text(in_host)} of {size_text(usable_memory_bytes())}"
    if explanation := describe_device(info.device):
        yield f"  [dim]{explanation}[/]"
    if stack.http_url:
        yield escape(f"  OpenAI-compatible HTTP: {stack.http_url}")
        if stack.console_url:
            yield escape(f"  console: {stack.console_url}")
    yield escape(f"  logs in {stack.run_dir}")
    access = "".join(_access_options(stack.config))
    # Made-up weights have nothing to say, and often no tokenizer to be asked by.
    command, prompt = ("bench", "") if stack.config.model.load_format == "dummy" else ("generate", " 'Hello!'")
    yield escape(f"  try: neoflex {command} --address {stack.address}{access}{prompt}")


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
