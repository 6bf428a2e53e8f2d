"""What the `neoflex` command did, for tests of it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Run = Callable[..., Ended]
