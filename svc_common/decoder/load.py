"""Makes the decoder of a device from a checkpoint: checks each tensor, casts it, fuses what is read together."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from svc_common.decoder.checkpoint import Checkpoint, CheckpointError
from svc_common.decoder.cpu_decoder import CpuDecoder
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.names import names_of
from svc_common.decoder.torch_decoder import TorchDecoder
from svc_common.decoder.weights import DecoderWeights, ExpertsWeights, LayerWeights, MlpWeights, NormWeights
from svc_common.memory import give_back_freed
from svc_common.model.spec import ExpertsSpec, ModelSpec
from svc_common.progress import Progress

logger = logging.getLogger(__name__)


def load_decoder(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The decoder that `device` computes fastest with, its weights in `dtype`.

    Peak memory is the weights, and beside them one tensor of the file or, on the CPU, one layer in fp32. Raises
    CheckpointError.
    """
    if device.type != "cpu":
        return TorchDecoder(spec, load_weights(checkpoint, spec, dtype, device))
    loader = Loader(checkpoint, spec, torch.float32, device)
    decoder = CpuDecoder(spec, dtype)
    # No name is given to what is read: it goes as soon as it is packed.
    decoder.take_vocabulary(
        loader.embedding(), None if spec.tie_embeddings else loader.head(), loader.final_norm(), loader.positions()
    )
    give_back_freed()  # Of the embedding, which took more than a layer does.
    progress = Progress(logger, "loading layers", spec.num_layers)
    for index in range(spec.num_layers):
        decoder.take_layer(index, loader.layer(index))
        progress.reached(index + 1)
    give_back_freed()
    return decoder


def load_weights(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Peak memory is the weights themselves and one tensor of the file. Raises CheckpointError."""
    return Loader(checkpoint, spec, dtype, device).weights()


class Loader:
    """Parts of a checkpoint, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._names = names_of(spec)
        self._dtype = dtype
        self._device = device

    def weights(self, with_layers: bool = True) -> DecoderWeights:
        """All, or all that is in no layer."""
        embedding = self.embedding()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self.layers()) if with_layers else (),
            final_norm=self.final_norm(),
            head=embedding if self._spec.tie_embeddings else self.head(),
            positions=self.positions(),
        )

    def embedding(self) -> Tensor:
        return self._fused([(f"{self._names.embedding}.weight", (self._spec.vocab_size, self._spec.hidden_size))])

    def head(self) -> Tensor:
        return self._fused([(f"{self._names.head}.weight", (self._spec.vocab_size, self._spec.hidden_size))])

    def positions(self) -> Tensor | None:
        """[learned_positions + context_tokens, hidden_size], where the model has learned positions."""
        spec = self._spec
        if spec.learned_positions is None:
            return None
        rows = spec.learned_positions + spec.context_tokens
        return self._fused([(f"{self._names.positions}.weight", (rows, spec.hidden_size))])

    def final_norm(self) -> NormWeights:
        return self._norm(self._names.final_norm)

    def layers(self) -> Iterator[LayerWeights]:
        progress = Progress(logger, "loading layers", self._spec.num_layers)
        for index in range(self._spec.num_layers):
            yield self.layer(index)
            progress.reached(index + 1)

    def layer(self, index: int) -> LayerWeights:
        return _LayerLoader(self, self._spec, index).load()

    def matrix(
        self,
        layer: int,
        part: str,
        heights: tuple[int, ...],
        width: int,
        expert: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """[sum(heights), width]: one tensor of the file, or one for each of `heights`."""
        stems = self._stems(layer, part, expert)
        shapes = [(height, width) for height in (heights if len(stems) > 1 else (sum(heights),))]
        return self._fused([(f"{stem}.weight", shape) for stem, shape in zip(stems, shapes, strict=True)], dtype)

    def bias(self, layer: int, part: str, heights: tuple[int, ...]) -> Tensor:
        """[sum(heights)]: as many tensors as its matrix has."""
        stems = self._stems(layer, part)
        shapes = [(height,) for height in (heights if len(stems) > 1 else (sum(heights),))]
        return self._fused([(f"{stem}.bias", shape) for stem, shape in zip(stems, shapes, strict=True)])

    def norm(self, layer: int, part: str) -> NormWeights:
        (stem,) = self._stems(layer, part)
        return self._norm(stem)

    def scale(self, layer: int, part: str, size: int) -> Tensor:
        """Weights [size] of an RMSNorm."""
        (stem,) = self._stems(layer, part)
        return self._scale(stem, size)

    def _norm(self, stem: str) -> NormWeights:
        size = self._spec.hidden_size
        bias = self._fused([(f"{stem}.bias", (size,))]) if self._spec.norm == "layer" else None
        return NormWeights(self._scale(stem, size), bias)

    def _scale(self, stem: str, size: int) -> Tensor:
        weight = self._fused([(f"{stem}.weight", (size,))], torch.float32)
        return (weight + self._names.norm_offset).to(self._dtype)

    def _stems(self, layer: int, part: str, expert: int = 0) -> list[str]:
        prefix = self._names.layer.format(layer=layer)
        return [prefix + stem.format(expert=expert) for stem in self._names.parts[part]]

    def _fused(self, parts: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype | None = None) -> Tensor:
        """Named tensors of the given shapes, one above the other, on the device; in the compute type or `dtype`."""
        rows = sum(shape[0] for _, shape in parts)
        target = torch.empty((rows, *parts[0][1][1:]), dtype=dtype or self._dtype, device=self._device)
        start = 0
        for name, shape in parts:
            if name not in self._checkpoint:
                raise CheckpointError(f"the checkpoint lacks {name}")
            self._checkpoint.fill(name, target[start : start + shape[0]])
            start += shape[0]
        return target


class _LayerLoader:
    """One layer, by its spec."""

    def __init__(self, loader: Loader, spec: ModelSpec, layer: int) -> None:
        self._loader = loader
        self._spec = spec
        self._layer = layer

    def load(self) -> LayerWeights:
        spec, loader, layer = self._spec, self._loader, self._layer
        hidden, q_size, kv_size = spec.hidden_size, spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        heights = (q_size, kv_size, kv_size)
        experts = spec.layer(layer).experts
        return LayerWeights(
            attention_norm=loader.norm(layer, "attention_norm"),
            qkv=loader.matrix(layer, "qkv", heights, hidden),
            qkv_bias=loader.bias(layer, "qkv", heights) if spec.qkv_bias else None,
            q_norm=loader.scale(layer, "q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=loader.scale(layer, "k_norm", spec.head_dim) if spec.qk_norm else None,
            output=loader.matrix(layer, "output", (hidden,), q_size),
            output_bias=loader.bias(layer, "output", (hidden,)) if spec.output_bias else None,
            post_attention_norm=loader.scale(layer, "post_attention_norm", hidden) if spec.post_norms else None,
            mlp_norm=loader.norm(layer, "mlp_norm"),
            mlp=self._experts(experts) if experts else self._mlp("", spec.intermediate_size, bias=spec.mlp_bias),
            post_mlp_norm=loader.scale(layer, "post_mlp_norm", hidden) if spec.post_norms else None,
        )

    def _mlp(self, prefix: str, inner: int, bias: bool = False, expert: int = 0) -> MlpWeights:
        loader, layer, hidden = self._loader, self._layer, self._spec.hidden_size
        heights = (inner, inner) if self._spec.gated else (inner,)
        return MlpWeights(
            up=loader.matrix(layer, f"{prefix}up", heights, hidden, expert),
            down=loader.matrix(layer, f"{prefix}down", (hidden,), inner, expert),
            up_bias=loader.bias(layer, "up", heights) if bias else None,
            down_bias=loader.bias(layer, "down", (hidden,)) if bias else None,
        )

    def _experts(self, experts: ExpertsSpec) -> ExpertsWeights:
        loader, layer, hidden = self._loader, self._layer, self._spec.hidden_size
        shared = experts.shared_intermediate_size
        return ExpertsWeights(
            router=loader.matrix(layer, "router", (experts.num_experts,), hidden, dtype=torch.float32),
            mlps=tuple(
                self._mlp("experts.", experts.intermediate_size, expert=expert) for expert in range(experts.num_experts)
            ),
            shared=self._mlp("shared.", shared) if shared else None,
            shared_gate=loader.matrix(layer, "shared.gate", (1,), hidden, dtype=torch.float32)[0] if shared else None,
        )
