"""Where weights come from: safetensors or GGUF behind one look-up by the file's own tensor names."""

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from svc_common.decoder.dummy import DummyCheckpoint
from svc_common.model.read_spec import open_gguf, read_spec
from svc_common.model.spec import ModelSpec
from svc_common.model.store import ModelFiles

_EXPERT = re.compile(r"(.*_exps)\.(\d+)\.weight")


class CheckpointError(Exception):
    """The weights cannot be used; the text names the tensor or the file."""


class Checkpoint(Protocol):
    """Tensors by name, one at a time."""

    def __contains__(self, name: str) -> bool: ...

    def fill(self, name: str, target: Tensor) -> None:
        """Writes a tensor into `target`, dense, of whatever type and device. Raises CheckpointError where the tensor
        has another shape.
        """
        ...


class FileCheckpoint(ABC):
    """Tensors that a file holds."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A fresh tensor on the CPU, in the file's type or, where it was quantised, fp32."""

    def fill(self, name: str, target: Tensor) -> None:
        tensor = self.read(name)
        if tensor.shape != target.shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the model wants {list(target.shape)}")
        target.copy_(tensor)


def open_model(files: ModelFiles) -> tuple[ModelSpec, Checkpoint]:
    """A model's shape and its weights. Raises UnsupportedModelError or CheckpointError."""
    if files.is_dummy:
        spec = read_spec(files)
        return spec, DummyCheckpoint(spec)
    if files.gguf is None:
        return read_spec(files), SafetensorsCheckpoint(files.directory)
    reader = open_gguf(files.gguf)
    spec = read_spec(files, reader)
    return spec, GgufCheckpoint(reader, spec)


class SafetensorsCheckpoint(FileCheckpoint):
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


class GgufCheckpoint(FileCheckpoint):
    """A GGUF file; tensors are dequantised one at a time.

    The experts of a layer are one tensor there; each of them has a name here, "blk.0.ffn_up_exps.7.weight".
    """

    def __init__(self, reader: gguf.GGUFReader, spec: ModelSpec) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._spec = spec

    def __contains__(self, name: str) -> bool:
        return _stack_of(name)[0] in self._tensors

    def read(self, name: str) -> Tensor:
        stack, expert = _stack_of(name)
        tensor = self._tensors[stack]
        if expert is not None and not (tensor.data.ndim == 3 and expert < len(tensor.data)):
            raise CheckpointError(f"{stack} holds no expert {expert}")
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = np.array(gguf.quants.dequantize(data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise CheckpointError(f"{name} has type {tensor.tensor_type.name}, which is not supported") from error
        read = torch.from_numpy(values)
        if self._spec.architecture == "llama" and "attn_q." in name:
            return _to_half_split(read, self._spec.num_q_heads)
        if self._spec.architecture == "llama" and "attn_k." in name:
            return _to_half_split(read, self._spec.num_kv_heads)
        if "ffn_gate_inp_shexp" in name:
            return read.view(1, -1)
        return read


def _stack_of(name: str) -> tuple[str, int | None]:
    """The tensor of the file, and which expert of it."""
    if match := _EXPERT.fullmatch(name):
        return f"{match[1]}.weight", int(match[2])
    return name, None


def _to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF keeps Llama's rotated pairs side by side, (2i, 2i + 1); the decoder wants (i, i + head_dim / 2)."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
