"""Reads a model's shape from its files, before any weight: HF config.json or GGUF metadata to ModelSpec."""

import math
from pathlib import Path

from gguf import GGUFReader

from svc_common.model.gguf_metadata import spec_from_gguf
from svc_common.model.hf_config import spec_from_hf
from svc_common.model.spec import MAX_LAYERS, ModelSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles

_MAX_HEAD_DIM = 256


def read_spec(files: ModelFiles, reader: GGUFReader | None = None) -> ModelSpec:
    """Raises UnsupportedModelError, which names the architecture or the feature that cannot be served.

    `reader`, from `open_gguf`, saves a caller that has one from parsing the file's vocabulary again.
    """
    origin = files.gguf.name if files.gguf is not None else "config.json"
    try:
        if files.gguf is not None:
            return _checked(spec_from_gguf(reader or open_gguf(files.gguf)))
        return _checked(spec_from_hf(files.directory))
    except KeyError as error:
        raise UnsupportedModelError(f"{origin} lacks {error.args[0]}") from error
    except (AttributeError, ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{origin} holds a value that cannot be used: {error}") from error


def open_gguf(path: Path) -> GGUFReader:
    """Parses all but the tensors, which takes seconds. Raises UnsupportedModelError."""
    try:
        return GGUFReader(path)
    except Exception as error:  # The reader trusts the file, and may stumble anywhere in a damaged one.
        raise UnsupportedModelError(f"{path.name} cannot be read as GGUF, or was cut short: {error}") from error


def _checked(spec: ModelSpec) -> ModelSpec:
    """What the decoder and the kernels rely on."""
    counts = {
        "layers": spec.num_layers,
        "query heads": spec.num_q_heads,
        "KV heads": spec.num_kv_heads,
        "elements in a head": spec.head_dim,
        "context tokens": spec.context_tokens,
        "tokens in the sliding window": spec.sliding_window,
    }
    for what, count in counts.items():
        if count is not None and count < 1:
            raise UnsupportedModelError(f"{count} {what} make no model")
    if spec.num_layers > MAX_LAYERS:
        raise UnsupportedModelError(f"{spec.num_layers} layers are over {MAX_LAYERS}")
    if spec.num_q_heads % spec.num_kv_heads:
        raise UnsupportedModelError(f"{spec.num_q_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
    if spec.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModelError(f"head dimension {spec.head_dim} is over {_MAX_HEAD_DIM}")
    _check_ropes(spec)
    _check_experts(spec)
    return spec


def _check_ropes(spec: ModelSpec) -> None:
    for rope in (spec.rope, spec.local_rope):
        if rope is not None and not (0 < rope.theta < math.inf and 0 < rope.factor < math.inf):
            raise UnsupportedModelError(f"rotary embedding of base {rope.theta} and factor {rope.factor}: not above 0")
        if rope is not None and (rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= spec.head_dim):
            raise UnsupportedModelError(f"rotary dimension {rope.rotary_dim} does not fit heads of {spec.head_dim}")
    if spec.rope and spec.local_rope and spec.rope.rotary_dim != spec.local_rope.rotary_dim:
        raise UnsupportedModelError("rotary embeddings of two dimensions in one model are not supported")


def _check_experts(spec: ModelSpec) -> None:
    experts = spec.experts
    if experts and not 1 <= experts.experts_per_token <= experts.num_experts:
        raise UnsupportedModelError(f"{experts.experts_per_token} experts per token of {experts.num_experts}")
