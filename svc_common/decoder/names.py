"""What the parts of a layer are called in a file, by family and format; the only place that knows such names.

A part is one tensor of ours. It may lie in the file as several, whose rows follow one another, as q, k and v do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from svc_common.model.spec import ModelSpec

Stems = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """Stems of tensors; ".weight" or ".bias" follows. `{layer}` and `{expert}` stand for their numbers."""

    embedding: str
    positions: str
    final_norm: str
    head: str
    layer: str
    """What the stems of a layer's parts begin with."""
    parts: Mapping[str, Stems] = field(default_factory=dict)
    """By name of the part, as in `LayerWeights`."""
    norm_offset: float = 0.0
    """Added to the weights of RMSNorms; Gemma's are kept less 1."""


_HF_PARTS: Mapping[str, Stems] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "router": ("mlp.gate",),
    "experts.up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "experts.down": ("mlp.experts.{expert}.down_proj",),
    "shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared.down": ("mlp.shared_expert.down_proj",),
    "shared.gate": ("mlp.shared_expert_gate",),
}
_GEMMA_PARTS: Mapping[str, Stems] = {
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "post_mlp_norm": ("post_feedforward_layernorm",),
}
_PHI3_PARTS: Mapping[str, Stems] = {"qkv": ("self_attn.qkv_proj",), "up": ("mlp.gate_up_proj",)}
_MIXTRAL_PARTS: Mapping[str, Stems] = {
    "router": ("block_sparse_moe.gate",),
    "experts.up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    "experts.down": ("block_sparse_moe.experts.{expert}.w2",),
}
_OPT_PARTS: Mapping[str, Stems] = {
    "attention_norm": ("self_attn_layer_norm",),
    "output": ("self_attn.out_proj",),
    "mlp_norm": ("final_layer_norm",),
    "up": ("fc1",),
    "down": ("fc2",),
}
_GGUF_PARTS: Mapping[str, Stems] = {
    "attention_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "output": ("attn_output",),
    "post_attention_norm": ("post_attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "post_mlp_norm": ("post_ffw_norm",),
    "up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
    "router": ("ffn_gate_inp",),
    "experts.up": ("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
    "experts.down": ("ffn_down_exps.{expert}",),
    "shared.up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared.down": ("ffn_down_shexp",),
    "shared.gate": ("ffn_gate_inp_shexp",),
}
_GGUF_PHI3_PARTS: Mapping[str, Stems] = {"qkv": ("attn_qkv",), "up": ("ffn_up",)}


def _hf(parts: Mapping[str, Stems], norm_offset: float = 0.0) -> Names:
    return Names(
        embedding="model.embed_tokens",
        positions="",
        final_norm="model.norm",
        head="lm_head",
        layer="model.layers.{layer}.",
        parts={**_HF_PARTS, **parts},
        norm_offset=norm_offset,
    )


_OPT = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    layer="model.decoder.layers.{layer}.",
    parts={**_HF_PARTS, **_OPT_PARTS},
)
_HF_FAMILIES = {
    "Gemma2ForCausalLM": _hf(_GEMMA_PARTS, norm_offset=1.0),
    "Gemma3ForCausalLM": _hf(_GEMMA_PARTS, norm_offset=1.0),
    "Phi3ForCausalLM": _hf(_PHI3_PARTS),
    "MixtralForCausalLM": _hf(_MIXTRAL_PARTS),
    "OPTForCausalLM": _OPT,
}


def names_of(spec: ModelSpec) -> Names:
    """Of the file that `spec` was read from."""
    if spec.architecture.endswith("ForCausalLM"):
        return _HF_FAMILIES.get(spec.architecture, _hf({}))
    parts = _GGUF_PHI3_PARTS if spec.architecture == "phi3" else {}
    return Names(
        embedding="token_embd",
        positions="",
        final_norm="output_norm",
        head="output",
        layer="blk.{layer}.",
        parts={**_GGUF_PARTS, **parts},
    )
