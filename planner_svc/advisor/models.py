"""Finds a model's shape: a built-in one, a config.json, a directory, a .gguf or a hub id; no weights are needed."""

from importlib.resources import as_file, files
from pathlib import Path

from planner_svc.advisor.errors import InputError
from svc_common.model.read_spec import read_spec
from svc_common.model.spec import ModelSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles, ModelNotFoundError, resolve

_SHAPES = files("planner_svc.advisor") / "models"


def known_models() -> tuple[str, ...]:
    """Names of built-in shapes."""
    return tuple(sorted(item.name for item in _SHAPES.iterdir() if item.is_dir()))


def find_spec(name: str) -> ModelSpec:
    """Raises InputError."""
    try:
        if name in known_models():
            with as_file(_SHAPES / name) as directory:
                return read_spec(ModelFiles(name, directory))
        return read_spec(_files(name))
    except ModelNotFoundError as error:
        raise InputError(f"--model: {error}; shapes known by name: {', '.join(known_models())}") from error
    except UnsupportedModelError as error:
        raise InputError(f"--model: {name}: {error}") from error


def _files(name: str) -> ModelFiles:
    """With its config.json alone, where the weights are not here."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        if path.name != "config.json":
            raise InputError(f"--model: a configuration must be called config.json, is {path.name}")
        return ModelFiles(path.parent.name, path.parent)
    if (path / "config.json").is_file():
        return ModelFiles(path.name, path)
    cached = _cached_config(name)
    return ModelFiles(name, cached.parent) if cached else resolve(name)


def _cached_config(name: str) -> Path | None:
    """Of a hub id whose configuration was downloaded once."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
