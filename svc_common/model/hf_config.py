"""Hugging Face's config.json to a ModelSpec: what all families have in common, and what each says in its own way."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from svc_common.model.hf_rope import read_rope, rope_values
from svc_common.model.spec import MAX_LAYERS, ExpertsSpec, ModelSpec, UnsupportedModelError

Config = Mapping[str, Any]
CheckpointDType = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, CheckpointDType] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_GEMMA3_PATTERN = 6  # One layer of so many sees all tokens.
_OPT_FIRST_POSITION = 2
_OPT_NORM_EPS = 1e-5  # torch's own, which the configuration doesn't repeat.
_MAX_COUNT = 2**31 - 1  # Sizes travel, and kernels count, in 32 bits.


def spec_from_hf(directory: Path) -> ModelSpec:
    """Raises UnsupportedModelError, or KeyError for what is missing."""
    config = _read_json(directory / "config.json")
    architectures = config.get("architectures") or [str(config.get("model_type", "none named"))]
    architecture = architectures[0] if isinstance(architectures, list) else str(architectures)
    if architecture not in _FAMILIES:
        raise UnsupportedModelError(f"architecture {architecture} is not supported; supported: {', '.join(_FAMILIES)}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"{architecture}: weights quantised by {method} are not supported; use GGUF")
    values = _common(config) | _FAMILIES[architecture](config)
    if "rope" not in values:
        values["rope"] = read_rope(config, values["head_dim"])
    rope = values["rope"]
    if rope is not None and rope.scaling == "longrope":
        # Beyond the original context all keys would have to be rotated by other angles, those in the cache too.
        values["context_tokens"] = min(values["context_tokens"], rope.original_context_tokens)
    return ModelSpec(
        architecture=architecture,
        eos_token_ids=_eos_token_ids(directory, config),
        checkpoint_dtype=_dtype(config),
        **values,
    )


def _common(config: Config) -> dict[str, Any]:
    """What most families say alike; the others overwrite it."""
    num_q_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    head_dim = _optional_count(config, "head_dim") or hidden_size // num_q_heads
    attention_bias = bool(config.get("attention_bias", False))
    return {
        "num_layers": _count(config, "num_hidden_layers", MAX_LAYERS),
        "hidden_size": hidden_size,
        "intermediate_size": _count(config, "ffn_dim" if "ffn_dim" in config else "intermediate_size"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": _optional_count(config, "num_key_value_heads") or num_q_heads,
        "head_dim": head_dim,
        "vocab_size": _count(config, "vocab_size"),
        "context_tokens": _count(config, "max_position_embeddings"),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _llama(config: Config) -> dict[str, Any]:
    _require_activation(config, "hidden_act", "silu")
    return {}


def _mistral(config: Config) -> dict[str, Any]:
    return _llama(config) | {"sliding_window": _optional_count(config, "sliding_window")}


def _qwen2(config: Config) -> dict[str, Any]:
    if config.get("use_sliding_window", False):
        first_local = int(config.get("max_window_layers", config["num_hidden_layers"]))
        windows = _windows(config, lambda layer: layer >= first_local)
    else:
        windows = {}
    return _llama(config) | {"qkv_bias": True, "output_bias": False} | windows


def _qwen3(config: Config) -> dict[str, Any]:
    biases = {name: bool(config.get("attention_bias", False)) for name in ("qkv_bias", "output_bias")}
    return _qwen2(config) | biases | {"qk_norm": True}


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma(config, lambda layer: layer % 2 == 0) | {
        "attention_softcap": _softcap(config, "attn_logit_softcapping", 50.0),
        "logit_softcap": _softcap(config, "final_logit_softcapping", 30.0),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _GEMMA3_PATTERN)
    ropes = rope_values(config)
    head_dim = _count(config, "head_dim")
    local_theta = float(config.get("rope_local_base_freq") or 10_000.0)
    if "full_attention" in ropes:
        rope = read_rope(config, head_dim, ropes["full_attention"], 1_000_000.0)
        local_rope = read_rope(config, head_dim, ropes["sliding_attention"], local_theta)
    else:
        rope = read_rope(config, head_dim, theta=float(config.get("rope_theta") or 1_000_000.0))
        local_rope = read_rope(config, head_dim, {}, local_theta)
    return _gemma(config, lambda layer: (layer + 1) % pattern != 0) | {
        "rope": rope,
        "local_rope": local_rope,
        "qk_norm": True,
        "attention_softcap": _softcap(config, "attn_logit_softcapping", 0.0),
        "logit_softcap": _softcap(config, "final_logit_softcapping", 0.0),
    }


def _gemma(config: Config, is_local: Callable[[int], bool]) -> dict[str, Any]:
    name = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    _require_activation(config, name, "gelu_pytorch_tanh")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("bidirectional attention is not supported")
    return {
        "activation": "gelu_tanh_gated",
        "post_norms": True,
        "attention_scale": _number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": _count(config, "hidden_size") ** 0.5,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    } | _windows(config, is_local)


def _phi3(config: Config) -> dict[str, Any]:
    return _mistral(config)


def _opt(config: Config) -> dict[str, Any]:
    _require_activation(config, "activation_function", "relu")
    for name, wanted in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("word_embed_proj_dim", config["hidden_size"]),
    ):
        if config.get(name, wanted) != wanted:
            raise UnsupportedModelError(f"OPT with {name} = {config[name]} is not supported")
    biased = bool(config.get("enable_bias", True))
    return {
        "activation": "relu",
        "norm": "layer",
        "num_kv_heads": _count(config, "num_attention_heads"),
        "norm_eps": _OPT_NORM_EPS,
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": biased,
        "rope": None,
        "learned_positions": _OPT_FIRST_POSITION,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    inner = _count(config, "intermediate_size")
    return _mistral(config) | {"experts": _experts(config, inner, normalised=True)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    windows: dict[str, Any] = {}
    if config.get("use_sliding_window", False):
        most = int(config.get("max_window_layers", 28))
        windows = _windows(config, lambda layer: layer % 2 == 0 and layer < most)
    biases = {"qkv_bias": bool(config.get("qkv_bias", True)), "output_bias": False}
    return _llama(config) | biases | windows | _sparse(config, int(config.get("shared_expert_intermediate_size") or 0))


def _qwen3_moe(config: Config) -> dict[str, Any]:
    windows = _windows(config, lambda layer: True) if config.get("use_sliding_window", False) else {}
    return _llama(config) | {"qk_norm": True} | windows | _sparse(config, 0)


def _sparse(config: Config, shared_size: int) -> dict[str, Any]:
    """Experts in every so many layers, but for some."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(_count(config, "num_hidden_layers")) if (layer + 1) % step}
    normalised = bool(config.get("norm_topk_prob", False))
    experts = _experts(config, _count(config, "moe_intermediate_size"), normalised, shared_size)
    return {"experts": experts, "dense_layers": tuple(sorted(dense))}


def _experts(config: Config, inner: int, normalised: bool, shared_size: int = 0) -> ExpertsSpec:
    number = "num_experts" if "num_experts" in config else "num_local_experts"
    return ExpertsSpec(_count(config, number), _count(config, "num_experts_per_tok"), inner, normalised, shared_size)


_FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "OPTForCausalLM": _opt,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def _windows(config: Config, is_local: Callable[[int], bool]) -> dict[str, Any]:
    """The sliding window and the layers without it: as listed or, in older files, by the family's rule."""
    layers = range(_count(config, "num_hidden_layers"))
    kinds = config.get("layer_types")
    local = [kinds[layer] == "sliding_attention" if kinds else is_local(layer) for layer in layers]
    if not any(local):
        return {}
    full = tuple(layer for layer in layers if not local[layer])
    return {"sliding_window": _optional_count(config, "sliding_window"), "full_layers": full}


def _require_activation(config: Config, key: str, wanted: str) -> None:
    if (activation := config.get(key) or wanted) != wanted:
        raise UnsupportedModelError(f"activation {activation} is not supported here, only {wanted} is")


def _count(config: Config, key: str, most: int = _MAX_COUNT) -> int:
    """Raises KeyError where it is absent."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} must be a whole number of at least 1, is {value!r}")
    if value > most:
        raise UnsupportedModelError(f"config.json: {key} is {value}, over {most}")
    return value


def _optional_count(config: Config, key: str) -> int | None:
    return None if config.get(key) is None else _count(config, key)


def _number(config: Config, key: str, default: float) -> float:
    """Above 0; the default where it is absent or null."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"config.json: {key} must be a number above 0, is {value!r}")
    return float(value)


def _softcap(config: Config, key: str, default: float) -> float:
    """0 where it is null: without one; `default` where it is absent."""
    return _number(config, key, default) if config.get(key, default) else 0.0


def _eos_token_ids(directory: Path, config: Config) -> tuple[int, ...]:
    """generation_config.json often knows more ends (such as end of turn) than config.json."""
    generation = directory / "generation_config.json"
    sources = [config, _read_json(generation) if generation.exists() else {}]
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [value for value in found if not isinstance(value, int)]:
        raise UnsupportedModelError(f"eos_token_id must be a token id or a list of them, holds {wrong[0]!r}")
    return tuple(sorted(set(found)))


def _dtype(config: Config) -> CheckpointDType:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"weights of type {name} are not supported")
    return _DTYPES[name]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} holds no JSON object")
    return value
