"""Where a model's files are: built-in names, directories, GGUF files and hub ids, by one `resolve`."""

from dataclasses import dataclass
from pathlib import Path


class ModelNotFoundError(Exception):
    """No such model, or its files cannot be had. The text says what to do."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this disk."""

    name: str
    directory: Path
    """Holds config.json, *.safetensors and the tokenizer, or the GGUF file."""
    gguf: Path | None = None
    """The one file that is the model, for GGUF."""


def resolve(source: str) -> ModelFiles:
    """Finds a model's files; fetches nothing that is already here. Raises ModelNotFoundError."""
    raise ModelNotFoundError(source)
