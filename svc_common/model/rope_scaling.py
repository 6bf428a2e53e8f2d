"""Rules by which rotary embeddings are stretched to longer contexts, where a model's files only name them."""

import math

import numpy as np

from svc_common.model.spec import RopeSpec


def llama3_divisors(rope: RopeSpec) -> np.ndarray:
    """[rotary_dim / 2], float64: what each base frequency is divided by. Long waves by `factor`, short ones by 1,
    those between by a blend that is linear in how many wavelengths the original context holds."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    wavelengths = 2 * math.pi * rope.theta**exponents
    waves = rope.original_context_tokens / wavelengths
    blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / rope.factor + blend))


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Factor on cos and sin (YaRN, section 3.4); `weight` is DeepSeek's variant of it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_context_tokens: int) -> float:
    """Factor on cos and sin (LongRoPE, as Phi-3 has it)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context_tokens))
