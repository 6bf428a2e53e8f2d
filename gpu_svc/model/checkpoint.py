"""Where weights come from: safetensors or GGUF behind one look-up by Hugging Face's tensor names."""

import json
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from svc_common.model.read_spec import open_gguf, read_spec
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles


class CheckpointError(Exception):
    """The weights cannot be used; the text names the tensor or the file."""


class Checkpoint(Protocol):
    """Tensors by name, read one at a time."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor:
        """A fresh tensor on the CPU, in the file's type or, where it was quantised, fp32."""
        ...


def open_model(files: ModelFiles) -> tuple[ModelSpec, Checkpoint]:
    """A model's shape and its weights. Raises UnsupportedModelError or CheckpointError."""
    if files.gguf is None:
        return read_spec(files), SafetensorsCheckpoint(files.directory)
    reader = open_gguf(files.gguf)
    spec = read_spec(files, reader)
    return spec, GgufCheckpoint(reader, spec)


class SafetensorsCheckpoint:
    """One file, or shards that an index names. Files stay mapped; a tensor's pages are read as it is copied."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        paths = (
            sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
            if index.exists()
            else sorted(directory.glob("*.safetensors"))
        )
        if not paths:
            raise CheckpointError(f"{directory} holds no *.safetensors")
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """A GGUF file; tensors are dequantised one at a time."""

    def __init__(self, reader: gguf.GGUFReader, spec: ModelSpec) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._spec = spec

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[_gguf_name(name)]
        try:
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise CheckpointError(f"{name} has type {tensor.tensor_type.name}, which is not supported") from error
        read = torch.from_numpy(values)
        if self._spec.architecture == "llama" and "self_attn.q_proj" in name:
            return _to_half_split(read, self._spec.num_q_heads)
        if self._spec.architecture == "llama" and "self_attn.k_proj" in name:
            return _to_half_split(read, self._spec.num_kv_heads)
        return read


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"
    return f"{_GGUF_NAMES[stem]}.{suffix}"


def _to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF keeps Llama's rotated pairs side by side, (2i, 2i + 1); the decoder wants (i, i + head_dim / 2)."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
