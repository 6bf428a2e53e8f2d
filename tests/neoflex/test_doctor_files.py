"""The files and directories that a configuration names, each wrong in its own way."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from support.certificates import Authority, Issued

from neoflex.doctor import Level
from neoflex.doctor.files import file_troubles
from svc_common.config import Config, parse
from svc_common.config.types import Section


def troubles(values: dict[str, Any]) -> list[tuple[Level, str]]:
    return [(item.level, item.advice) for item in file_troubles(parse(values, "test"))]


@pytest.fixture
def issued(tmp_path: Path) -> Issued:
    return Authority(tmp_path / "ca").issue("planner")


@pytest.fixture
def good(tmp_path: Path, issued: Issued) -> dict[str, Any]:
    """Names every file that there is a key for."""
    text, keys, key = tmp_path / "template.jinja", tmp_path / "keys", tmp_path / "own"
    text.write_text("{{ messages }}")
    for path in (keys, key):
        path.write_text("key\n")
        path.chmod(0o600)
    pair = {"certificate": str(issued.certificate), "key": str(issued.key)}
    client = {"client_certificate": pair["certificate"], "client_key": pair["key"], "certificate": str(issued.ca)}
    return {
        "model": {"chat_template": str(text)},
        "tls": issued.section,
        "planner": {"listen": f"unix:{tmp_path}/planner", "api_keys_file": str(keys)},
        "gateway": {**pair, "api_keys_file": str(keys), "planner_key_file": str(key)},
        "cpu_attn": {"segment_dir": str(tmp_path)},
        "logging": {"dump_dir": str(tmp_path)},
        "telemetry": {"otlp_endpoint": "https://127.0.0.1:1", **client},
    }


def test_all_is_well(good: dict[str, Any]) -> None:
    assert troubles(good) == []


def path_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for key, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        for kind in kinds:
            if kind is Path:
                yield f"{prefix}{key}"
            elif isinstance(kind, type) and issubclass(kind, Section):
                yield from path_keys(kind, f"{key}.")


@pytest.mark.parametrize("key", sorted(path_keys(Config)))
def test_each_that_is_missing_is_named(key: str, good: dict[str, Any]) -> None:
    """So a key that comes to be is looked at, too."""
    section, _, name = key.partition(".")
    assert name in good[section]
    good[section][name] = "/nowhere/at/all"
    [(level, text)] = troubles(good)
    assert level is Level.PROBLEM
    assert text.startswith(f"{key}: /nowhere/at/all: ")


def test_of_the_wrong_kind(good: dict[str, Any], tmp_path: Path) -> None:
    file, pem = tmp_path / "file", tmp_path / "ca" / "ca.pem"
    file.write_bytes(b"\xff")
    good["model"] = {"chat_template": str(file), "source": str(file)}
    good["logging"] = {"dump_dir": str(pem)}
    good["cpu_attn"] = {"segment_dir": str(file), "listen": f"unix:{file}/socket"}
    good["telemetry"]["certificate"] = str(file)
    good["planner"]["api_keys_file"] = str(tmp_path / "empty")
    (tmp_path / "empty").write_text("# none yet")
    assert troubles(good) == [
        (Level.PROBLEM, f"model.source: {file} is not a GGUF file"),
        (Level.PROBLEM, f"model.chat_template: {file}: is no text in UTF-8"),
        (Level.PROBLEM, f"telemetry.certificate: {file}: is no PEM file"),
        (Level.PROBLEM, f"logging.dump_dir: {pem}: is no directory"),
        (Level.PROBLEM, f"cpu_attn.segment_dir: {file}: is no directory"),
        (Level.PROBLEM, f"cpu_attn.listen: {file}: is no directory"),
        (Level.PROBLEM, f"planner.api_keys_file: {tmp_path}/empty holds no key"),
    ]


def test_keys_for_everybody(good: dict[str, Any], issued: Issued, tmp_path: Path) -> None:
    """An API key is complained of; a private key is refused, as the services do."""
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.chmod(0o644)
    own.chmod(0o604)
    found = troubles(good)
    named = [("planner.api_keys_file", keys), ("gateway.api_keys_file", keys), ("gateway.planner_key_file", own)]
    assert found == [
        (Level.NOTE, f"{name}: {path}: everybody on this machine may read it: chmod 600 {path}") for name, path in named
    ]
    issued.key.chmod(0o644)
    refused = [text for level, text in troubles(good) if level is Level.PROBLEM]
    assert [text.partition(", ")[0].partition(": who")[0] for text in refused] == [
        f"tls.key: {issued.key}: its mode is 0644",
        f"gateway.key: {issued.key}: its mode is 0644",
    ]


def test_a_directory_that_cannot_be_written_to(good: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    texts = [text for _, text in troubles(good)]
    keys = ("logging.dump_dir", "cpu_attn.segment_dir", "planner.listen")
    assert [text.partition(": ")[0] for text in texts] == list(keys)
    assert all(text.endswith("cannot be written to") for text in texts)


def test_a_group_that_is_none(good: dict[str, Any]) -> None:
    good["cpu_attn"]["segment_group"] = "no-such-group"
    assert troubles(good) == [(Level.PROBLEM, "cpu_attn.segment_group: there is no group 'no-such-group' here")]


def test_a_pool_of_nothing_needs_no_directory_and_a_model_by_name_no_file(good: dict[str, Any]) -> None:
    good["cpu_attn"] = {"kv_bytes": 0, "segment_dir": "/nowhere"}
    good["model"]["source"] = "some/model"
    assert troubles(good) == []
