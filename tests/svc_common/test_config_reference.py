"""docs/configuration.md is what the classes say, and says of them what pydantic's own JSON schema does."""

import re
from pathlib import Path
from typing import Any

import pytest

from svc_common.config import Config
from svc_common.config.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def rows() -> dict[str, dict[str, list[str]]]:
    """By section the cells of each key: type, default, description."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in reference().splitlines():
        if header := re.match(r"## \[([\w.]+)\]", line):
            found[header[1]] = {}
        elif key := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            found[list(found)[-1]][key[1]] = key[2].split(" | ")
    return found


def schema_sections() -> dict[str, dict[str, Any]]:
    """The properties of each section, by the name that the page gives it."""
    schema = Config.model_json_schema()

    def target(part: dict[str, Any]) -> dict[str, Any] | None:
        if "$ref" in part:
            section = schema["$defs"][part["$ref"].rpartition("/")[2]]
            required = section.get("required", ())
            return {key: inner | {"is_required": key in required} for key, inner in section["properties"].items()}
        inner = [target(item) for item in part.get("anyOf", []) + part.get("allOf", []) if item != {"type": "null"}]
        return next((item for item in inner if item), None)

    found: dict[str, dict[str, Any]] = {}

    def walk(path: str, properties: dict[str, Any]) -> None:
        for key, part in properties.items():
            here = f"{path}.{key}".removeprefix(".")
            if (below := target(part)) is not None:
                walk(here, below)
            elif (below := target(part.get("additionalProperties") or {})) is not None:
                walk(f"{here}.NAME", below)
            elif (below := target(part.get("items") or {})) is not None:
                walk(here, below)
            else:
                found.setdefault(path, {})[key] = part

    walk("", schema["properties"])
    return found


KEYS = [(section, key) for section, keys in schema_sections().items() for key in keys]


def test_the_page_is_what_the_classes_say() -> None:
    assert PAGE.read_text() == reference(), "write it again: neoflex config reference > docs/configuration.md"


def test_there_is_a_row_for_each_key_of_the_schema() -> None:
    assert {(section, key) for section, keys in rows().items() for key in keys} == set(KEYS)
    assert ("planner.classes.NAME", "ttft_s") in KEYS
    assert ("cpu_attn", "segment_dir") in KEYS


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda part: part)
def test_a_row_says_what_the_schema_says(section: str, key: str) -> None:
    kind, default, description = rows()[section][key]
    part = schema_sections()[section][key]
    assert description.strip(), "each key has a docstring"
    if part.get("default") is None:
        assert default == ("must be set" if part.get("is_required") else "")
    else:
        assert read_default(default) == part["default"]
    options = next((item for item in part.get("anyOf", []) if item != {"type": "null"}), part)
    if "enum" in options:
        assert re.findall(r'"(\w+)"', kind) == options["enum"]
    if kind.startswith("size"):  # Of which the schema knows no limits.
        return
    for limit, words in (("minimum", "at least"), ("maximum", "at most"), ("exclusiveMinimum", "more than")):
        shown = re.search(rf"{words} (-?[\d.,]+)", kind)
        assert (float(shown[1].rstrip(",").replace(",", "")) if shown else None) == options.get(limit), words


def test_limits_of_sizes_have_units() -> None:
    assert rows()["gateway"]["max_body_bytes"][:2] == ["size, at least 1KiB and at most 48MiB", '`"8MiB"`']
    assert rows()["gpu"]["kv_bytes"][:2] == ['size or `"auto"`', '`"512MiB"`']


def read_default(shown: str) -> Any:
    """The value between the backquotes, as JSON has it."""
    text = shown.strip("`")
    if size := re.fullmatch(r'"(\d+)(KiB|MiB|GiB)"', text):
        return int(size[1]) * UNITS[size[2]]
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("["):
        return re.findall(r'"([^"]*)"', text)
    return text.strip('"') if text.startswith('"') else float(text)
