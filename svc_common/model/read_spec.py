"""Reads a model's shape from its files, before any weight: HF config.json or GGUF metadata to ModelSpec."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from gguf import GGUFReader

from svc_common.model.spec import ModelSpec, RopeSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles

CheckpointDType = Literal["fp32", "bf16", "fp16"]

_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HF_DTYPES: dict[str, CheckpointDType] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_GGUF_DTYPES: dict[str, CheckpointDType] = {"F32": "fp32", "F16": "fp16"}  # All else was quantised from bf16.
_ROPE_TYPES = ("linear", "llama3", "yarn", "dynamic")
_LLAMA3_CONTEXT_TOKENS = 8192


def read_spec(files: ModelFiles, reader: GGUFReader | None = None) -> ModelSpec:
    """Raises UnsupportedModelError, which names the architecture or the feature that cannot be served.

    `reader`, from `open_gguf`, saves a caller that has one from parsing the file's vocabulary again.
    """
    origin = files.gguf.name if files.gguf is not None else "config.json"
    try:
        if files.gguf is not None:
            return _from_gguf(reader or open_gguf(files.gguf))
        return _from_hf(files.directory)
    except KeyError as error:
        raise UnsupportedModelError(f"{origin} lacks {error.args[0]}") from error
    except (AttributeError, ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{origin} holds a value that cannot be used: {error}") from error


def open_gguf(path: Path) -> GGUFReader:
    """Parses all but the tensors, which takes seconds. Raises UnsupportedModelError."""
    try:
        return GGUFReader(path)
    except Exception as error:  # The reader trusts the file, and may stumble anywhere in a damaged one.
        raise UnsupportedModelError(f"{path.name} cannot be read as GGUF, or was cut short: {error}") from error


# --- Hugging Face


def _from_hf(directory: Path) -> ModelSpec:
    config = _read_json(directory / "config.json")
    architectures = config.get("architectures") or [str(config.get("model_type", "none named"))]
    architecture = architectures[0] if isinstance(architectures, list) else str(architectures)
    if architecture not in _HF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}"
        )
    _refuse_unsupported_hf_features(architecture, config)
    num_q_heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    head_dim = int(config.get("head_dim") or hidden_size // num_q_heads)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    return _checked(
        ModelSpec(
            architecture=architecture,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_q_heads=num_q_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_q_heads),
            head_dim=head_dim,
            vocab_size=_count(config, "vocab_size"),
            context_tokens=_count(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_hf_rope(config, head_dim),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=_hf_eos_token_ids(directory, config),
            checkpoint_dtype=_hf_dtype(config),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_hf_sliding_window(architecture, config),
        )
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    """Raises KeyError where it is absent."""
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} must be a whole number of at least 1, is {value!r}")
    return value


def _refuse_unsupported_hf_features(architecture: str, config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"{architecture}: weights quantised by {method} are not supported; use GGUF")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{architecture}: activation {activation} is not supported")


def _hf_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Older files keep `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`."""
    values: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    fraction = float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * fraction)
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"rope scaling {kind} is not supported")
    factor = float(values["factor"])
    original_tokens = int(
        values.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    if kind == "yarn" and not values.get("truncate", True):
        raise UnsupportedModelError("rope scaling yarn without truncation is not supported")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=cast("Literal['linear', 'llama3', 'yarn', 'dynamic']", kind),
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_context_tokens=original_tokens,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(values, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Factor on cos and sin (YaRN, section 3.4); `mscale` is DeepSeek's variant of it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(float(values["mscale"])) / mscale(float(values["mscale_all_dim"]))
    return mscale(1.0)


def _hf_sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        return int(window)
    if not config.get("use_sliding_window", False):
        return None
    num_layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "full_attention" if layer < int(config.get("max_window_layers", num_layers)) else "sliding_attention"
        for layer in range(num_layers)
    ]
    if all(kind == "full_attention" for kind in kinds):
        return None
    if all(kind == "sliding_attention" for kind in kinds):
        return int(window)
    raise UnsupportedModelError(f"{architecture}: a sliding window in only some of the layers is not supported")


def _hf_eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
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


def _hf_dtype(config: Mapping[str, Any]) -> CheckpointDType:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _HF_DTYPES:
        raise UnsupportedModelError(f"weights of type {name} are not supported")
    return _HF_DTYPES[name]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} holds no JSON object")
    return value


# --- GGUF


class _Metadata:
    """Typed look-ups in a GGUF file's key-value part."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"the GGUF file lacks {key}")
        return value


def _from_gguf(reader: GGUFReader) -> ModelSpec:
    metadata = _Metadata(reader)
    arch = str(metadata.require("general.architecture"))
    if arch not in _GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count", 0):
        raise UnsupportedModelError(f"GGUF architecture {arch} with experts is not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors or "blk.0.attn_q.weight" not in tensors:
        raise UnsupportedModelError("the GGUF file lacks token_embd.weight or blk.0.attn_q.weight")
    hidden_size = int(metadata.require(f"{arch}.embedding_length"))
    num_q_heads = int(metadata.require(f"{arch}.attention.head_count"))
    head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden_size // num_q_heads))
    window = int(metadata.get(f"{arch}.attention.sliding_window", 0))
    return _checked(
        ModelSpec(
            architecture=arch,
            num_layers=int(metadata.require(f"{arch}.block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(metadata.require(f"{arch}.feed_forward_length")),
            num_q_heads=num_q_heads,
            num_kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", num_q_heads)),
            head_dim=head_dim,
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            context_tokens=int(metadata.require(f"{arch}.context_length")),
            rms_norm_eps=float(metadata.require(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope=_gguf_rope(metadata, arch, head_dim, tensors),
            tie_embeddings="output.weight" not in tensors,
            eos_token_ids=_gguf_eos_token_ids(metadata),
            checkpoint_dtype=_GGUF_DTYPES.get(tensors["blk.0.attn_q.weight"].tensor_type.name, "bf16"),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_window=window or None,
        )
    )


def _gguf_eos_token_ids(metadata: _Metadata) -> tuple[int, ...]:
    values = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(sorted({int(value) for value in values if value is not None}))


def _gguf_rope(metadata: _Metadata, arch: str, head_dim: int, tensors: Mapping[str, Any]) -> RopeSpec:
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10_000.0))
    rotary_dim = int(metadata.get(f"{arch}.rope.dimension_count", head_dim))
    if "rope_freqs.weight" in tensors:
        return _llama3_rope(theta, rotary_dim, np.asarray(tensors["rope_freqs.weight"].data, np.float32))
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    if kind == "none":
        return RopeSpec(theta, rotary_dim)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {kind} is not supported in GGUF")
    factor = float(metadata.require(f"{arch}.rope.scaling.factor"))
    original_tokens = metadata.get(f"{arch}.rope.scaling.original_context_length")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling="linear" if kind == "linear" else "yarn",
        factor=factor,
        original_context_tokens=int(original_tokens or metadata.require(f"{arch}.context_length")),
        attention_factor=_yarn_attention_factor({}, factor) if kind == "yarn" else 1.0,
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


def llama3_divisors(rope: RopeSpec) -> np.ndarray:
    """[rotary_dim / 2], float64: what each base frequency is divided by. Long waves by `factor`, short ones by 1,
    those between by a blend that is linear in how many wavelengths the original context holds."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    wavelengths = 2 * math.pi * rope.theta**exponents
    waves = rope.original_context_tokens / wavelengths
    blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / rope.factor + blend))


# --- both


def _checked(spec: ModelSpec) -> ModelSpec:
    """What the decoder and the kernels rely on."""
    counts = {
        "layers": spec.num_layers,
        "query heads": spec.num_q_heads,
        "KV heads": spec.num_kv_heads,
        "elements in a head": spec.head_dim,
        "context tokens": spec.context_tokens,
        "tokens in the sliding window": spec.sliding_window,
    }
    for what, count in counts.items():
        if count is not None and count < 1:
            raise UnsupportedModelError(f"{count} {what} make no model")
    if spec.num_q_heads % spec.num_kv_heads:
        raise UnsupportedModelError(f"{spec.num_q_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
    if spec.head_dim > 256:
        raise UnsupportedModelError(f"head dimension {spec.head_dim} is over 256")
    if spec.rope.rotary_dim % 2 or not 0 < spec.rope.rotary_dim <= spec.head_dim:
        raise UnsupportedModelError(f"rotary dimension {spec.rope.rotary_dim} does not fit heads of {spec.head_dim}")
    return spec
