"""Tiny checkpoints of every architecture, and a driver that turns prompts into plans for an executor, for gpu_svc."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_svc.cpu_layers import CpuLayers
from gpu_svc.device_memory import DeviceMemory
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits
from gpu_svc.link import Link
from gpu_svc.placed_decoder import PlacedDecoder
from gpu_svc.torch_layers import TorchLayers
from svc_common.decoder.checkpoint import open_model
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.layer_writer import open_layer_file
from svc_common.decoder.load import Loader, load_weights
from svc_common.decoder.load import load_decoder as load
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.store import ModelFiles
from svc_common.plan import IterationPlan, IterationResult, Mode, NewSequence, PrefillChunk, Sampling, SubBatch, Tier
from svc_common.policy import ExecutionPolicy

CPU = torch.device("cpu")
BLOCK_TOKENS = 4
LIMITS = Limits(max_sequences=16, max_batch_tokens=256, max_sequence_tokens=512)

_COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
GREEDY = Sampling()

_ROPE = {"rope_theta": 10_000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 8}),
    "llama-deep": ("Llama", {"num_hidden_layers": 7, "initializer_range": 0.15}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": _ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "llama-dynamic": ("Llama", {"rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
    "gemma3-linear": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 20}),
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 256,
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [1.0, 3.0, 9.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "opt": ("OPT", {"ffn_dim": 80, "init_std": 0.3}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2-moe-dense": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


def save_checkpoint(variant: str, directory: Path, **save_options: Any) -> ModelFiles:
    """A random-weight model as transformers writes it."""
    import transformers

    family, options = VARIANTS[variant]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**(_COMMON | options))
    torch.manual_seed(len(variant))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # Not the neutral 0 and 1 they start with.
    model.save_pretrained(directory, **save_options)
    return ModelFiles(variant, directory)


def load_decoder(files: ModelFiles, dtype: torch.dtype = torch.float32) -> Decoder:
    """The one that runs on device "cpu"."""
    spec, checkpoint = open_model(files)
    return load(checkpoint, spec, dtype, CPU)


def load_placed(
    files: ModelFiles,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int = 2**40,
    link_bytes_per_s: int = 0,
    torch_layers: bool = False,
) -> PlacedDecoder:
    """The same with its layers in a file in `directory`, all on the device by default; KV takes none of the memory.

    `torch_layers`: as on a GPU, on the CPU.
    """
    spec, checkpoint = open_model(files)
    file = open_layer_file(files, spec, checkpoint, dtype, directory)
    decoder = CpuDecoder(spec, dtype)
    if torch_layers:
        on_device = TorchDecoder(spec, Loader(checkpoint, spec, dtype, CPU).weights(with_layers=False))
        memory = DeviceMemory(memory_bytes, file.layer_bytes, on_device.weight_bytes, 0, num_stagings=1)
        return PlacedDecoder(TorchLayers(on_device, decoder, lambda: file, Link(link_bytes_per_s)), memory)
    decoder.bind_vocabulary(file.vocabulary, file.positions())
    memory = DeviceMemory(memory_bytes, file.layer_bytes, decoder.vocabulary_bytes, 0)
    return PlacedDecoder(CpuLayers(decoder, lambda: file, Link(link_bytes_per_s)), memory)


def load_torch_decoder(files: ModelFiles, dtype: torch.dtype = torch.float32) -> TorchDecoder:
    """The one that runs on a GPU."""
    spec, checkpoint = open_model(files)
    return TorchDecoder(spec, load_weights(checkpoint, spec, dtype, CPU))


@torch.inference_mode()
def dense_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """[n, vocab_size]: the decoder with the plainest attention there is, written out in float64."""
    spec = decoder.spec
    positions = torch.arange(len(tokens))
    hidden, workspace = decoder.embed(torch.tensor(tokens), positions), decoder.workspace(positions)
    distance = positions[:, None] - positions
    for layer in range(spec.num_layers):
        window = spec.layer(layer).sliding_window or len(tokens)
        hidden_keys = (distance < 0) | (distance >= window)
        decoder.pre_attention(layer, hidden, workspace)
        group = spec.num_q_heads // spec.num_kv_heads
        k, v = (part.double().repeat_interleave(group, 1) for part in workspace.kv.unbind(1))
        scores = torch.einsum("qhd,khd->hqk", workspace.q.double(), k) * spec.softmax_scale
        if cap := spec.attention_softcap:
            scores = cap * (scores / cap).tanh()
        weights = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).to(decoder.dtype).contiguous()
        hidden = decoder.post_attention(layer, attended, hidden)
    return decoder.logits(hidden)


@dataclass
class Driver:
    """Plays the planner: keeps blocks per tier, sends plans, collects tokens by sequence."""

    executor: Executor
    host: HostTier | None = None
    limits: Limits = LIMITS
    policy: ExecutionPolicy | None = None
    iteration: int = 0
    epoch: int = 1
    tokens: dict[int, list[int]] = field(default_factory=dict)
    results: list[IterationResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor.open_epoch(self.epoch, self.limits, self.host, self.policy)
        self.free = {Tier.GPU: [list(range(self.executor.num_gpu_blocks(self.policy)))], Tier.HOST: [[]]}
        """By tier and pool."""
        if self.host:
            pools = zip(self.host.first_blocks, self.host.pool_blocks, strict=True)
            self.free[Tier.HOST] = [list(range(first, first + num)) for first, num in pools]

    def blocks(self, tier: Tier, num_tokens: int, pool: int = 0) -> np.ndarray:
        """Blocks for that many tokens, in an order that is not the natural one."""
        num, free = -(-num_tokens // self.executor.kv_shape.block_tokens), self.free[tier][pool]
        return np.array([free.pop(-1 - i % 2 if len(free) > 1 else 0) for i in range(num)], "i4")

    def run(self, *sub_batches: SubBatch, **changes: Any) -> IterationResult:
        """One iteration that must succeed."""
        result = self.try_run(*sub_batches, **changes)
        assert result.error is None, result.error_message
        for sequence_id, token in result.tokens:
            self.tokens.setdefault(sequence_id, []).append(token)
        self.results.append(result)
        return result

    def try_run(self, *sub_batches: SubBatch, **changes: Any) -> IterationResult:
        """`mode` is the plainest that has such work, unless given."""
        self.iteration += 1
        mode = Mode.ASYMMETRIC if any(batch.cpu_decodes for batch in sub_batches) else Mode.GPU_ONLY
        mode = changes.pop("mode", Mode.DECOUPLED if "cohort" in changes else mode)
        plan = IterationPlan(self.epoch, self.iteration, mode, sub_batches=sub_batches, **changes)
        return self.executor.run(plan)

    def prefill(
        self,
        sequence_id: int,
        prompt: list[int],
        tier: Tier = Tier.GPU,
        chunk_tokens: int = 1000,
        sampling: Sampling = GREEDY,
        room_tokens: int = 64,
        pool: int = 0,
    ) -> None:
        """Computes a whole prompt, chunk by chunk; yields its first token."""
        new = NewSequence(
            sequence_id, np.array(prompt, "i4"), tier, self.blocks(tier, len(prompt) + room_tokens, pool), sampling
        )
        for start in range(0, len(prompt), chunk_tokens):
            chunk = PrefillChunk(sequence_id, start, min(chunk_tokens, len(prompt) - start))
            self.run(SubBatch(prefills=(chunk,)), new_sequences=() if start else (new,))
