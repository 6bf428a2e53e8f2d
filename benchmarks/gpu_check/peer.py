"""transformers' `generate` and the executor, on the GPU alone, with one batch of the same shape in the same run."""

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from gpu_check import absent
from gpu_check.cases import BLOCK_TOKENS, case_of, does_not_fit
from gpu_check.choices import captured_text
from gpu_check.driver import Driver
from gpu_check.model import dummy_decoder, hf_config, make_executor, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.limits import Limits
from svc_common.model.spec import ModelSpec
from svc_common.plan import Mode, PrefillChunk, SubBatch, Tier


@dataclass(frozen=True)
class _Batch:
    num_sequences: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * (self.prompt_tokens + self.output_tokens)


_BATCH, _TINY_BATCH = _Batch(16, 512, 64), _Batch(4, 32, 8)
_PROMPTS_AT_ONCE = 4
_ROUNDS = 2
"""Of which the better counts: the first one chooses kernels."""


def run(setting: Setting, report: Report) -> None:
    what = "output tokens, transformers and GPU-only"
    reason = absent.lacking("transformers") or ("" if setting.on_cuda else absent.lacking(*absent.EXTENSION_MODULES))
    if reason:
        report.not_run(what, reason)
        return
    batch = _TINY_BATCH if setting.tiny else _BATCH
    cases = [case_of(name, setting) for name in ("8b", "7b")]
    reasons = [does_not_fit(case, setting, 2 * batch.num_tokens) for case in cases]
    if all(reasons):
        report.not_run(what, reasons[-1])
        return
    case = cases[reasons.index("")]
    theirs_s = _transformers_s(case.spec, setting, batch)
    gc.collect()
    if setting.on_cuda:
        torch.cuda.empty_cache()
    ours_s, how = _executor_s(case.spec, setting, batch)
    tokens = batch.num_sequences * batch.output_tokens
    ours, theirs = tokens / ours_s, tokens / theirs_s
    detail = (
        f"{ours:.0f} and {theirs:.0f} output tokens/s, {case.model}, {batch.num_sequences} x {batch.prompt_tokens} "
    )
    detail += f"in, {batch.output_tokens} out; {how}"
    report.figure(what, detail, ours / theirs, "executor / transformers", ours_per_s=ours, theirs_per_s=theirs)


def _prompts(spec: ModelSpec, batch: _Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(spec.vocab_size, (batch.num_sequences, batch.prompt_tokens), generator=generator)


def _transformers_s(spec: ModelSpec, setting: Setting, batch: _Batch) -> float:
    """With its own initial weights: no number of them changes the time."""
    import transformers

    dtype = sixteen_bits(setting.device) if setting.on_cuda else torch.float32
    config = transformers.LlamaConfig(**hf_config(spec) | {"pad_token_id": 0})
    with torch.device(setting.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    ids = _prompts(spec, batch).to(setting.device)
    seconds = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=batch.output_tokens,
                max_new_tokens=batch.output_tokens,
            )
        assert out.shape == (batch.num_sequences, batch.prompt_tokens + batch.output_tokens)
        out.cpu()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def _executor_s(spec: ModelSpec, setting: Setting, batch: _Batch) -> tuple[float, str]:
    """And what of it was captured."""
    decoder = dummy_decoder(spec, setting)
    longest, num = batch.prompt_tokens + batch.output_tokens, batch.num_sequences
    executor = make_executor(decoder, BLOCK_TOKENS, num * -(-longest // BLOCK_TOKENS))
    limits = Limits(num, _PROMPTS_AT_ONCE * batch.prompt_tokens, longest)
    prompts = _prompts(spec, batch).tolist()
    seconds = []
    for epoch in range(1, _ROUNDS + 1):
        driver = Driver(executor, limits, epoch=epoch)
        start_s = time.perf_counter()
        for first in range(0, num, _PROMPTS_AT_ONCE):
            ids = range(first, min(first + _PROMPTS_AT_ONCE, num))
            new = tuple(driver.new_sequence(i, prompts[i], Tier.GPU, batch.output_tokens) for i in ids)
            chunks = tuple(PrefillChunk(i, 0, batch.prompt_tokens) for i in ids)
            driver.run(SubBatch(prefills=chunks), mode=Mode.GPU_ONLY, new_sequences=new)
        for _ in range(batch.output_tokens - 1):
            driver.run(SubBatch(gpu_decodes=tuple(range(num))), mode=Mode.GPU_ONLY)
        seconds.append(time.perf_counter() - start_s)
        assert all(len(tokens) == batch.output_tokens for tokens in driver.tokens.values())
    how = captured_text(executor)
    executor.close()
    return min(seconds), how
