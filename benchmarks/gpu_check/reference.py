"""Whether the device's tokens are those of transformers with the same weights."""

from typing import Any

import torch

from gpu_check import absent
from gpu_check.model import TINY, TinyCheckpoint, gpu_decoder, hf_config
from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_check.tokens import NUM_TOKENS, PROMPTS, compare, gpu_only_tokens

_WHAT = "tokens, GPU-only, against transformers"


def run(setting: Setting, report: Report) -> None:
    if reason := absent.lacking("transformers"):
        report.not_run(_WHAT, reason)
        return
    if not setting.on_cuda and (reason := absent.lacking(*absent.EXTENSION_MODULES)):
        report.not_run(_WHAT, f"{reason}: device cpu computes with them")
        return
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except Exception as error:  # Of another torch, or without a package that it needs.
        report.not_run(_WHAT, f"transformers cannot be imported: {error}")
        return
    checkpoint = TinyCheckpoint()
    model: Any = LlamaForCausalLM(LlamaConfig(**hf_config(TINY)))
    for name, tensor in model.state_dict().items():
        checkpoint.fill(name, tensor)
    model.eval()
    expected = {i: _greedy(model, prompt) for i, prompt in PROMPTS.items()}
    decoder = gpu_decoder(TINY, checkpoint, torch.float32, setting.device)
    compare(report, _WHAT, gpu_only_tokens(decoder), expected)


@torch.inference_mode()
def _greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
