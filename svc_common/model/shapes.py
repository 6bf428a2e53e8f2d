"""Finds a model where its shape is enough: one known by name, a config.json, a directory, a .gguf or a hub id."""

from dataclasses import replace
from pathlib import Path

from svc_common.config.model import LoadFormat
from svc_common.model.store import HUB_ID, HUB_PATTERNS, ModelFiles, ModelNotFoundError, hub_errors, resolve

_KNOWN = Path(__file__).with_name("known_shapes")
_WEIGHTS = "*.safetensors"


def known_shapes() -> tuple[str, ...]:
    """Names of shapes that come with NeoFlex."""
    return tuple(sorted(path.parent.name for path in _KNOWN.glob("*/config.json")))


def find_model(source: str, load_format: LoadFormat) -> ModelFiles:
    """What `model.source` and `model.load_format` name; with the latter "dummy" no weights have to be there.

    Raises ModelNotFoundError.
    """
    if load_format == "dummy":
        return replace(find_shape(source), is_dummy=True)
    return resolve(source)


def find_shape(source: str) -> ModelFiles:
    """Files that describe a model, its weights among them or not. Of a hub id no weights are fetched.

    Raises ModelNotFoundError.
    """
    if source in known_shapes():
        return ModelFiles(source, _KNOWN / source)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".json":
        if path.name != "config.json":
            raise ModelNotFoundError(f"a configuration must be called config.json, is {path.name}")
        path = path.parent
    if (path / "config.json").is_file():
        return ModelFiles(path.resolve().name, path.resolve())
    try:
        of_hub = HUB_ID.fullmatch(source) and not source.startswith((".", "~")) and not path.exists()
        return _from_hub(source) if of_hub else resolve(source)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; shapes known by name: {', '.join(known_shapes())}") from error


def _from_hub(repo_id: str) -> ModelFiles:
    """A configuration that was downloaded once is enough; else all but the weights is fetched."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    name = repo_id.rpartition("/")[2]
    with hub_errors(repo_id):
        found = try_to_load_from_cache(repo_id, "config.json")
        if isinstance(found, str):
            return ModelFiles(name, Path(found).parent)
        directory = Path(snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS), ignore_patterns=[_WEIGHTS]))
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(f"{repo_id} holds no config.json")
    return ModelFiles(name, directory)
