"""A model's shape from config.json and from GGUF metadata, and refusals that name what is not supported."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from svc_common.model.read_spec import read_spec
from svc_common.model.rope_scaling import llama3_divisors
from svc_common.model.spec import ExpertsSpec, ModelSpec, RopeSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 12,
    "query_pre_attn_scalar": 100,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 512,
}
OPT: dict[str, Any] = {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "activation_function": "relu"}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
WriteConfig = Callable[..., ModelFiles]


@pytest.fixture
def write(tmp_path: Path) -> WriteConfig:
    def write_config(**changes: Any) -> ModelFiles:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        return ModelFiles("tiny", tmp_path)

    return write_config


def test_llama(write: WriteConfig) -> None:
    assert read_spec(write()) == ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=160,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=1000,
        context_tokens=2048,
        norm_eps=1e-5,
        rope=RopeSpec(10_000.0, 8),
        tie_embeddings=False,
        eos_token_ids=(2,),
        checkpoint_dtype="bf16",
    )


def test_ends_of_the_generation_config_count_too(write: WriteConfig, tmp_path: Path) -> None:
    files = write()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2, 7]}')
    assert read_spec(files).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_in_either_form(key: str, write: WriteConfig) -> None:
    values = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    files = (
        write(rope_theta=5e5, rope_scaling=values)
        if key == "rope_scaling"
        else write(rope_parameters=values | {"rope_theta": 5e5})
    )
    expected = RopeSpec(5e5, 8, "llama3", 32.0, 1.0, 4.0, original_context_tokens=8192)
    assert read_spec(files).rope == expected


def test_yarn_rope(write: WriteConfig) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = read_spec(write(rope_scaling=scaling)).rope
    assert (rope.scaling, rope.factor, rope.original_context_tokens) == ("yarn", 4.0, 512)
    assert rope.attention_factor == pytest.approx(1.1386294)
    given = read_spec(write(rope_scaling=scaling | {"attention_factor": 1.25})).rope
    assert given.attention_factor == 1.25


def test_biases_norms_and_windows_by_architecture(write: WriteConfig) -> None:
    qwen2 = read_spec(write(architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, False, None)
    qwen3 = read_spec(write(architectures=["Qwen3ForCausalLM"], head_dim=32))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    mistral = read_spec(write(architectures=["MistralForCausalLM"], sliding_window=4096))
    assert mistral.sliding_window == 4096
    llama = read_spec(write(attention_bias=True, mlp_bias=True, sliding_window=64))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.sliding_window) == (True, True, True, None)


def test_windows_in_some_layers(write: WriteConfig) -> None:
    options = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4}
    spec = read_spec(write(architectures=["Qwen2ForCausalLM"], max_window_layers=3, **options))
    assert [layer.sliding_window for layer in spec.layers] == [0, 0, 0, 8]
    listed = ["sliding_attention", "full_attention"] * 2
    spec = read_spec(write(architectures=["Qwen3ForCausalLM"], layer_types=listed, **options))
    assert [layer.sliding_window for layer in spec.layers] == [8, 0, 8, 0]


def test_gemma3(write: WriteConfig) -> None:
    """As its first release wrote it: by the family's rule, every sixth layer sees all tokens."""
    spec = read_spec(write(**GEMMA3))
    assert [layer.sliding_window for layer in spec.layers] == [512] * 5 + [0] + [512] * 5 + [0]
    assert {layer.rope for layer in spec.layers if layer.sliding_window} == {RopeSpec(1e4, 16)}
    assert {layer.rope for layer in spec.layers if not layer.sliding_window} == {spec.rope}
    assert spec.rope == RopeSpec(1e6, 16, "linear", 8.0, original_context_tokens=2048)
    assert (spec.softmax_scale, spec.embedding_scale, spec.logit_softcap) == (0.1, 8.0, 0.0)
    assert (spec.qk_norm, spec.post_norms, spec.tie_embeddings, spec.activation) == (
        True,
        True,
        True,
        "gelu_tanh_gated",
    )


def test_gemma2(write: WriteConfig) -> None:
    changes = GEMMA3 | {"architectures": ["Gemma2ForCausalLM"], "rope_scaling": None, "num_hidden_layers": 3}
    spec = read_spec(write(**changes))
    assert [layer.sliding_window for layer in spec.layers] == [512, 0, 512]
    assert (spec.attention_softcap, spec.logit_softcap, spec.qk_norm, spec.local_rope) == (50.0, 30.0, False, None)
    spec = read_spec(write(**changes, attn_logit_softcapping=None, final_logit_softcapping=20.0))
    assert (spec.attention_softcap, spec.logit_softcap) == (0.0, 20.0)


def test_longrope_serves_the_original_context(write: WriteConfig) -> None:
    scaling = {"type": "su", "short_factor": [1, 1.5, 2, 3], "long_factor": [1, 2, 3, 4]}
    changes = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling, "sliding_window": 100}
    spec = read_spec(write(**changes, original_max_position_embeddings=1024))
    assert spec.context_tokens == 1024
    assert spec.rope is not None
    assert spec.rope.divisors == (1.0, 1.5, 2.0, 3.0)
    assert spec.rope.attention_factor == pytest.approx((1 + 1 / 10) ** 0.5)  # sqrt(1 + ln 2 / ln 1024)
    assert spec.sliding_window == 100


def test_opt(write: WriteConfig) -> None:
    spec = read_spec(write(**OPT))
    assert (spec.rope, spec.norm, spec.norm_eps, spec.activation) == (None, "layer", 1e-5, "relu")
    assert (spec.num_kv_heads, spec.learned_positions, spec.tie_embeddings) == (8, 2, True)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)
    layer = 4 * 64 * 64 + 2 * 64 * 96
    assert spec.num_parameters == 2 * layer + 1000 * 64 + (2048 + 2) * 64


def test_experts(write: WriteConfig) -> None:
    mixtral = read_spec(write(**MIXTRAL))
    assert mixtral.experts == ExpertsSpec(8, 2, 160, normalised=True)
    sparse = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
    }
    qwen2 = read_spec(write(architectures=["Qwen2MoeForCausalLM"], **sparse))
    assert qwen2.experts == ExpertsSpec(16, 4, 24, normalised=False, shared_intermediate_size=40)
    assert [layer.experts is not None for layer in qwen2.layers] == [False, True, False, False]
    qwen3 = read_spec(write(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True, **sparse))
    assert qwen3.experts == ExpertsSpec(16, 4, 24, normalised=True)
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)


def test_matrices_of_a_layer_and_their_sizes(write: WriteConfig) -> None:
    llama = read_spec(write())
    shapes = {matrix.name: matrix.shape for matrix in llama.layer_matrices(0)}
    assert shapes == {"qkv": (96, 64), "output": (64, 64), "up": (320, 64), "down": (64, 160)}
    assert llama.layer_parameters(0) == 96 * 64 + 64 * 64 + 3 * 64 * 160
    assert llama.num_parameters == 2 * llama.layer_parameters(0) + 2 * 1000 * 64
    mixtral = read_spec(write(**MIXTRAL))
    parts = {matrix.name: (matrix.part, matrix.num_parameters) for matrix in mixtral.layer_matrices(1)}
    assert parts == {
        "qkv": ("attention", 96 * 64),
        "output": ("attention", 64 * 64),
        "router": ("mlp", 8 * 64),
        "experts.up": ("experts", 8 * 320 * 64),
        "experts.down": ("experts", 8 * 160 * 64),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "architecture mamba is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by gptq are not supported"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope scaling ntk is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "lacks short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor has 1 numbers, 4 are"),
        ({"rope_parameters": {"full_attention": {}}}, "by kind of layer are not supported in this architecture"),
        ({"num_hidden_layers": 257}, r"config\.json: num_hidden_layers is 257, over 256"),
        (GEMMA3 | {"num_hidden_layers": 10**30}, "num_hidden_layers is 1000000000000000000000000000000, over 256"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, over 2147483647"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, is True"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number above 0, is 'x'"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number above 0, is nan"),
        (GEMMA3 | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a number above 0, is -1"),
        (GEMMA3 | {"attn_logit_softcapping": math.inf}, "attn_logit_softcapping must be a number above 0, is inf"),
        ({"rope_theta": -10000.0}, r"rotary embedding of base -10000\.0 and factor 1\.0: not above 0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "bidirectional attention is not supported"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "activation gelu is not supported"),
        (OPT | {"do_layer_norm_before": False}, "OPT with do_layer_norm_before = False is not supported"),
        (OPT | {"word_embed_proj_dim": 32}, "OPT with word_embed_proj_dim = 32 is not supported"),
        (OPT | {"activation_function": "gelu"}, "activation gelu is not supported"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "9 experts per token of 8"),
        ({"torch_dtype": "float8_e4m3fn"}, "weights of type float8_e4m3fn are not supported"),
        ({"num_key_value_heads": 3}, "8 query heads are no multiple of 3 KV heads"),
        ({"head_dim": 512}, "head dimension 512 is over 256"),
        ({"head_dim": -8}, "head_dim must be a whole number of at least 1, is -8"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a whole number of at least 1, is -2"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be a whole number"),
        ({"architectures": "BloomForCausalLM"}, "architecture BloomForCausalLM is not supported"),
        ({"hidden_size": None}, r"config\.json: hidden_size must be a whole number of at least 1, is None"),
        ({"hidden_size": "many"}, "hidden_size must be a whole number of at least 1, is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, is 0"),
        ({"num_attention_heads": -4}, "num_attention_heads must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"eos_token_id": [2, "end"]}, "eos_token_id must be a token id or a list of them, holds 'end'"),
        ({"rope_parameters": [1]}, r"config\.json holds a value that cannot be used"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, r"config\.json holds a value that cannot be used"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"config\.json lacks factor"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, write: WriteConfig) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(write(**changes))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json cannot be read"):
        read_spec(ModelFiles("none", tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match=r"config\.json lacks num_attention_heads"):
        read_spec(ModelFiles("none", tmp_path))
    (tmp_path / "bad.gguf").write_bytes(b"not GGUF at all, but long enough to be looked at")
    with pytest.raises(UnsupportedModelError, match=r"bad\.gguf cannot be read as GGUF"):
        read_spec(ModelFiles("bad", tmp_path, tmp_path / "bad.gguf"))


# --- GGUF


def write_gguf(path: Path, arch: str, tensors: dict[str, np.ndarray], **metadata: int | float | str) -> ModelFiles:
    """A file with metadata and those tensors only."""
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, int | float | str] = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 500_000.0,
    }
    for key, value in (values | metadata).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_eos_token_id(7)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path.stem, path.parent, path)


TENSORS = {
    "token_embd.weight": np.zeros((300, 32), np.float16),
    "blk.0.attn_q.weight": np.zeros((32, 32), np.float16),
}


def test_gguf_qwen2(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32), "output.weight": np.zeros((300, 32), np.float16)}
    spec = read_spec(write_gguf(tmp_path / "q.gguf", "qwen2", TENSORS | extra))
    assert spec == ModelSpec(
        architecture="qwen2",
        num_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=300,
        context_tokens=512,
        norm_eps=pytest.approx(1e-6),  # type: ignore[arg-type]
        rope=RopeSpec(500_000.0, 8),
        tie_embeddings=False,
        eos_token_ids=(7,),
        checkpoint_dtype="fp16",
        qkv_bias=True,
    )


def test_gguf_features_show_in_tensors_and_keys(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}
    options: dict[str, Any] = {"attention.key_length": 16, "attention.sliding_window": 96}
    spec = read_spec(write_gguf(tmp_path / "q.gguf", "qwen3", TENSORS | extra, **options))
    assert (spec.head_dim, spec.qk_norm, spec.sliding_window, spec.tie_embeddings) == (16, True, 96, True)


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    rope = read_spec(write_gguf(tmp_path / "y.gguf", "llama", TENSORS, **options)).rope
    assert (rope.scaling, rope.factor, rope.original_context_tokens) == ("yarn", 4.0, 128)
    with pytest.raises(UnsupportedModelError, match="rope scaling longrope"):
        read_spec(write_gguf(tmp_path / "l.gguf", "llama", TENSORS, **{"rope.scaling.type": "longrope"}))


def test_gguf_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rope = RopeSpec(500_000.0, 8, "llama3", 32.0, 1.0, 4.0, 8192)
    tensor = llama3_divisors(rope).astype(np.float32)
    assert tensor[0] == 1
    assert tensor[-1] == 32
    spec = read_spec(write_gguf(tmp_path / "a.gguf", "llama", TENSORS | {"rope_freqs.weight": tensor}))
    assert spec.rope == rope
    strange = TENSORS | {"rope_freqs.weight": tensor[::-1].copy()}
    with pytest.raises(UnsupportedModelError, match="follows no known rule"):
        read_spec(write_gguf(tmp_path / "b.gguf", "llama", strange))


def test_gguf_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF architecture gemma is not supported"):
        read_spec(write_gguf(tmp_path / "a.gguf", "gemma", TENSORS))
    with pytest.raises(UnsupportedModelError, match=r"lacks llama\.expert_used_count"):
        read_spec(write_gguf(tmp_path / "b.gguf", "llama", TENSORS, expert_count=8))
    with pytest.raises(UnsupportedModelError, match=r"lacks token_embd.weight"):
        read_spec(write_gguf(tmp_path / "c.gguf", "llama", {}))
    with pytest.raises(UnsupportedModelError, match="0 layers make no model"):
        read_spec(write_gguf(tmp_path / "d.gguf", "llama", TENSORS, block_count=0))
    with pytest.raises(UnsupportedModelError, match=r"e\.gguf holds a value that cannot be used"):
        read_spec(write_gguf(tmp_path / "e.gguf", "llama", TENSORS, **{"attention.head_count": 0}))


def test_a_gguf_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", TENSORS)
    assert whole.gguf is not None
    data = whole.gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in (*range(4, 1024, 4), len(data) // 2, len(data) - 64):
        cut.write_bytes(data[:num_bytes])
        with pytest.raises(UnsupportedModelError, match=r"cut\.gguf cannot be read as GGUF"):
            read_spec(ModelFiles("cut", tmp_path, cut))
