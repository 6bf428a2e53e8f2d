"""Varied JSON schemas, each with room for outputs of a few dozen tokens, and more that are refused."""

from typing import Any

_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Closed, and with all its properties required, unless told otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False} | more


_SHORT = {"type": "string", "maxLength": 6}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "integer from one side": {"type": "integer", "exclusiveMinimum": 41, "maximum": 99999},
    "integer multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "number between": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 12.5},
    "number multiple": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10},
    "string of lengths": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]x", "maxLength": 8},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "duration": {"type": "string", "format": "duration"},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of many types": {"enum": ["a", 1, None, True, {"x": [1, 2]}, [], 2.5]},
    "enum beside type": {"type": "integer", "enum": [1, 2, "x"]},
    "const": {"const": {"kind": 'é\n"\\', "n": [True, 0]}},
    "types": {"type": ["string", "null", "integer"], "maxLength": 5, "minimum": 0, "maximum": 99},
    "array of bounds": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 5},
    "array of enum": {"type": "array", "items": {"enum": ["n", "e", "s", "w"]}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [_SHORT, _DIGIT], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [_SHORT], "items": _DIGIT, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": _DIGIT, "minItems": 1, "maxItems": 2},
        "minItems": 1,
        "maxItems": 3,
    },
    "object": _object({"name": _SHORT, "age": _DIGIT}),
    "nested": _object({"a": _object({"b": _object({"c": {"type": "boolean"}})})}),
    "optional properties": _object({"a": _DIGIT, "b": _SHORT, "c": {"type": "null"}}, required=["b"]),
    "no property required": _object({"a": _DIGIT, "b": _DIGIT}, required=[]),
    "additional properties": {
        "type": "object",
        "properties": {"a": _DIGIT},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "required but not described": {
        "type": "object",
        "properties": {"a": _DIGIT},
        "required": ["z"],
        "additionalProperties": _DIGIT,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": _DIGIT},
        "additionalProperties": False,
    },
    "number of properties": {"type": "object", "additionalProperties": _DIGIT, "minProperties": 1, "maxProperties": 2},
    "names that need escapes": _object({'a"b': _DIGIT, "c\\d": _DIGIT, "é ü": _DIGIT, "": _DIGIT}),
    "anyOf": {"anyOf": [_SHORT, _DIGIT, {"type": "array", "items": _DIGIT, "maxItems": 2}]},
    "oneOf": {"oneOf": [_SHORT, {"type": "integer", "minimum": 100, "maximum": 999}]},
    "oneOf by a constant": {
        "oneOf": [
            _object({"kind": {"const": "cat"}, "lives": _DIGIT}),
            _object({"kind": {"const": "dog"}, "name": _SHORT}),
        ]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "allOf of objects": {
        "allOf": [{"type": "object", "properties": {"a": _DIGIT}}, {"required": ["a"]}],
        "additionalProperties": False,
        "properties": {"a": True},
    },
    "recursion": _TREE,
    "recursion to the root": _object({"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    "list by reference": {
        "$defs": {
            "list": {
                "anyOf": [{"type": "null"}, _object({"head": _DIGIT, "tail": {"$ref": "#/$defs/list"}})],
            }
        },
        "$ref": "#/$defs/list",
    },
    "definitions": {"definitions": {"d": _DIGIT}, "$ref": "#/definitions/d", "maximum": 4},
    "reference into properties": _object({"a": _DIGIT, "b": {"$ref": "#/properties/a"}}),
    "what a program asks for": _object(
        {
            "id": {"type": "string", "format": "uuid"},
            "status": {"enum": ["open", "closed"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^#[a-z]{1,5}$"}, "maxItems": 3},
            "price": {"type": ["number", "null"], "minimum": 0, "maximum": 1000},
        },
        title="Ticket",
        description="Annotations change nothing.",
        examples=[1],
    ),
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    (_object({"a": {"type": "array", "items": {"not": {"type": "null"}}}}), "$.properties.a.items.not"),
    ({"type": "array", "uniqueItems": True}, "$.uniqueItems"),
    ({"anyOf": [{"type": "null"}, {"type": "array", "contains": {"type": "null"}}]}, "$.anyOf[1].contains"),
    ({"$defs": {"x y": {"if": True, "then": False}}, "$ref": "#/$defs/x%20y"}, '$.$defs["x y"].if'),
    (_object({"m": {"type": "string", "format": "idn-email"}}), "$.properties.m: Unknown format: idn-email"),
    (_object({"m": {"type": "string", "pattern": "(?=a)b"}}), "$.properties.m: regex parse error"),
    (_object({"m": {"type": "strnig"}}), "$.properties.m.type"),
    (_object({"m": {"minimum": "3"}}), "$.properties.m.minimum"),
    (_object({"m": {"type": "integer", "minimum": 5, "maximum": 1}}), "$.properties.m: Unsatisfiable"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "$: oneOf"),
    ({"$ref": "#/$defs/nothing"}, "$: Pointer '/$defs/nothing' does not exist"),
    ({"$ref": "https://example.com/schema"}, "$: Resource 'https://example.com/schema'"),
    (_object({"a": {}, "b": {}}, required=["a"], minProperties=1, maxProperties=1), "$: min/maxProperties"),
    ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "$.uniqueItems"),
]
