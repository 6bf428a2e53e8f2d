"""What a check of the machine or of the configuration's files found."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    """It runs, slower or less than it could."""
    PROBLEM = "problem"
    """It will not start, or not do what the configuration says."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    topic: str
    found: str
    advice: str = ""
