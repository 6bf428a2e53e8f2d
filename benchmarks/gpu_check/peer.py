"""transformers' `generate` and the executor, on the GPU alone, with one batch of the same shape in the same run."""

import gc
import time
from typing import Any

import torch

from gpu_check import absent
from gpu_check.cases import BLOCK_TOKENS, Case, case_of, does_not_fit
from gpu_check.driver import Driver
from gpu_check.model import dummy_decoder, hf_config, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from svc_common.model.spec import ModelSpec
from svc_common.plan import Mode, PrefillChunk, SubBatch, Tier

_ROUNDS = 2
"""Of which the better counts: the first one chooses kernels."""


def run(setting: Setting, report: Report, case_name: str) -> None:
    what = "output tokens, transformers and GPU-only"
    case = case_of(case_name, setting)
    if reason := absent.lacking("transformers"):
        report.not_run(what, reason)
        return
    if not setting.on_cuda and (reason := absent.lacking(*absent.EXTENSION_MODULES)):
        report.not_run(what, f"{reason}: device cpu computes with them")
        return
    num_sequences, prompt_tokens, output_tokens = (4, 32, 8) if setting.tiny else (16, 512, 64)
    num_tokens = num_sequences * (prompt_tokens + output_tokens)
    if reason := does_not_fit(case, setting, 2 * num_tokens):
        report.not_run(what, reason)
        return
    theirs_s = _transformers_s(case, setting, num_sequences, prompt_tokens, output_tokens)
    gc.collect()
    if setting.on_cuda:
        torch.cuda.empty_cache()
    ours_s = _executor_s(case.spec, setting, num_sequences, prompt_tokens, output_tokens)
    tokens = num_sequences * output_tokens
    ours, theirs = tokens / ours_s, tokens / theirs_s
    detail = f"{ours:.0f} and {theirs:.0f} output tokens/s, {num_sequences} x {prompt_tokens} in, {output_tokens} out"
    report.figure(what, detail, ours / theirs, "executor / transformers", ours_per_s=ours, theirs_per_s=theirs)


def _prompts(spec: ModelSpec, num_sequences: int, prompt_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(spec.vocab_size, (num_sequences, prompt_tokens), generator=generator)


def _transformers_s(case: Case, setting: Setting, num_sequences: int, prompt_tokens: int, output_tokens: int) -> float:
    """With its own initial weights: no number of them changes the time."""
    import transformers

    dtype = sixteen_bits(setting.device) if setting.on_cuda else torch.float32
    config = transformers.LlamaConfig(**hf_config(case.spec) | {"pad_token_id": 0})
    with torch.device(setting.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    ids = _prompts(case.spec, num_sequences, prompt_tokens).to(setting.device)
    seconds = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_tokens,
                max_new_tokens=output_tokens,
            )
        assert out.shape[1] == prompt_tokens + output_tokens
        out.cpu()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def _executor_s(spec: ModelSpec, setting: Setting, num_sequences: int, prompt_tokens: int, output_tokens: int) -> float:
    decoder = dummy_decoder(spec, setting)
    shape = KvShape.of(spec, BLOCK_TOKENS, decoder.dtype)
    blocks_each = -(-(prompt_tokens + output_tokens) // BLOCK_TOKENS)
    executor = Executor(decoder, shape, num_sequences * blocks_each * shape.block_bytes)
    limits = Limits(num_sequences, 4 * prompt_tokens, prompt_tokens + output_tokens)
    prompts = _prompts(spec, num_sequences, prompt_tokens).tolist()
    seconds = []
    for epoch in range(1, _ROUNDS + 1):
        driver = Driver(executor, limits, epoch=epoch)
        start_s = time.perf_counter()
        for first in range(0, num_sequences, 4):  # As many prompts as a batch may have tokens.
            ids = range(first, min(first + 4, num_sequences))
            new = tuple(driver.new_sequence(i, prompts[i], Tier.GPU, output_tokens) for i in ids)
            chunks = tuple(PrefillChunk(i, 0, prompt_tokens) for i in ids)
            driver.run(SubBatch(prefills=chunks), mode=Mode.GPU_ONLY, new_sequences=new)
        for _ in range(output_tokens - 1):
            driver.run(SubBatch(gpu_decodes=tuple(range(num_sequences))), mode=Mode.GPU_ONLY)
        seconds.append(time.perf_counter() - start_s)
        assert all(len(tokens) == output_tokens for tokens in driver.tokens.values())
    executor.close()
    return min(seconds)
