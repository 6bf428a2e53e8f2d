"""Turns what an answer has to match into a grammar for the executor, and refuses what can't be kept to; no I/O.

Grammars are llguidance's. It refuses features of a JSON schema that it does not know, but does not say where they are;
that is found here, by compiling ever smaller parts of the schema.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from svc_common.grammar import PARSER_LIMITS

# Between tokens of JSON: as json.dumps writes it, and in lines indented by up to 24 spaces. More is allowed by JSON,
# and a model that has begun with it may never end.
_WHITESPACE = r" |\n {0,24}"
_JSON_OPTIONS: Any = {  # JsonCompileOptions, a type that the library has for checkers only.
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "lenient": False,
    "coerce_one_of": False,
}
_OPTIONS_KEYWORD = "x-guidance"
"""By which a schema could change the options above."""
_MAX_SEARCH_STEPS = 300
_UNKNOWN_KEYWORDS = re.compile(r'^Unimplemented keys: \["([^"]+)"')
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_Path = tuple[str | int, ...]


class ConstraintError(Exception):
    """The constraint can't be kept to; the text says why and, in a JSON schema, where."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to match, as the caller sent it."""

    kind: str
    """Name of the field in the proto's Constraint."""
    text: str = ""
    choices: tuple[str, ...] = ()


def grammar_of(constraint: Constraint) -> str:
    """The grammar in llguidance's form. Raises ConstraintError. Takes some ms, for a large schema some hundreds."""
    match constraint.kind:
        case "json_schema":
            return _json_schema_grammar(constraint.text)
        case "json_object":
            return _checked(_of_schema({"type": "object"}))
        case "regex":
            return _checked(LLMatcher.grammar_from_regex(constraint.text))
        case "ebnf":
            try:
                return _checked(LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.text)))
            except ConstraintError:
                raise
            except Exception as error:  # The converter raises whatever it meets, RecursionError among it.
                raise ConstraintError(f"no grammar: {error}") from error
        case _:
            alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choices)
            return _checked(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _checked(grammar: str) -> str:
    if error := _error_of(grammar):
        raise ConstraintError(error)
    return grammar


def _error_of(grammar: str) -> str:
    """Why llguidance can't keep to it, in one line; empty where it can."""
    has_failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=PARSER_LIMITS)
    return " ".join(" ".join(messages).split()) if has_failed else ""


def _json_schema_grammar(text: str) -> str:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        _check_against_its_draft(schema)
        grammar = _of_schema(schema)
    except RecursionError as error:
        raise ConstraintError("nested too deep") from error
    except ValueError as error:
        raise ConstraintError(f"no JSON: {error}") from error
    if error_text := _error_of(grammar):
        path, error_text = _locate(schema, error_text)
        if keyword := _UNKNOWN_KEYWORDS.match(error_text):
            path, error_text = (*path, keyword[1]), "this keyword is not supported"
        raise ConstraintError(f"{_json_path(path)}: {error_text}")
    return grammar


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_against_its_draft(schema: Any) -> None:
    if schema is False:
        raise ConstraintError("$: false matches nothing")
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ConstraintError(f"{_json_path(tuple(error.path))}: {error.message:.300}") from error


def _of_schema(schema: Any) -> str:
    """The grammar of a schema, not yet checked."""
    if schema is True:  # As {} is; the library takes options with objects only.
        schema = {}
    kept = {name: value for name, value in schema.items() if name != _OPTIONS_KEYWORD}
    return LLMatcher.grammar_from_json_schema(kept, overrides=_JSON_OPTIONS)


def _locate(schema: Any, error: str) -> tuple[_Path, str]:
    """The smallest part of a schema that fails by itself, and why; `error` is the whole one's."""
    path: _Path = ()
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    part, steps = schema, 0
    while True:
        for step, child in _children(part):
            steps += 1
            if steps > _MAX_SEARCH_STEPS:
                return path, error
            child_error = _error_of(_of_schema(shared | child)) if isinstance(child, dict) else ""
            # A reference into a part that is left out here fails for that reason only.
            if child_error and not child_error.startswith("Pointer"):
                path, part, error = (*path, *step), child, child_error
                break
        else:
            return path, error


def _children(schema: Any) -> Iterator[tuple[_Path, Any]]:
    """Subschemas with their way from here."""
    if not isinstance(schema, dict):
        return
    for name in _OF_SCHEMAS:
        yield from (((name, key), child) for key, child in schema.get(name, {}).items())
    for name in _LISTS_OF_SCHEMAS:
        yield from (((name, index), child) for index, child in enumerate(schema.get(name, [])))
    yield from (((name,), schema[name]) for name in _SCHEMAS if name in schema)


def _json_path(path: _Path) -> str:
    """As in RFC 9535."""
    return "$" + "".join(
        f".{step}" if isinstance(step, str) and re.fullmatch(r"[A-Za-z_$][\w$]*", step) else f"[{json.dumps(step)}]"
        for step in path
    )
