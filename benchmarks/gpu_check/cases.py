"""The papers' machines as loads: a model's shape, as much KV as the GPU there had room for, and lengths of requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_check.model import BESIDE_BYTES, LLAMA_2_7B, LLAMA_3_1_8B, TINY, dummy_decoder, make_executor, sixteen_bits
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from gpu_svc.limits import Limits
from svc_common.model.spec import ModelSpec

BLOCK_TOKENS = 16
MODE_NAMES = {
    "auto": "the scheduler's choice",
    "gpu_only": "GPU-only",
    "asymmetric": "asymmetric",
    "same_layer": "same-layer overlap",
    "decoupled": "decoupled cohort",
}
"""For people."""


@dataclass(frozen=True)
class Case:
    """NEO's testbeds (MLSys 2025): KV that was left beside the weights, synthetic lengths of its figures 9 and 10."""

    model: str
    """Its shape's, as people know it."""
    spec: ModelSpec
    gpu_blocks: int
    prompt_tokens: int
    output_tokens: int
    limits: Limits

    @property
    def gpu_tokens(self) -> int:
        return self.gpu_blocks * BLOCK_TOKENS

    @property
    def mean_context_tokens(self) -> int:
        """Halfway through the answer."""
        return self.prompt_tokens + self.output_tokens // 2


_CASES = {
    # An A10G's, a T4's; as many sequences as both tiers have KV for, and some more: each size takes time to capture.
    "8b": Case("Llama-3.1-8B", LLAMA_3_1_8B, 1650, 1000, 100, Limits(128, 2048, 2048)),
    "7b": Case("Llama-2-7B", LLAMA_2_7B, 54, 500, 100, Limits(64, 2048, 2048)),
}
_TINY_LIMITS = Limits(max_sequences=12, max_batch_tokens=48, max_sequence_tokens=96)
_TINY_CASES = {
    "8b": Case("a tiny Llama", TINY, 20, 40, 10, _TINY_LIMITS),
    "7b": Case("a tiny Llama", TINY, 5, 40, 10, _TINY_LIMITS),
}


def case_of(name: str, setting: Setting) -> Case:
    return (_TINY_CASES if setting.tiny else _CASES)[name]


@contextmanager
def dummy_executor(case: Case, setting: Setting, report: Report, host_kv_bytes: int) -> Iterator[Executor | None]:
    """With random weights and the case's KV; None, which a row tells, where the device is too small."""
    if reason := does_not_fit(case, setting):
        report.not_run("all", f"{case.model} {reason}")
        yield None
        return
    decoder = dummy_decoder(case.spec, setting)
    executor = make_executor(decoder, BLOCK_TOKENS, case.gpu_blocks, host_kv_bytes)
    try:
        yield executor
    finally:
        executor.close()


def does_not_fit(case: Case, setting: Setting, kv_tokens: int = 0) -> str:
    """Why the device can't hold weights and KV, or nothing. `kv_tokens`: in place of the case's."""
    if not setting.on_cuda:
        return ""
    free, total = torch.cuda.mem_get_info(setting.device)
    dtype = sixteen_bits(setting.device)
    kv_bytes = (kv_tokens or case.gpu_tokens) * case.spec.kv_bytes_per_token(dtype.itemsize)
    needed = case.spec.weight_bytes(dtype.itemsize) + kv_bytes + BESIDE_BYTES
    if needed <= free:
        return ""
    return f"takes {needed / 1e9:.1f} GB, of {total / 1e9:.1f} GB on the device {free / 1e9:.1f} are free"
