"""What the largest batch takes by its shapes, beside what a process that computes it takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stacks import own_environment

from gpu_svc.activations import Activations
from gpu_svc.limits import Limits
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
_LARGE_VOCABULARY = {"vocab_size": 30_000, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
CASES: dict[str, tuple[dict[str, Any], str, Limits]] = {
    "many tokens in several prompts": (_LLAMA, "bf16", Limits(64, 4096, 300)),
    "many tokens, experts": (_LLAMA | _EXPERTS, "fp32", Limits(2, 4096, 8192)),
    "a large vocabulary, drawn in one piece": (_LLAMA | _LARGE_VOCABULARY, "fp32", Limits(60, 64, 8192)),
    "a large vocabulary, drawn in pieces": (_LLAMA | _LARGE_VOCABULARY, "fp32", Limits(240, 256, 8192)),
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
from svc_common.decoder.load import load_decoder
from svc_common.memory import give_back_freed
from svc_common.model.shapes import find_model

def of_process(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def decoder_of(directory, dtype):
    spec, checkpoint = open_model(find_model(directory, "dummy"))
    return load_decoder(checkpoint, spec, DTYPES[dtype], torch.device("cpu"))

torch.set_num_threads(1)
for directory, dtype, limits in json.loads(sys.argv[1]):
    # What the first batch of all brings into memory is code.
    warm = decoder_of(directory, dtype)
    shape = KvShape.of(warm.spec, 16, torch.float32)
    run_largest_batch(warm, shape, Limits(2, 2, 64))
    decoder = decoder_of(directory, dtype)
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
    for name, (config, _, _) in CASES.items():
        made[name] = tmp_path_factory.mktemp("shape")
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def peaks(directories: dict[str, Path]) -> dict[str, int]:
    """Of a process of its own, by what its kernel says."""
    cases = [(str(directories[name]), dtype, vars_of(limits)) for name, (_, dtype, limits) in CASES.items()]
    argv = [sys.executable, "-c", _MEASURE, json.dumps(cases)]
    done = subprocess.run(argv, env=own_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


def vars_of(limits: Limits) -> tuple[int, int, int]:
    return limits.max_sequences, limits.max_batch_tokens, limits.max_sequence_tokens


@pytest.mark.parametrize("name", CASES)
def test_a_cpu_takes_at_most_what_is_computed_and_at_least_half(
    name: str, directories: dict[str, Path], peaks: dict[str, int]
) -> None:
    from svc_common.decoder.dtypes import DTYPES

    _, dtype, limits = CASES[name]
    bound = activations_of(directories[name], DTYPES[dtype], "cpu").num_bytes(limits)
    print(f"{name}: peak {peaks[name] / MIB:.1f} MiB, at most {bound / MIB:.1f} MiB, {bound / peaks[name]:.2f}")
    assert peaks[name] <= bound <= 2 * peaks[name]
