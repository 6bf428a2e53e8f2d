"""GGUF metadata to a ModelSpec. Much stands in no key: it shows in the tensors, or goes with the family."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from gguf import GGUFReader

from svc_common.model.rope_scaling import llama3_divisors, longrope_attention_factor, yarn_attention_factor
from svc_common.model.spec import ExpertsSpec, ModelSpec, RopeSpec, UnsupportedModelError

CheckpointDType = Literal["fp32", "bf16", "fp16"]
Tensors = Mapping[str, Any]

_DTYPES: dict[str, CheckpointDType] = {"F32": "fp32", "F16": "fp16"}  # All else was quantised from bf16.
_LLAMA3_CONTEXT_TOKENS = 8192
# Gemma's largest models scale scores by their hidden size, which no key says: they are known by their layers.
_GEMMA_LAYERS_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}


class _Metadata:
    """Typed look-ups in a GGUF file's key-value part."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.arch = str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file lacks {key}")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """Of a key that begins with the architecture."""
        return self.get(f"{self.arch}.{key}", default)

    def require_own(self, key: str) -> Any:
        return self.require(f"{self.arch}.{key}")


def spec_from_gguf(reader: GGUFReader) -> ModelSpec:
    """Raises UnsupportedModelError."""
    metadata = _Metadata(reader)
    arch = metadata.arch
    if arch not in _FAMILIES:
        raise UnsupportedModelError(f"GGUF architecture {arch} is not supported; supported: {', '.join(_FAMILIES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    query = next((name for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight") if name in tensors), None)
    if "token_embd.weight" not in tensors or query is None:
        raise UnsupportedModelError("the GGUF file lacks token_embd.weight or blk.0.attn_q.weight")
    return ModelSpec(
        architecture=arch,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_embeddings="output.weight" not in tensors,
        eos_token_ids=_eos_token_ids(metadata),
        checkpoint_dtype=_DTYPES.get(tensors[query].tensor_type.name, "bf16"),
        **(_common(metadata, tensors) | _FAMILIES[arch](metadata, tensors)),
    )


def _common(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    hidden_size = int(metadata.require_own("embedding_length"))
    num_q_heads = int(metadata.require_own("attention.head_count"))
    head_dim = int(metadata.own("attention.key_length", hidden_size // num_q_heads))
    return {
        "num_layers": int(metadata.require_own("block_count")),
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.require_own("feed_forward_length")),
        "num_q_heads": num_q_heads,
        "num_kv_heads": int(metadata.own("attention.head_count_kv", num_q_heads)),
        "head_dim": head_dim,
        "context_tokens": int(metadata.require_own("context_length")),
        "norm_eps": float(metadata.require_own("attention.layer_norm_rms_epsilon")),
        "rope": _rope(metadata, head_dim, tensors),
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "sliding_window": int(metadata.own("attention.sliding_window", 0)) or None,
    }


def _llama(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    """Mixtral is a llama with experts."""
    if not metadata.own("expert_count", 0):
        return {}
    return {"experts": _experts(metadata, int(metadata.require_own("feed_forward_length")), normalised=True)}


def _plain(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    return {}


def _gemma2(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    return _gemma(metadata, lambda layer: layer % 2 == 1) | {
        "attention_softcap": float(metadata.own("attn_logit_softcapping", 50.0)),
        "logit_softcap": float(metadata.own("final_logit_softcapping", 30.0)),
    }


def _gemma3(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    head_dim = int(metadata.require_own("attention.key_length"))
    return _gemma(metadata, lambda layer: layer % 6 == 5) | {
        "local_rope": RopeSpec(float(metadata.own("rope.freq_base_swa", 10_000.0)), head_dim),
        "logit_softcap": float(metadata.own("final_logit_softcapping", 0.0)),
    }


def _gemma(metadata: _Metadata, is_full: Callable[[int], bool]) -> dict[str, Any]:
    num_layers, hidden_size = int(metadata.require_own("block_count")), int(metadata.require_own("embedding_length"))
    scaled_dim = int(metadata.require_own("attention.key_length"))
    if num_layers == _GEMMA_LAYERS_SCALED_BY_HIDDEN_SIZE[metadata.arch]:
        scaled_dim = hidden_size // int(metadata.require_own("attention.head_count"))
    return {
        "activation": "gelu_tanh_gated",
        "post_norms": True,
        "attention_scale": scaled_dim**-0.5,
        "embedding_scale": hidden_size**0.5,
        "full_layers": tuple(filter(is_full, range(num_layers))),
    }


def _phi3(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    """Beyond the original context of longrope all keys would have to be rotated anew, see hf_config."""
    if "rope_factors_short.weight" not in tensors:
        return {}
    head_dim = int(metadata.require_own("embedding_length")) // int(metadata.require_own("attention.head_count"))
    rotary_dim = int(metadata.own("rope.dimension_count", head_dim))
    divisors = np.asarray(tensors["rope_factors_short.weight"].data, np.float32)
    if divisors.shape != (rotary_dim // 2,):
        raise UnsupportedModelError(f"rope_factors_short.weight has shape {divisors.shape}, not {rotary_dim // 2}")
    context_tokens = int(metadata.require_own("context_length"))
    original_tokens = int(metadata.require_own("rope.scaling.original_context_length"))
    factor = context_tokens / original_tokens
    given = metadata.own("rope.scaling.attn_factor")
    rope = RopeSpec(
        theta=float(metadata.own("rope.freq_base", 10_000.0)),
        rotary_dim=rotary_dim,
        scaling="longrope",
        factor=factor,
        original_context_tokens=original_tokens,
        attention_factor=longrope_attention_factor(factor, original_tokens) if given is None else float(given),
        divisors=tuple(map(float, divisors)),
    )
    return {"rope": rope, "context_tokens": min(context_tokens, original_tokens)}


def _qwen2_moe(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    shared_size = int(metadata.own("expert_shared_feed_forward_length", 0))
    inner = int(metadata.require_own("expert_feed_forward_length"))
    return {"experts": _experts(metadata, inner, normalised=False, shared_size=shared_size)}


def _qwen3_moe(metadata: _Metadata, tensors: Tensors) -> dict[str, Any]:
    inner = int(metadata.require_own("expert_feed_forward_length"))
    return {"experts": _experts(metadata, inner, normalised=True)}


def _experts(metadata: _Metadata, inner: int, normalised: bool, shared_size: int = 0) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=int(metadata.require_own("expert_count")),
        experts_per_token=int(metadata.require_own("expert_used_count")),
        intermediate_size=inner,
        normalised=bool(metadata.own("expert_weights_norm", normalised)),
        shared_intermediate_size=shared_size,
    )


_FAMILIES: dict[str, Callable[[_Metadata, Tensors], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen3": _plain,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}


def _eos_token_ids(metadata: _Metadata) -> tuple[int, ...]:
    values = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(sorted({int(value) for value in values if value is not None}))


def _rope(metadata: _Metadata, head_dim: int, tensors: Tensors) -> RopeSpec:
    theta = float(metadata.own("rope.freq_base", 10_000.0))
    rotary_dim = int(metadata.own("rope.dimension_count", head_dim))
    if "rope_freqs.weight" in tensors:
        return _llama3_rope(theta, rotary_dim, np.asarray(tensors["rope_freqs.weight"].data, np.float32))
    kind = str(metadata.own("rope.scaling.type", "none"))
    if kind == "none" or "rope_factors_short.weight" in tensors:
        return RopeSpec(theta, rotary_dim)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind} is not supported in GGUF")
    factor = float(metadata.require_own("rope.scaling.factor"))
    original_tokens = metadata.own("rope.scaling.original_context_length")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling="linear" if kind == "linear" else "yarn",
        factor=factor,
        original_context_tokens=int(original_tokens or metadata.require_own("context_length")),
        attention_factor=yarn_attention_factor(factor) if kind == "yarn" else 1.0,
    )


def _llama3_rope(theta: float, rotary_dim: int, divisors: np.ndarray) -> RopeSpec:
    """GGUF keeps Llama 3's scaling as one divisor per frequency; the rule behind them is recovered and checked."""
    rope = RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling="llama3",
        factor=float(divisors.max()),
        original_context_tokens=_LLAMA3_CONTEXT_TOKENS,
    )
    if divisors.shape != (rotary_dim // 2,) or not np.allclose(llama3_divisors(rope), divisors, rtol=1e-3):
        raise UnsupportedModelError("rope_freqs.weight follows no known rule")
    return rope
