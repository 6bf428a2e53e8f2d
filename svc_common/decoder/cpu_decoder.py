"""A decoder's linear part on the CPU: one native call on each side of attention, over weights packed in memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from svc_common.cpu_kernels import DecoderLinear, ThreadPool, WeightPart, weight_memory
from svc_common.decoder.decoder import AllResident, Workspace, cap_logits_
from svc_common.decoder.dtypes import dtype_name
from svc_common.decoder.packing import Bytes, declare_layers, pack_layer, pack_vocabulary
from svc_common.decoder.rope import Rotaries
from svc_common.decoder.threads import cpu_threads
from svc_common.decoder.weights import LayerWeights, NormWeights
from svc_common.model.spec import ModelSpec


class CpuDecoder(AllResident):
    """A `Decoder`. Activations are fp32 whatever the weights' type: processors add up in fp32 anyway.

    A new one has no weights. Each layer, and the vocabulary, is bound to memory that holds it packed: the process's
    own, or a layer file that several processes have mapped. What is bound to nothing cannot be computed.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        spec: ModelSpec,
        weight_dtype: torch.dtype,
        instruction_set: str = "auto",
        threads: ThreadPool | None = None,
    ) -> None:
        """It computes on `threads`, or on this process's own.

        `instruction_set` forces one of runnable_linear_instruction_sets().
        """
        self.spec = spec
        self.weight_dtype = weight_dtype
        self._rotaries = Rotaries(spec, self.device)
        self._positions: Tensor | None = None
        self._logits = torch.empty((0, spec.vocab_size))  # grows to the largest batch seen
        self._native = DecoderLinear(
            hidden_size=spec.hidden_size,
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim if spec.rope else 0,
            norm_eps=spec.norm_eps,
            activation=spec.activation,
            dtype=dtype_name(weight_dtype),
            threads=threads or cpu_threads(),
            instruction_set=instruction_set,
        )
        declare_layers(self._native, spec)
        self.layer_bytes = tuple(map(self._native.layer_bytes, range(spec.num_layers)))
        """Of each layer, packed."""
        self.vocabulary_bytes = self._native.vocabulary_bytes
        """Of embedding, head and final norm, packed."""
        self.panel_columns = self._native.panel_columns
        self.packing = f"panels of {self.panel_columns}"
        """What packed memory looks like beside its type: processors that say the same can share it."""
        # What the native code computes with lives as long as it may.
        self._layers: list[Bytes | None] = [None] * spec.num_layers
        self._vocabulary: Bytes | None = None

    @classmethod
    def packed(
        cls,
        spec: ModelSpec,
        weight_dtype: torch.dtype,
        embedding: Tensor,
        layers: Iterable[LayerWeights],
        final_norm: NormWeights,
        head: Tensor | None,
        positions: Tensor | None = None,
        instruction_set: str = "auto",
    ) -> "CpuDecoder":
        """Copies the weights, all fp32, into memory of its own, layer by layer; see DecoderWeights for shapes.

        `head` is None where it is the embedding.
        """
        decoder = cls(spec, weight_dtype, instruction_set)
        decoder.take_vocabulary(embedding, head, final_norm, positions)
        for index, layer in enumerate(layers):
            decoder.take_layer(index, layer)
        return decoder

    def take_vocabulary(
        self, embedding: Tensor, head: Tensor | None, final_norm: NormWeights, positions: Tensor | None
    ) -> None:
        """Packs a copy into memory of its own, and computes with it; arguments as of `packed`."""
        memory = weight_memory(self.vocabulary_bytes)
        self.pack_vocabulary(embedding, head, final_norm, memory)
        self.bind_vocabulary(memory, positions)

    def take_layer(self, index: int, layer: LayerWeights) -> None:
        """The same for a layer."""
        memory = weight_memory(self.layer_bytes[index])
        self.pack_layer(index, layer, memory)
        self.bind_layer(index, memory)

    def pack_layer(self, index: int, layer: LayerWeights, memory: Bytes) -> None:
        """`layer` in fp32, into zeroed memory of `layer_bytes[index]`. Binds nothing."""
        pack_layer(self._native, index, layer, memory)

    def pack_vocabulary(self, embedding: Tensor, head: Tensor | None, final_norm: NormWeights, memory: Bytes) -> None:
        """All in fp32, into zeroed memory of `vocabulary_bytes`. Binds nothing."""
        pack_vocabulary(self._native, embedding, head, final_norm, memory)

    def bind_layer(self, index: int, memory: Bytes | None) -> None:
        """Computes the layer with what was packed into `memory`; None: gives up what it was bound to."""
        self._native.bind_layer(index, memory)
        self._layers[index] = memory

    def bind_vocabulary(self, memory: Bytes, positions: Tensor | None = None) -> None:
        """The same for embedding, head and final norm. `positions`: see DecoderWeights."""
        self._native.bind_vocabulary(memory)
        self._vocabulary, self._positions = memory, positions

    def layer_parts(self, index: int) -> list[WeightPart]:
        """Where everything lies in a packed layer."""
        return self._native.layer_parts(index)

    def is_bound(self, index: int) -> bool:
        return self._layers[index] is not None

    @property
    def native(self) -> DecoderLinear:
        """What computes, for native code that takes a batch through layers by itself."""
        return self._native

    @property
    def weight_bytes(self) -> int:
        """Of all that it is bound to."""
        layers = sum(num for num, memory in zip(self.layer_bytes, self._layers, strict=True) if memory is not None)
        positions = 0 if self._positions is None else self._positions.nbytes
        return layers + positions + (0 if self._vocabulary is None else self.vocabulary_bytes)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = torch.empty((len(token_ids), self.spec.hidden_size))
        assert token_ids.dtype == torch.int64
        assert token_ids.is_contiguous()
        self._native.embed(token_ids.data_ptr(), len(token_ids), hidden.data_ptr())
        if self.spec.embedding_scale != 1.0:
            hidden.mul_(self.spec.embedding_scale)
        if self._positions is not None and self.spec.learned_positions is not None:
            hidden.add_(self._positions[positions + self.spec.learned_positions])
        return hidden

    def workspace(self, positions: Tensor) -> Workspace:
        return Workspace.make(self.spec, len(positions), self._rotaries.rotations(positions, self.dtype), self.dtype)

    def pre_attention(self, layer: int, hidden: Tensor, workspace: Workspace) -> None:
        rotation = workspace.rotations[self._rotaries.of_layer[layer]]
        cos, sin, qkv = rotation.cos_address, rotation.sin_address, workspace.qkv.data_ptr()
        self._native.pre_attention(layer, _address(hidden), cos, sin, hidden.shape[0], qkv)

    def post_attention(self, layer: int, attention: Tensor, hidden: Tensor) -> Tensor:
        self._native.post_attention(layer, _address(attention), hidden.shape[0], _address(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        if num_rows > len(self._logits):
            self._logits = torch.empty((num_rows, self.spec.vocab_size))
        logits = self._logits[:num_rows]
        self._native.logits(_address(hidden), num_rows, _address(logits))
        return cap_logits_(logits, self.spec)


def _address(rows: Tensor) -> int:
    """Of dense fp32 rows, which is all that the native code reads."""
    assert rows.dtype == torch.float32
    assert rows.is_contiguous()
    return rows.data_ptr()
