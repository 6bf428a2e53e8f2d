"""The options of `neoflex plan`, checked; what is wrong with one is said with its name and its limit."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from planner_svc.advisor.errors import InputError
from planner_svc.advisor.machines import known_machines
from planner_svc.policy import RequestMix
from svc_common.model.shapes import known_shapes
from svc_common.model.spec import ModelSpec

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOST_TOKENS = 10_000_000
_MOST_SEQUENCES = 100_000
_DEFAULT_BATCH_TOKENS = 16384
_ABOUT = """\
Which execution policy serves a model best on a machine, by estimate: no weights and no GPU are needed.
Prefill and decode each run all layers on the GPU (resident, or streamed from host memory: offloading), the first ones
on the CPU (partition), or all on the CPU.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one call."""

    model: str
    hardware: str
    prompt_tokens: int
    output_tokens: int
    num_sequences: int
    batch_tokens: int
    gpu_memory: int | None
    host_memory: int | None
    dtype: str
    json: bool
    pictures: tuple[Path, ...]
    """A PNG, an SVG, or both."""

    def mix(self, spec: ModelSpec) -> RequestMix:
        """Raises InputError where the model's context is shorter."""
        total_tokens = self.prompt_tokens + self.output_tokens
        if total_tokens > spec.context_tokens:
            raise InputError(
                f"--prompt and --output: the model's context is {spec.context_tokens:,} tokens, these are "
                f"{total_tokens:,} together"
            )
        return RequestMix(self.prompt_tokens, self.output_tokens, self.num_sequences, self.batch_tokens)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Ends the process with exit code 2 for a bad option."""
    epilog = f"Models: {', '.join(known_shapes())}.\nMachines: {', '.join(known_machines())}."
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "neoflex plan", description=_ABOUT, epilog=epilog, formatter_class=formatter, allow_abbrev=False
    )
    add = parser.add_argument
    shapes = "a shape known by name, config.json, directory, .gguf file or hub id"
    add("--model", required=True, metavar="M", help=shapes)
    machines = "GPU, GPU+HOST, or a .toml file with [gpu] and [host] (planner_svc/advisor/machines.py)"
    add("--hardware", required=True, metavar="H", help=machines)
    add("--prompt", type=_whole(_MOST_TOKENS), default=512, metavar="N", help="tokens of each prompt (512)")
    add("--output", type=_whole(_MOST_TOKENS), default=32, metavar="N", help="tokens of each answer (32)")
    add("--batch", type=_whole(_MOST_SEQUENCES), default=8, metavar="N", help="requests at a time (8)")
    batch_tokens = f"prompt tokens that an iteration computes at most ({_DEFAULT_BATCH_TOKENS})"
    add("--batch-tokens", type=_whole(_MOST_TOKENS), default=_DEFAULT_BATCH_TOKENS, metavar="N", help=batch_tokens)
    add("--gpu-memory", type=_size, metavar="SIZE", help="for weights, KV and buffers, e.g. 24GiB (the machine's)")
    add("--host-memory", type=_size, metavar="SIZE", help="likewise on the host")
    dtype = "of weights, activations and KV (bf16); FLOP/s stay those of the machine's figures"
    add("--dtype", choices=tuple(DTYPE_BYTES), default="bf16", help=dtype)
    add("--json", action="store_true", help="print one JSON object")
    add("--png", type=Path, metavar="FILE", help="draw a prefill and a decode iteration of the choice")
    add("--svg", type=Path, metavar="FILE", help="likewise")
    found = parser.parse_args(arguments)
    try:
        for option, path in (("--png", found.png), ("--svg", found.svg)):
            if path is not None:
                _check_writable(path, option)
    except InputError as error:
        parser.error(str(error))
    return Options(
        model=found.model,
        hardware=found.hardware,
        prompt_tokens=found.prompt,
        output_tokens=found.output,
        num_sequences=found.batch,
        batch_tokens=found.batch_tokens,
        gpu_memory=found.gpu_memory,
        host_memory=found.host_memory,
        dtype=found.dtype,
        json=found.json,
        pictures=tuple(path for path in (found.png, found.svg) if path is not None),
    )


def _whole(highest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, is {text!r}") from None
        if not 1 <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be from 1 to {highest:,}, is {text}")
        return value

    return convert


def _size(text: str) -> int:
    try:
        value = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"must be a size such as 24GiB, is {text!r}") from None
    if not 1 <= value <= 2**50:
        raise argparse.ArgumentTypeError(f"must be from 1 byte to 1 PiB, is {text}")
    return value


def _check_writable(path: Path, option: str) -> None:
    """Before anything is computed."""
    if path.suffix != f".{option.removeprefix('--')}":
        raise InputError(f"argument {option}: the file must end in .{option.removeprefix('--')}, is {path.name}")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError(f"argument {option}: cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()
