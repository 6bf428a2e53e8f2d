"""A stack of the command's own: the default model on a free port, and nothing left afterwards."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from neoflex.cli.output import err, fetch_model
from neoflex.cli.supervise import run_directory
from neoflex.cli.up import effective_config, pin_model
from svc_common.config import Config, CpuAttnConfig, ModelConfig


@contextmanager
def own_stack_config(mode: str, gpu_kv_bytes: str, host_kv_bytes: str) -> Iterator[tuple[Config, Path]]:
    """Its configuration and its run directory. Both directories are gone afterwards, also on SIGTERM."""
    signal.signal(signal.SIGTERM, _end_in_order)
    name = ModelConfig().source
    err.print(f"model: {fetch_model(name).gguf}", markup=False, soft_wrap=True)
    with run_directory(None) as directory, _segment_directory() as segment_dir:
        options: dict[tuple[str, str], object] = {
            ("model", "source"): name,
            ("planner", "listen"): "127.0.0.1:0",
            ("planner", "mode"): mode,
            ("gpu", "kv_bytes"): gpu_kv_bytes,
            ("gpu", "profile"): "always",  # Nothing is left afterwards.
            ("cpu_attn", "kv_bytes"): host_kv_bytes,
            ("cpu_attn", "segment_dir"): segment_dir,
        }
        yield pin_model(effective_config(None, options)), directory


@contextmanager
def _segment_directory() -> Iterator[Path]:
    """A private directory in shared memory, so that what is left there is ours.

    Not named like the services' own segments: those that start elsewhere sweep away what looks abandoned.
    """
    directory = Path(tempfile.mkdtemp(prefix="demo-of-neoflex-", dir=CpuAttnConfig().segment_dir))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _end_in_order(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, which stops the services."""
    raise SystemExit(128 + number)
