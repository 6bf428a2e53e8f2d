"""GGUF files of the tiny checkpoints: names and keys are the gguf package's, values as llama.cpp has them."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from svc_common.model.store import ModelFiles

# By variant: the architecture's name, and what its writer says of it beyond what all say.
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-longrope": gguf.MODEL_ARCH.PHI3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2-moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
}
GGUF_VARIANTS = tuple(_ARCHITECTURES)
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")


def write_gguf(variant: str, files: ModelFiles, config: Any, directory: Path) -> ModelFiles:
    """`files` hold the variant, `config` is its transformers configuration."""
    arch = _ARCHITECTURES[variant]
    path = directory / f"{variant}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_keys(writer, config)
    for name, tensor in _tensors(arch, config, load_file(files.directory / "model.safetensors")).items():
        writer.add_tensor(name, tensor)
    if variant == "phi3-longrope":
        for kind in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(variant, directory, path)


def _add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        value = config.to_dict().get(key)
        if value:
            add(value)


def _tensors(arch: gguf.MODEL_ARCH, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By name in GGUF."""
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    written: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    by_number = sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")])
    for name in by_number:
        tensor = tensors[name]
        if match := _EXPERT.fullmatch(name):
            layer, _, part = match.groups()
            stem = (
                "layers.{}.feed_forward.experts.{}" if part in ("w1", "w2", "w3") else "model.layers.{}.mlp.experts.{}"
            )
            experts.setdefault(stem.format(layer, part), []).append(tensor)
            continue
        if arch in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            tensor = _side_by_side(tensor, config.num_attention_heads)
        if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            tensor = _side_by_side(tensor, config.num_key_value_heads)
        written[_name(names, name)] = tensor
    return written | {_name(names, f"{stem}.weight"): np.stack(stack) for stem, stack in experts.items()}


def _name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotated pairs (i, i + head_dim / 2) as (2i, 2i + 1)."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
