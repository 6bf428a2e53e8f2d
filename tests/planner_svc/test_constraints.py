"""What can't be kept to is refused, and a JSON schema's error names the place."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.schemas import REFUSED, SCHEMAS

from planner_svc.constraints import Constraint, ConstraintError, grammar_of

TOKENIZER = LLTokenizer("byte", eos_token=[256])


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher, tokens = LLMatcher(TOKENIZER, grammar_of(constraint)), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def schema(value: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_schema_asks_for_in_vain_is_named_with_its_place(refused: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(schema(refused))
    assert str(caught.value).startswith(message)


def test_supported_schemas_are_taken() -> None:
    for value in (*SCHEMAS.values(), True, {}):
        assert json.loads(grammar_of(schema(value)))["grammars"]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", "{"), "no JSON: "),
        (Constraint("json_schema", '{"const": NaN}'), "no JSON: NaN is not JSON"),
        (Constraint("json_schema", "false"), "$: false matches nothing"),
        (Constraint("json_schema", "[1]"), "$: [1] is not of type"),
        (Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "nested too deep"),
        (Constraint("regex", "a(b"), "at 1(8): invalid regex"),
        (Constraint("regex", r"(a)\1"), "at 1(8): invalid regex"),
        (Constraint("ebnf", "root = [a]"), "no grammar: Expected ::="),
        (Constraint("ebnf", "top ::= [a]"), "no grammar: No 'root' rule found"),
        (Constraint("ebnf", "root ::= other"), "no grammar: Rule 'other' not found"),
    ],
)
def test_what_is_no_constraint_at_all(constraint: Constraint, message: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(constraint)
    assert str(caught.value).startswith(message)


def test_white_space_is_that_of_written_json() -> None:
    value = schema({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}})
    document = {"a": [1, 2]}
    for indent in (None, 0, 2, 8):
        assert accepts(value, json.dumps(document, indent=indent))
    assert accepts(value, json.dumps(document, separators=(",", ":")))
    assert not accepts(value, '{"a": [1,  2]}')


def test_a_schema_can_t_change_how_it_is_kept_to() -> None:
    options = {"key_separator": "=", "whitespace_flexible": False, "whitespace_pattern": "x"}
    value = schema({"x-guidance": options, "type": "object", "additionalProperties": {"type": "null"}})
    assert accepts(value, '{"a": null}')
    assert not accepts(value, '{"a"=null}')


def test_matches_are_of_the_whole_answer() -> None:
    assert accepts(Constraint("regex", "a|bc"), "bc")
    assert not accepts(Constraint("regex", "a|bc"), "abc")
    assert accepts(Constraint("json_object"), '{"x": [true, "y"]}')
    assert not accepts(Constraint("json_object"), "[]")
    choices = ('say "no"', "a\\n", "tab\t", "🎉")
    for text in choices:
        assert accepts(Constraint("choice", choices=choices), text)
    assert not accepts(Constraint("choice", choices=choices), "a\n")
