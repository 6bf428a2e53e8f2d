"""What the largest batch takes by its shapes, beside what a process that computes it takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stacks import own_environment

from gpu_svc.activations import FIXED_BYTES, Activations
from gpu_svc.largest_batch import prompt_lengths
from gpu_svc.limits import Limits
from svc_common.decoder.dtypes import DTYPES
from svc_common.model.read_spec import read_spec
from svc_common.model.store import ModelFiles

MIB = 2**20
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_LARGE_VOCABULARY = {"vocab_size": 20_000, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
CASES: dict[str, tuple[dict[str, Any], str, Limits, str]] = {
    "many tokens in several prompts": (_LLAMA, "bf16", Limits(64, 2048, 300), "cpu"),
    "many tokens, experts": (_LLAMA | _EXPERTS, "fp32", Limits(2, 2048, 8192), "cpu"),
    "a large vocabulary, drawn in one piece": (_LLAMA | _LARGE_VOCABULARY, "fp32", Limits(60, 64, 8192), "cpu"),
    "a large vocabulary, drawn in pieces": (_LLAMA | _LARGE_VOCABULARY, "fp32", Limits(240, 256, 8192), "cpu"),
    "operations of a GPU": (_LLAMA, "fp32", Limits(2, 2048, 8192), "cuda"),
    "operations of a GPU, experts": (_LLAMA | _EXPERTS, "fp32", Limits(2, 2048, 8192), "cuda"),
}
_MEASURE = """
import gc, json, sys
from pathlib import Path
import torch
from gpu_svc.kv_cache import KvShape
from gpu_svc.largest_batch import run_largest_batch
from gpu_svc.limits import Limits
from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.load import load_decoder, load_weights
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.memory import give_back_freed
from svc_common.model.shapes import find_model

def of_process(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def decoder_of(directory, dtype, device):
    spec, checkpoint = open_model(find_model(directory, "dummy"))
    if device == "cuda":
        return TorchDecoder(spec, load_weights(checkpoint, spec, DTYPES[dtype], torch.device("cpu")))
    return load_decoder(checkpoint, spec, DTYPES[dtype], torch.device("cpu"))

torch.set_num_threads(1)
for directory, dtype, limits, device in json.loads(sys.argv[1]):
    # What the first batch of all brings into memory is code.
    warm = decoder_of(directory, dtype, device)
    shape = KvShape.of(warm.spec, 16, torch.float32)
    run_largest_batch(warm, shape, Limits(2, 2, 64))
    decoder = decoder_of(directory, dtype, device)
    del warm
    gc.collect(), give_back_freed()
    before = of_process("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    result = run_largest_batch(decoder, shape, Limits(*limits))
    assert len(result.tokens) == min(limits[0], limits[1]) and not result.not_finite
    assert sum(len(part.chosen) for _, part in result.prompt_logprobs) == limits[1] - len(result.tokens)
    print(of_process("VmHWM:") - before, flush=True)
    del decoder
"""


def activations_of(directory: Path, dtype: torch.dtype, device: str, **options: Any) -> Activations:
    spec = read_spec(ModelFiles("m", directory))
    return Activations(spec, torch.device(device), dtype, options.get("host_dtype"))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shapes of the cases."""
    made = {}
    for name, (config, *_) in CASES.items():
        made[name] = tmp_path_factory.mktemp("shape")
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def peaks(directories: dict[str, Path]) -> dict[str, int]:
    """Of a process of its own, by what its kernel says."""
    cases = [
        (str(directories[name]), dtype, vars_of(limits), device) for name, (_, dtype, limits, device) in CASES.items()
    ]
    argv = [sys.executable, "-c", _MEASURE, json.dumps(cases)]
    done = subprocess.run(argv, env=own_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


def vars_of(limits: Limits) -> tuple[int, int, int]:
    return limits.max_sequences, limits.max_batch_tokens, limits.max_sequence_tokens


@pytest.mark.parametrize("name", CASES)
def test_a_process_takes_at_most_what_is_computed_and_at_least_half(
    name: str, directories: dict[str, Path], peaks: dict[str, int]
) -> None:
    """Operations of a GPU on the CPU, which has no need of a GPU's scratch."""
    _, dtype, limits, device = CASES[name]
    of_case = activations_of(directories[name], DTYPES[dtype], device)
    bound = of_case.num_bytes(limits) - of_case.chunk_bytes(limits)  # No past here.
    bound -= FIXED_BYTES[device] - FIXED_BYTES["cpu"]
    print(f"{name}: peak {peaks[name] / MIB:.1f} MiB, at most {bound / MIB:.1f} MiB, {bound / peaks[name]:.2f}")
    assert peaks[name] <= bound <= 2 * peaks[name]


def test_what_else_a_gpu_takes_for_a_host_tier(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton: a cohort's tokens, and a past of 8,192 tokens that is fetched, two heads of 64 numbers each."""
    monkeypatch.setattr("gpu_svc.activations.has_triton", lambda device: True)
    directory, limits = directories["operations of a GPU"], Limits(2, 100, 8192)

    def num_bytes(device: str, host_dtype: torch.dtype | None) -> int:
        return activations_of(directory, torch.bfloat16, device, host_dtype=host_dtype).num_bytes(limits)

    per_token = (num_bytes("cuda", torch.bfloat16) - num_bytes("cuda", torch.int8)) / 8192
    assert per_token == 2 * 2 * 64 * 2  # As it comes, and in the decoder's order.
    masks = 100 * 8192 * (1 + 2)
    fetched = 8192 * 2 * 2 * 64 * 2 * (2 + 2)
    more = num_bytes("cuda", torch.bfloat16) - num_bytes("cuda", None)
    cohort = more - masks - fetched
    assert 0 < cohort == num_bytes_of_tokens(directory, 102) - num_bytes_of_tokens(directory, 100)
    assert 0 < num_bytes("cpu", torch.bfloat16) - num_bytes("cpu", None) < 2**20
    monkeypatch.setattr("gpu_svc.activations.has_triton", lambda device: False)
    assert num_bytes("cuda", torch.bfloat16) - num_bytes("cuda", None) == cohort


def num_bytes_of_tokens(directory: Path, num_tokens: int) -> int:
    return activations_of(directory, torch.bfloat16, "cuda").num_bytes(Limits(2, num_tokens, 8192))


def test_the_largest_batch_is_as_large_as_the_limits_allow() -> None:
    for limits, lengths in (
        (Limits(3, 10, 100), [8, 1, 1]),
        (Limits(3, 10, 4), [4, 4, 2]),
        (Limits(3, 10, 2), [2, 2, 2]),
        (Limits(16, 4, 100), [1, 1, 1, 1]),
    ):
        assert list(prompt_lengths(limits)) == lengths
