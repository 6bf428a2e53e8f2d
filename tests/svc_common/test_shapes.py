"""Models whose shape is enough: what names one, and that no weights are fetched for it."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from svc_common.model.no_tokenizer import NoTokenizer, has_tokenizer
from svc_common.model.read_spec import read_spec
from svc_common.model.shapes import find_model, find_shape
from svc_common.model.store import ModelFiles, ModelNotFoundError


def test_a_known_name_is_a_model_without_weights():
    files = find_model("llama-3.1-8b", "dummy")
    assert (files.name, files.is_dummy, has_tokenizer(files)) == ("llama-3.1-8b", True, False)
    assert read_spec(files).num_layers == 32
    assert not list(files.directory.glob("*.safetensors"))
    # As `neoflex up` hands it on.
    assert find_model(str(files.directory), "dummy") == files
    with pytest.raises(ModelNotFoundError, match=r"'llama-3.1-8b' is no built-in model"):
        find_model("llama-3.1-8b", "auto")
    with pytest.raises(ModelNotFoundError, match=r"neither config.json with"):
        find_model(str(files.directory), "auto")


def test_a_configuration_by_its_directory_or_itself(tmp_path, monkeypatch):
    directory = tmp_path / "mine"
    directory.mkdir()
    config = directory / "config.json"
    config.write_text("{}")
    monkeypatch.chdir(tmp_path)
    for source in (str(directory), str(config), "./mine", "mine/config.json"):
        assert find_shape(source) == ModelFiles("mine", directory)
    config.rename(directory / "other.json")
    with pytest.raises(ModelNotFoundError, match=r"must be called config.json, is other.json$"):
        find_shape(str(directory / "other.json"))
    with pytest.raises(
        ModelNotFoundError, match=r"'gpt-9' is no built-in model .*; shapes known by name: llama-2-70b, "
    ):
        find_shape("gpt-9")
    with pytest.raises(ModelNotFoundError, match=r"^\./absent: no such file or directory; shapes known by name: "):
        find_shape("./absent")


def test_of_a_hub_id_all_but_the_weights_is_fetched(tmp_path, monkeypatch):
    calls = []

    def download(repo_id: str, **options: object) -> str:
        calls.append(options)
        (tmp_path / "config.json").write_text(json.dumps({}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo_id, name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_shape("org/name") == ModelFiles("name", tmp_path)
    assert [call["ignore_patterns"] for call in calls] == [["*.safetensors"]]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo_id, name: str(tmp_path / name))
    assert find_shape("org/name") == ModelFiles("name", tmp_path)
    assert len(calls) == 1

    def refuse(repo_id: str, **options: object) -> str:
        raise errors.EntryNotFoundError("none")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo_id, name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=r"org/name is not in the local hub cache.*shapes known by name"):
        find_shape("org/name")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_tokenizer_that_is_there_is_used(name: str, tmp_path: Path):
    files = ModelFiles("m", tmp_path, is_dummy=True)
    assert not has_tokenizer(files)
    (tmp_path / name).touch()
    assert has_tokenizer(files)
    assert has_tokenizer(ModelFiles("m", tmp_path / "none", tmp_path / "m.gguf"))


def test_without_a_tokenizer_tokens_have_no_text():
    none = NoTokenizer()
    assert (none.decode([1, 2, 3]), none.token_bytes(7), none.token_name(7)) == ("", b"", "")
    assert (none.vocab_size, none.eos_token_ids, none.tool_call_format) == (0, (), None)
    with pytest.raises(NotImplementedError, match="the model has no tokenizer"):
        none.encode("text")
