"""What is drawn under a grammar matches it, whatever the logits prefer: judged by jsonschema and by re."""

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from support.schemas import SCHEMAS

from gpu_svc.grammars import Grammars
from gpu_svc.limits import InvalidPlanError
from gpu_svc.sampling import sample
from gpu_svc.sampling_table import SamplingTable
from planner_svc.constraints import Constraint, grammar_of
from svc_common.model.store import ModelFiles
from svc_common.model.tokenizer import Tokenizer, load_tokenizer, tokenizer_json
from svc_common.plan import NewSequence, Sampling, Tier

END = 2
MAX_TOKENS = 200
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "ipv6"])


@FORMATS.checks("date", ValueError)
def is_date(text: object) -> bool:
    """In any year: a grammar knows months, not leap years, and has a year 0."""
    return bool(datetime.date.fromisoformat("2024" + str(text)[4:]))


@FORMATS.checks("date-time", ValueError)
def is_date_time(text: object) -> bool:
    """With leap seconds in any minute, as RFC 3339 has them."""
    return bool(datetime.datetime.fromisoformat("2024" + str(text)[4:].replace(":60", ":59").upper()))


@pytest.fixture(scope="module")
def tokenizer(default_model: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_model)


@pytest.fixture(scope="module")
def grammars(default_model: ModelFiles) -> Iterator[Grammars]:
    made = Grammars(lambda: LLTokenizer(tokenizer_json(default_model), eos_token=[END]), [END])
    yield made
    made.close()


@pytest.fixture(scope="module")
def logits(tokenizer: Tokenizer) -> torch.Tensor:
    """[vocab_size]: of a model that knows no grammar and likes short tokens, so that answers come to an end."""
    lengths = torch.tensor([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    drawn = torch.randn(tokenizer.vocab_size, generator=torch.Generator().manual_seed(5)) - lengths
    drawn[[tokenizer.encode(text)[0] for text in ('"', "}", "]", "0")]] += 4
    drawn[END] = 6
    return drawn


class Answers:
    """Draws answers under grammars, one row of the batch each, without a model."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer, logits: torch.Tensor) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._logits = logits

    def table(self, requests: Sequence[Sampling], answers: Sequence[Sequence[int]] = ()) -> SamplingTable:
        """Each request has the slot of its number; `answers` are what was drawn before, where anything was."""
        table = SamplingTable(len(requests), len(self._logits), self._grammars)
        for slot, sampling in enumerate(requests):
            drawn = answers[slot] if answers else ()
            new = NewSequence(slot, (0, *drawn), Tier.GPU, (), sampling, len(drawn))
            table.insert(slot, new, np.array(new.token_ids, np.int32))
        return table

    def step(self, table: SamplingTable, slots: np.ndarray) -> np.ndarray:
        rows = self._logits.repeat(len(slots), 1)
        tokens = sample(rows, table.rows(slots), table.changes(slots)).tokens
        assert table.failures(slots) == {}
        table.take_tokens(slots, tokens)
        return tokens

    def tokens(self, requests: Sequence[Sampling], num_tokens: int = MAX_TOKENS) -> list[list[int]]:
        """Answers without their end; those that have not ended after `num_tokens` are cut."""
        table, answers, slots = self.table(requests), [[] for _ in requests], np.arange(len(requests))
        for _ in range(num_tokens):
            tokens = self.step(table, slots)
            for slot, token in zip(slots, tokens.tolist(), strict=True):
                answers[slot].append(token)
            slots = slots[tokens != END]
            if not len(slots):
                break
        return answers

    def texts(self, requests: Sequence[Sampling]) -> list[str]:
        answers = self.tokens(requests)
        assert all(answer[-1] == END for answer in answers)
        return [self._tokenizer.decode(answer) for answer in answers]


@pytest.fixture(scope="module")
def answers(grammars: Grammars, tokenizer: Tokenizer, logits: torch.Tensor) -> Answers:
    return Answers(grammars, tokenizer, logits)


def drawn_under(constraint: Constraint, seeds: range) -> list[Sampling]:
    grammar = grammar_of(constraint)
    return [Sampling(temperature=1.0, seed=seed, grammar=grammar) for seed in seeds]


def test_every_answer_validates_against_its_schema(answers: Answers) -> None:
    seeds = range(3)
    requests = [
        sampling
        for schema in SCHEMAS.values()
        for sampling in drawn_under(Constraint("json_schema", json.dumps(schema)), seeds)
    ]
    texts = iter(answers.texts(requests))
    assert len(SCHEMAS) >= 40
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        for _ in seeds:
            text = next(texts)
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert errors == [], f"{name}: {text}"


def test_json_objects(answers: Answers) -> None:
    for text in answers.texts(drawn_under(Constraint("json_object"), range(4))):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", ["[a-c]{2,4}(x|yz)?", r"\d{3}-\d{4}", "(foo|bar)+!", "[^a]{3}", "^anchored$"])
def test_regular_expressions(answers: Answers, pattern: str) -> None:
    for text in answers.texts(drawn_under(Constraint("regex", pattern), range(6))):
        assert re.fullmatch(pattern, text)


def test_choices(answers: Answers) -> None:
    choices = ("yes", "no", "no, never", 'quo"te', "back\\slash", "line\nbreak", "naïve 🎉", "/slash/", "\ttab")
    texts = answers.texts(drawn_under(Constraint("choice", choices=choices), range(40)))
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 1


def test_ebnf(answers: Answers) -> None:
    grammar = """
    # sums of products
    root ::= term ("+" term){0,2}
    term ::= factor ("*" factor)?
    factor ::= [0-9] | "(" root ")"
    """
    for text in answers.texts(drawn_under(Constraint("ebnf", grammar), range(6))):
        assert re.fullmatch(r"[0-9+*()]+", text)
        assert isinstance(eval(text), int)  # What a grammar of sums allows is arithmetic.


def test_a_recomputed_answer_goes_on_as_it_would_have(answers: Answers) -> None:
    schema = json.dumps(SCHEMAS["what a program asks for"])
    requests = drawn_under(Constraint("json_schema", schema), range(4))
    whole = answers.tokens(requests)
    for cut in (1, 5, 11):
        begun = [answer[:cut] for answer in whole]
        table, slots = answers.table(requests, begun), np.arange(len(requests))
        for number in range(cut, cut + 4):
            going_on = np.array([number < len(answer) for answer in whole])
            if not going_on.any():
                break
            tokens = answers.step(table, slots[going_on])
            assert tokens.tolist() == [answer[number] for answer in whole if number < len(answer)]


def test_neighbours_without_a_grammar_are_drawn_as_alone(answers: Answers) -> None:
    plain = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    [constrained] = drawn_under(Constraint("regex", "[xyz]{3}"), range(1))
    together = answers.tokens([plain[0], constrained, *plain[1:]], 5)
    alone = answers.tokens(plain, 5)
    assert [together[0], *together[2:]] == alone


def test_after_its_end_only_end_tokens_follow(answers: Answers) -> None:
    [request] = drawn_under(Constraint("choice", choices=("a",)), range(1))
    table, slots = answers.table([request]), np.array([0])
    drawn = [int(answers.step(table, slots)[0]) for _ in range(4)]
    assert drawn[1:] == [END] * 3  # The planner learns of an end one iteration late.


def test_a_grammar_that_no_token_continues_fails_by_name() -> None:
    grammars = Grammars(lambda: LLTokenizer("byte", eos_token=[256]), [3])
    try:
        table = SamplingTable(2, 150, grammars)  # A model that lacks tokens that the tokenizer has.
        sampling = Sampling(grammar=grammar_of(Constraint("choice", choices=("é",))))
        table.insert(1, NewSequence(7, (0,), Tier.GPU, (), sampling), np.zeros(1, np.int32))
        slots = np.array([1])
        tokens = sample(torch.zeros(1, 150), table.rows(slots), table.changes(slots)).tokens
        assert tokens.tolist() == [3]
        assert table.failures(slots) == {1: "no token of the model continues the answer"}
    finally:
        grammars.close()


def test_a_tokenizer_that_can_t_be_read_fails_those_with_a_grammar_alone() -> None:
    def load() -> LLTokenizer:
        raise OSError("no such file")

    grammars = Grammars(load, [3])
    try:
        table = SamplingTable(2, 20, grammars)
        for slot, sampling in enumerate((Sampling(grammar="{}"), Sampling())):
            table.insert(slot, NewSequence(slot, (0,), Tier.GPU, (), sampling), np.zeros(1, np.int32))
        slots = np.arange(2)
        tokens = sample(torch.arange(20.0).repeat(2, 1), table.rows(slots), table.changes(slots)).tokens
        assert tokens.tolist() == [3, 19]
        assert table.failures(slots) == {0: "no grammar can be kept to with the model's tokenizer: no such file"}
    finally:
        grammars.close()


def test_without_grammars_a_sequence_with_one_is_refused() -> None:
    table = SamplingTable(1, 10, None)
    new = NewSequence(3, (0,), Tier.GPU, (), Sampling(grammar="{}"))
    with pytest.raises(InvalidPlanError, match="sequence 3 has a grammar"):
        table.insert(0, new, np.zeros(1, np.int32))


def test_slots_are_used_again(answers: Answers) -> None:
    first, second = (drawn_under(Constraint("choice", choices=(text,)), range(1))[0] for text in ("one", "two"))
    table, slots = answers.table([first]), np.array([0])
    one = partial(answers.step, table, slots)
    one()
    table.release(0)
    table.insert(0, NewSequence(9, (0,), Tier.GPU, (), second), np.zeros(1, np.int32))
    drawn = [int(one()[0]) for _ in range(4)]
    assert answers._tokenizer.decode(drawn) == "two"
