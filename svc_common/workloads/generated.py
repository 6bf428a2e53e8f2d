"""Workloads made from a line of text, which need no file: `poisson:requests=500,prompt=1000,output=100`.

Arrivals: `poisson`, `regular` (even gaps) or `gamma` (gaps with a coefficient of variation `cv`: above 1 they come in
bunches). Lengths in tokens: `N`, `LOW-HIGH` (uniform, both included) or `MEAN~SIGMA` (log-normal with that mean; sigma
of its logarithm). `class=chat*3/batch` names service classes, drawn with the weight after `*`, or 1. The same text
gives the same requests.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from svc_common.workloads.workload import Arrival, InputError, Workload

PROCESSES = ("poisson", "regular", "gamma")
_DEFAULTS = {"requests": "1000", "prompt": "1000", "output": "100", "seed": "0", "class": "", "cv": "3"}
_MOST_REQUESTS = 10_000_000
_MOST_TOKENS = 10_000_000
_MOST_SIGMA = 5.0
_MOST_CV = 100.0
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e3
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Fields:
    """The keys of one text; messages name them."""

    text: str
    values: dict[str, str]

    def number(self, key: str, lowest: float, highest: float) -> float:
        return self.checked(key, self.values[key], lowest, highest)

    def count(self, key: str, lowest: int, highest: int, text: str | None = None) -> int:
        value = self.checked(key, self.values[key] if text is None else text, lowest, highest)
        if value != int(value):
            raise self.error(key, f"must be a whole number, is {value:g}")
        return int(value)

    def checked(self, key: str, text: str, lowest: float, highest: float) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.error(key, f"must be a number, is {text!r}") from None
        if not lowest <= value <= highest:
            raise self.error(key, f"must be from {lowest:g} to {highest:g}, is {text}")
        return value

    def error(self, key: str, what: str) -> InputError:
        return InputError(f"--workload {self.text}: {key}: {what}")


def is_generated(text: str) -> bool:
    """Whether it asks for a generated workload rather than a file."""
    return text.partition(":")[0] in PROCESSES


def generate(text: str, limit: int | None = None) -> Workload:
    """The first `limit` requests, arriving at one a second on average. Raises InputError."""
    process, _, keys = text.partition(":")
    fields = _Fields(text, _parse(text, process, keys))
    draw = random.Random(fields.count("seed", 0, _MOST_SEED))
    gap_s = _gap(process, fields, draw)
    prompt, output = (_length(fields, key, draw) for key in ("prompt", "output"))
    num_requests, class_name = fields.count("requests", 1, _MOST_REQUESTS), _class_name(fields)
    at_s, arrivals = 0.0, []
    for _ in range(min(num_requests, limit or num_requests)):
        arrivals.append(Arrival(at_s, prompt(), output(), class_name()))
        at_s += gap_s()
    return Workload(text, arrivals, None)


def _parse(text: str, process: str, keys: str) -> dict[str, str]:
    known = [key for key in _DEFAULTS if key != "cv" or process == "gamma"]
    values = {key: _DEFAULTS[key] for key in known}
    given: set[str] = set()
    for item in filter(None, keys.split(",")):
        key, separator, value = item.partition("=")
        if not separator or key not in known or key in given:
            raise InputError(
                f"--workload {text}: {item!r} must be KEY=VALUE, each key once, of the keys {', '.join(known)}"
            )
        given.add(key)
        values[key] = value
    return values


def _gap(process: str, fields: _Fields, draw: random.Random) -> Callable[[], float]:
    """Seconds to the next request, 1 on average."""
    if process == "regular":
        return lambda: 1.0
    if process == "poisson":
        return lambda: draw.expovariate(1.0)
    variance = fields.number("cv", 0.01, _MOST_CV) ** 2
    return lambda: draw.gammavariate(1 / variance, variance)


def _class_name(fields: _Fields) -> Callable[[], str]:
    """Of the next request. Drawn apart from the rest, which is the same with any classes."""
    names, weights = [], []
    for item in fields.values["class"].split("/"):
        name, _, weight = item.partition("*")
        names.append(name)
        weights.append(fields.checked("class", weight or "1", _LEAST_WEIGHT, _MOST_WEIGHT))
    draw = random.Random(fields.count("seed", 0, _MOST_SEED))
    return lambda: draw.choices(names, weights)[0]


def _length(fields: _Fields, key: str, draw: random.Random) -> Callable[[], int]:
    """Tokens of the next prompt or output; none beyond the largest length."""
    text = fields.values[key]
    if "~" in text:
        mean_text, _, sigma_text = text.partition("~")
        mean = fields.checked(key, mean_text, 1, _MOST_TOKENS)
        sigma = fields.checked(key, sigma_text, 0, _MOST_SIGMA)
        location = math.log(mean) - sigma**2 / 2
        return lambda: min(_MOST_TOKENS, max(1, round(draw.lognormvariate(location, sigma))))
    if "-" in text.lstrip("-"):
        low, high = (fields.count(key, 1, _MOST_TOKENS, bound) for bound in text.split("-", 1))
        if low > high:
            raise fields.error(key, f"the lower bound {low} is above the upper one, {high}")
        return lambda: draw.randint(low, high)
    tokens = fields.count(key, 1, _MOST_TOKENS)
    return lambda: tokens
