"""[model] and [kv]."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from svc_common.config.types import Section

LoadFormat = Literal["auto", "dummy"]


class ModelConfig(Section):
    """Which model, and how it is presented."""

    source: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"
    """Built-in name, directory of safetensors, GGUF file, or hub id."""
    load_format: LoadFormat = "auto"
    """"auto" reads the weights. "dummy" makes some up for the shape, to measure what a model takes: its answers mean
    nothing. `source` may then also be a config.json, a directory with one, or a shape known by name, such as
    "llama-3.1-8b". Without a tokenizer there, prompts and answers are token ids."""
    name: str = ""
    """Name in answers; default: the source's last part."""
    chat_template: Path | None = None
    """File of a Jinja template by which conversations are written, in place of the model's own."""


class KvConfig(Section):
    """Blocks and types of the KV cache, on both tiers."""

    block_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in a block."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of keys and values; "auto": the compute type, and beside int8 or int4 weights bf16."""
    host_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of keys and values on the host; "auto": as on the GPU. "int8" has a scale for each block and head: a quarter
    of fp32's bytes or half of 16-bit types', for numbers off by some 0.4 % of the largest beside them."""
    prefix_cache: bool = True
    """KV of what requests begin with is kept while there is room, and shared by those that begin alike."""
