"""Models of known shapes with random weights, their decoders on the device and on the CPU, and executors of them."""

from typing import Any

import torch
from torch import Tensor

from gpu_check.setting import Setting
from gpu_svc.device_kernels import decoder_ops
from gpu_svc.executor import Executor
from gpu_svc.graph_options import GraphOptions, graph_bytes, graph_options
from gpu_svc.kv_cache import KvShape
from svc_common.decoder.checkpoint import Checkpoint
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.dummy import DummyCheckpoint
from svc_common.decoder.load import load_decoder, load_weights
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.spec import ModelSpec, RopeSpec

BESIDE_BYTES = 10**9
"""On a GPU: activations, and what torch keeps of what it freed."""
_CPU = torch.device("cpu")


def llama(
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    theta: float = 1e4,
    context_tokens: int = 4096,
) -> ModelSpec:
    """A Llama without an end token, in fp32 where not said otherwise."""
    head_dim = hidden_size // num_q_heads
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        norm_eps=1e-5,
        rope=RopeSpec(theta, head_dim),
        tie_embeddings=False,
        eos_token_ids=(),
        checkpoint_dtype="fp32",
    )


TINY = llama(4, 64, 96, 4, 2, 257)
LLAMA_3_1_8B = llama(32, 4096, 14336, 32, 8, 128256, theta=5e5, context_tokens=8192)
LLAMA_2_7B = llama(32, 4096, 11008, 32, 32, 32000)


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of the shape, as transformers' LlamaConfig takes it too."""
    assert spec.rope is not None
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_q_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


class TinyCheckpoint(DummyCheckpoint):
    """Of TINY: matrices half as large again, so that logits differ by more than rounding, and norms of many numbers, so
    that none can be left out.
    """

    def __init__(self) -> None:
        super().__init__(TINY)

    def fill(self, name: str, target: Tensor) -> None:
        super().fill(name, target)
        if target.ndim == 1:
            target.add_(torch.linspace(-0.25, 0.25, len(target)).to(target))
        else:
            target.mul_(1.5)


def gpu_decoder(spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TorchDecoder:
    """The one that a GPU computes with, on whatever device."""
    return TorchDecoder(spec, load_weights(checkpoint, spec, dtype, device), decoder_ops(device))


def cpu_decoder(spec: ModelSpec, checkpoint: Checkpoint) -> Decoder:
    """The one of device "cpu", in fp32."""
    return load_decoder(checkpoint, spec, torch.float32, _CPU)


def dummy_decoder(spec: ModelSpec, setting: Setting) -> Decoder:
    """With numbers that mean nothing, in the type that the device is meant for."""
    checkpoint = DummyCheckpoint(spec)
    if setting.on_cuda:
        return gpu_decoder(spec, checkpoint, sixteen_bits(setting.device), setting.device)
    return cpu_decoder(spec, checkpoint)


def sixteen_bits(device: torch.device) -> torch.dtype:
    """bf16, but fp16 on GPUs before Ampere, which have no bf16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def make_executor(
    decoder: Decoder, block_tokens: int, gpu_blocks: int, host_kv_bytes: int = 0, graphs: bool = True
) -> Executor:
    """The only place here that makes one: KV is in the decoder's type, graphs are as in the service."""
    shape = KvShape.of(decoder.spec, block_tokens, decoder.dtype)
    gpu_kv_bytes = gpu_blocks * shape.block_bytes
    options = _graph_options(decoder.device, gpu_kv_bytes) if graphs else None
    return Executor(decoder, shape, gpu_kv_bytes, host_kv_bytes=host_kv_bytes, graphs=options)


def _graph_options(device: torch.device, gpu_kv_bytes: int) -> GraphOptions | None:
    """None where the device has no graphs, or no room for any beside KV."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    room_bytes = free_bytes - gpu_kv_bytes - BESIDE_BYTES
    return graph_options(max(0, min(graph_bytes(None, device, total_bytes), room_bytes)), device)
