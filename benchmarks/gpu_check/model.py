"""Models of known shapes with random weights, their decoders on the device and on the CPU, and executors of them."""

import zlib
from typing import Any

import torch
from torch import Tensor

from gpu_check.setting import Setting
from gpu_svc.device_kernels import decoder_ops
from gpu_svc.executor import Executor
from gpu_svc.kv_cache import KvShape
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.load import load_decoder, load_weights
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.model.spec import ModelSpec, RopeSpec

_STD = 0.02
"""As transformers initialises weights."""
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


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Of all tensors of the checkpoint, by their names in it."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    others = {
        "model.embed_tokens": (spec.vocab_size, hidden),
        "model.norm": (hidden,),
        "lm_head": (spec.vocab_size, hidden),
    }
    layers = {
        f"model.layers.{layer}.{name}": shape for layer in range(spec.num_layers) for name, shape in of_layer.items()
    }
    return {f"{name}.weight": shape for name, shape in (others | layers).items()}


class RandomCheckpoint:
    """A `Checkpoint` of no file: the same numbers for the same name each time, made where they are wanted."""

    def __init__(self, spec: ModelSpec, device: torch.device = _CPU, std: float = _STD) -> None:
        self._shapes = shapes(spec)
        self._device = device
        self._std = std

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        # Matrices for a GPU are made in 16 bits: two of the largest must find room there.
        dtype = torch.float32 if len(shape) == 1 or self._device.type == "cpu" else torch.bfloat16
        numbers = torch.empty(shape, dtype=dtype, device=self._device)
        self.fill(name, numbers)
        return numbers

    def fill(self, name: str, target: Tensor) -> None:
        """Writes the tensor into `target`, of its shape and on the checkpoint's device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        assert tuple(target.shape) == self._shapes[name]
        if target.dim() == 1:
            target.uniform_(0.75, 1.25, generator=generator)
        else:
            target.normal_(0.0, self._std, generator=generator)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, as a model of transformers is loaded with."""
        return {name: self.read(name) for name in self._shapes}


def tiny_checkpoint() -> RandomCheckpoint:
    """Weights large enough for logits that differ: a token is no matter of rounding."""
    return RandomCheckpoint(TINY, std=0.25)


def gpu_decoder(
    spec: ModelSpec, checkpoint: RandomCheckpoint, dtype: torch.dtype, device: torch.device
) -> TorchDecoder:
    """The one that a GPU computes with, on whatever device."""
    return TorchDecoder(spec, load_weights(checkpoint, spec, dtype, device), decoder_ops(device))


def cpu_decoder(spec: ModelSpec, checkpoint: RandomCheckpoint) -> Decoder:
    """The one of device "cpu", in fp32."""
    return load_decoder(checkpoint, spec, torch.float32, _CPU)


def dummy_decoder(spec: ModelSpec, setting: Setting) -> Decoder:
    """With numbers that mean nothing, in the type that the device is meant for."""
    checkpoint = RandomCheckpoint(spec, setting.device)
    if setting.on_cuda:
        return gpu_decoder(spec, checkpoint, sixteen_bits(setting.device), setting.device)
    return cpu_decoder(spec, checkpoint)


def sixteen_bits(device: torch.device) -> torch.dtype:
    """bf16, but fp16 on GPUs before Ampere, which have no bf16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def make_executor(decoder: Decoder, block_tokens: int, gpu_blocks: int, host_kv_bytes: int = 0) -> Executor:
    """The only place here that makes one: KV is in the decoder's type."""
    shape = KvShape.of(decoder.spec, block_tokens, decoder.dtype)
    return Executor(decoder, shape, gpu_blocks * shape.block_bytes, host_kv_bytes=host_kv_bytes)
