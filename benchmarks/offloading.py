"""A model larger than the device: policies beside transformers with accelerate's `device_map`, in one run.

The device is the CPU on either side, with memory for a share of the layers beside embedding and head:

    accelerate   `dispatch_model`: what fits is mapped to "cpu", other layers to "disk". Its hooks read each of their
                 modules from a memory-mapped file, which lies in the page cache, into memory of its own before that
                 module computes, and drop it afterwards. One static batch of `generate`, all cores. ("cpu" for layers
                 that do not fit would copy nothing on a device that is the CPU, and so be no offloading.)
    offloading   the same layers streamed from a mapped file into two buffers while others compute; a thread for each
                 core; the link is as fast as copies go
    partition    the same layers computed by cpu_attn_svc; one core for it, one for gpu_svc
    CPU-only     all layers computed by cpu_attn_svc, on all cores, embedding and head by gpu_svc on one

All in fp32 on the same prompts, whose greedy tokens have to be equal. Systems take turns; medians over rounds.

    python benchmarks/offloading.py [--batches 1,8] [--rounds 3] [--publish]
"""

import argparse
import asyncio
import os
import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]
from policy_check import running
from results import Row, arguments, publish
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_svc.activations import Activations
from gpu_svc.limits import Limits
from neoflex import AsyncClient
from svc_common.config import Config, parse
from svc_common.model.read_spec import read_spec
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles, resolve
from svc_common.model.tokenizer import load_tokenizer

_KV_BYTES = 64 * 2**20
_LIMITS = {"max_sequence_tokens": 512, "max_batch_tokens": 512, "max_running_sequences": 16}
"""Few points to measure at the start."""
_LEAST = 1.0
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Tokens that follow each prompt, so many."""


def prompts_of(files: ModelFiles, num: int, num_tokens: int) -> list[list[int]]:
    """Pieces of Python's language reference, all as long."""
    topics = pydoc_data.topics.topics
    tokens = load_tokenizer(files).encode(topics["objects"] + topics["compound"] + topics["typesmapping"])
    return [tokens[start : start + num_tokens] for start in range(0, num * num_tokens, num_tokens)]


def device_map(spec: ModelSpec, num_resident: int) -> dict[str, str]:
    """The first layers do not fit, as in a policy."""
    kept = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    first_kept = spec.num_layers - num_resident
    layers = {f"model.layers.{i}": "disk" if i < first_kept else "cpu" for i in range(spec.num_layers)}
    return kept | layers


def accelerated(files: ModelFiles, spec: ModelSpec, num_resident: int, directory: Path) -> Generate:
    gguf = {"gguf_file": files.gguf.name} if files.gguf else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, **gguf).eval()
    dispatch_model(model, device_map(spec, num_resident), main_device="cpu", offload_dir=directory)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        batch = torch.tensor(prompts)
        answers = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[list[int]] = answers[:, batch.shape[1] :].tolist()
        return tokens

    return generate


def served(address: str) -> Generate:
    async def answer_all(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        async with AsyncClient(address) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                    for prompt in prompts
                )
            )
        return [list(answer.token_ids) for answer in answers]

    return lambda prompts, num_tokens: asyncio.run(answer_all(prompts, num_tokens))


def configs(files: ModelFiles, spec: ModelSpec, num_resident: int, num_cores: int) -> Mapping[str, Config]:
    """By policy; weights, two buffers, activations and KV within the same memory."""
    layer_bytes = max(spec.layer_bytes(index, 4) for index in range(spec.num_layers))
    other_bytes = spec.weight_bytes(4) - sum(spec.layer_bytes(index, 4) for index in range(spec.num_layers))
    limits = Limits(_LIMITS["max_running_sequences"], _LIMITS["max_batch_tokens"], _LIMITS["max_sequence_tokens"])
    activations = Activations(spec, torch.device("cpu"), torch.float32, torch.float32).num_bytes(limits)
    memory_bytes = round(1.01 * ((num_resident + 2) * layer_bytes + other_bytes)) + _KV_BYTES + activations
    first_kept = spec.num_layers - num_resident
    partition = {"prefill_policy": "partition", "decode_policy": "partition", "cpu_layers": first_kept}

    def config(planner: dict[str, object], gpu_threads: int, cpu_threads: int) -> Config:
        values: dict[str, object] = {
            "model": {"source": str(files.gguf or files.directory)},
            "kv": {"prefix_cache": False},
            "planner": {"listen": "127.0.0.1:0", "mode": "gpu_only", **_LIMITS, **planner},
            "gpu": {
                "device": "cpu",
                "dtype": "fp32",
                "profile": "always",
                "kv_bytes": _KV_BYTES,
                "memory_bytes": memory_bytes,
                "num_threads": gpu_threads,
            },
            "cpu_attn": {"kv_bytes": 2 * _KV_BYTES, "num_threads": cpu_threads} if cpu_threads else {"kv_bytes": 0},
        }
        return parse(values, "benchmark")

    half = max(1, num_cores // 2)
    return {
        "offloading": config({"prefill_policy": "offload", "decode_policy": "offload"}, num_cores, 0),
        "partition": config(partition, max(1, num_cores - half), half),
        "CPU-only": config({"prefill_policy": "cpu_only", "decode_policy": "cpu_only"}, 1, num_cores),
    }


def rows(args: argparse.Namespace, systems: Mapping[str, Generate], prompts: list[list[int]]) -> Iterator[Row]:
    """Of one batch for each of `args.batches`; the first system is what the others are compared with."""
    other, *ours = systems
    for size in args.batches:
        batch, num_tokens = prompts[:size], size * args.new_tokens
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        tokens: dict[str, list[list[int]]] = {}
        for number in range(args.rounds + 1):  # The first warms up.
            for name, generate in systems.items():
                start_s = time.perf_counter()
                tokens[name] = generate(batch, args.new_tokens)
                if number:
                    seconds[name].append(time.perf_counter() - start_s)
        rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
        for name in ours:
            gains = [theirs / own for theirs, own in zip(seconds[other], seconds[name], strict=True)]
            detail = f"{rates[name]:.1f} / {rates[other]:.1f} tokens/s"
            of = f"{name} / {other}, output tokens/s"
            yield Row(f"batch {size}: {name}", statistics.median(gains), of, _LEAST, detail=detail)
        for name in ours:
            equal = sum(one == two for one, two in zip(tokens[name], tokens[other], strict=True))
            yield Row(f"batch {size}: {name}, answers", equal / size, f"equal to {other}'s / all", 1.0)


def main() -> None:
    parser = arguments("Offloading beside transformers with accelerate's device_map.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batches", type=lambda text: [int(item) for item in text.split(",")], default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resident", type=float, default=0.4, help="share of the layers that the device holds")
    args = parser.parse_args()
    files, num_cores = resolve(args.model), len(os.sched_getaffinity(0))
    spec = read_spec(files)
    num_resident = round(args.resident * spec.num_layers)
    torch.set_num_threads(num_cores)
    with ExitStack() as open_things:
        directory = open_things.enter_context(tempfile.TemporaryDirectory(prefix="nfx-"))
        systems: dict[str, Generate] = {"accelerate": accelerated(files, spec, num_resident, Path(directory))}
        for name, config in configs(files, spec, num_resident, num_cores).items():
            systems[name] = served(open_things.enter_context(running(config)).address)
        table = list(rows(args, systems, prompts_of(files, max(args.batches), args.prompt_tokens)))
    about = (
        f"{args.model} in fp32, the CPU as a device with room for {num_resident} of {spec.num_layers} layers, "
        f"{args.prompt_tokens} tokens in and {args.new_tokens} out, all requests at once, {num_cores} cores, medians "
        f"of {args.rounds} rounds in turns. *accelerate*: transformers' `generate` on one batch after "
        '`dispatch_model`, with the layers that do not fit on "disk", which here is a memory-mapped file in the page '
        "cache: hooks copy each module's weights before it computes. *offloading*: the same layers streamed from a "
        "mapped file while others compute. *partition*, *CPU-only*: computed by `cpu_attn_svc`. No link is emulated: "
        "copies go as fast as memory."
    )
    title = "Offloading beside accelerate's device_map"
    publish("offloading", title, "make bench-offloading", about, table, args.publish)


if __name__ == "__main__":
    main()
