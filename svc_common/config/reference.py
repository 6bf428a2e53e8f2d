"""Writes docs/configuration.md from the classes: each key with its type, limits, default, and docstring."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, ByteSize
from pydantic.fields import FieldInfo

from svc_common.config.root import Config
from svc_common.config.types import Section, checked_address

_HEAD = """\
# Configuration

<!-- Written by `neoflex config reference` from svc_common/config; a test compares them. -->

One TOML file for all services: `neoflex up --config FILE`, or `python -m planner_svc --config FILE` and so on for \
each. Without a file, or without a key, the default holds. `neoflex config check FILE` says what is wrong with one, \
`neoflex config show FILE` prints it with all defaults. An unknown key and a value out of range are refused, by name.

A *size* is a whole number of bytes or has a unit: `"512MiB"`, `"8GB"`. An *address* is `"host:port"` or \
`"unix:path"`. Paths are relative to the directory in which a service starts.
"""
_WORDS: Mapping[Any, str] = {str: "text", bool: "true or false", int: "whole number", float: "number", Path: "path"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class _Table(NamedTuple):
    header: str
    """As in the file, e.g. "[planner.classes.NAME]"."""
    about: str
    keys: Mapping[str, FieldInfo]
    docs: Mapping[str, str]


def reference() -> str:
    """The whole page, Markdown."""
    return "\n".join([_HEAD, *map(_markdown, _tables_below("", "", Config, ""))])


def key_docs(section: type[Section]) -> dict[str, str]:
    """What stands below each key in the source, on one line."""
    docs: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section) and owner is not Section:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(definition, ast.ClassDef)
            docs |= dict(_documented(definition))
    return docs


def _documented(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node, after in pairwise(definition.body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr)):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield node.target.id, " ".join(after.value.value.split()).replace("|", r"\|")


def _tables_below(header: str, path: str, section: type[Section], about: str) -> Iterator[_Table]:
    """A table's own keys, and then the tables that its other keys are."""
    docs, keys, inner = key_docs(section), {}, []
    for key, field in section.model_fields.items():
        if found := _inner_table(f"{path}.{key}".removeprefix("."), field):
            inner.append((*found, docs.get(key, "")))
        else:
            keys[key] = field
    if keys:
        own = " ".join((inspect.getdoc(section) or "").split())
        yield _Table(header, f"{own} {about}".strip(), keys, docs)
    for inner_header, inner_path, inner_section, inner_about in inner:
        yield from _tables_below(inner_header, inner_path, inner_section, inner_about)


def _inner_table(path: str, field: FieldInfo) -> tuple[str, str, type[Section]] | None:
    """Header, path and class of a key that is a table, tables by name, or a list of tables."""
    base = _bare(field.annotation)
    if _is_section(base):
        return f"[{path}]", path, base
    arguments = [_bare(argument) for argument in get_args(base)]
    if get_origin(base) is dict and _is_section(arguments[1]):
        return f"[{path}.NAME]", f"{path}.NAME", arguments[1]
    if get_origin(base) in (tuple, list) and _is_section(arguments[0]):
        return f"[{path}], or several [[{path}]]", path, arguments[0]
    return None


def _is_section(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Section)


def _bare(annotation: Any) -> Any:
    """Without metadata, and without the None of what may be left out."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [argument for argument in get_args(annotation) if argument is not NoneType]
        return _bare(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def _limits(annotation: Any) -> list[Any]:
    """Metadata at any depth of an optional type."""
    if get_origin(annotation) is Annotated:
        inner, *own = get_args(annotation)
        return [*_limits(inner), *_flat(own)]
    if get_origin(annotation) in (Union, UnionType):
        return [item for argument in get_args(annotation) for item in _limits(argument)]
    return []


def _flat(metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _markdown(table: _Table) -> str:
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {table.docs.get(key, '')} |"
        for key, field in table.keys.items()
    ]
    head = [f"## {table.header}\n", f"{table.about}\n", "| key | type | default | |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _type(field: FieldInfo) -> str:
    limits = [*_limits(field.annotation), *_flat(field.metadata)]
    name = _type_name(_bare(field.annotation), limits)
    return f"{name}{_bounds(limits, is_size=name == 'size')}"


def _type_name(kind: Any, limits: list[Any]) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if any(isinstance(item, AfterValidator) and item.func is checked_address for item in limits):
        return "address"
    if inspect.isclass(kind) and issubclass(kind, ByteSize):
        return "size"
    if origin is Literal:
        return ", ".join(_shown(value) for value in arguments)
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return ", ".join(_shown(member.value) for member in kind)
    if origin in (tuple, list):
        return f"list of {_type_name(_bare(arguments[0]), _limits(arguments[0]))}s"
    if origin is dict:
        return f"table of {_type_name(_bare(arguments[1]), _limits(arguments[1]))}s by name"
    if origin in (Union, UnionType):
        return " or ".join(_type_name(_bare(item), _limits(item)) for item in arguments if item is not NoneType)
    return _WORDS[kind]


def _bounds(limits: list[Any], is_size: bool) -> str:
    """In words, what annotated_types says in classes."""

    def shown(value: Any) -> str:
        return _size(value) if is_size else f"{int(value) if value == int(value) else value:,}"

    words = []
    for item in limits:
        match item:
            case annotated_types.Ge(ge=least):
                words.append(f"at least {shown(least)}")
            case annotated_types.Gt(gt=least):
                words.append(f"more than {shown(least)}")
            case annotated_types.Le(le=most) if most != 2**63 - 1:  # What any size ends at.
                words.append(f"at most {shown(most)}")
            case annotated_types.Lt(lt=most):
                words.append(f"less than {shown(most)}")
            case annotated_types.MinLen(min_length=least):
                words.append(f"of {least} or more")
            case annotated_types.MaxLen(max_length=most):
                words.append(f"of up to {most}")
            case _:
                pass
    return f", {' and '.join(words)}" if words else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else _shown(value)


def _shown(value: Any) -> str:
    """As one would write it in the file."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, ByteSize):
        return f'`"{_size(value)}"`' if value else "`0`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return "`[]`" if not value else f"`[{', '.join(_shown(item).strip('`') for item in value)}]`"
    if isinstance(value, dict):
        return ", ".join(f"`{key} = {_shown(item).strip('`')}`" for key, item in value.items())
    return f"`{value}`"


def _size(num_bytes: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}"
