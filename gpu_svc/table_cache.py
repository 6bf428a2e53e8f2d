"""Keeps measured tables from one start to the next: one file for each machine, model and set of limits.

A file is used only where all that it depends on is as it was. What changes without a trace there, a warm processor or a
busy neighbour, is what the planner's online calibration is for.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpu_svc.tables import Tables
from gpu_svc.wire import tables_from_json, tables_to_json

_FORMAT = 1
_DIGEST_CHARS = 24

logger = logging.getLogger(__name__)

Facts = Mapping[str, object]
"""What the tables depend on; values that JSON can hold."""


class TableCache:
    """A directory. Never raises for what is in it or for want of room: it is only there to save time."""

    def __init__(self, directory: Path, machine: Facts) -> None:
        """`machine`: facts that hold as long as the process runs."""
        self._directory = directory
        self._machine = machine

    def load(self, facts: Facts) -> Tables | None:
        """What was measured under the same facts; None where nothing usable was."""
        path, facts = self._path(facts), self._all(facts)
        try:
            document = json.loads(path.read_text())
            if document["format"] != _FORMAT or document["facts"] != facts:
                raise ValueError("it belongs to another machine, model or version")
            age = datetime.now(UTC) - datetime.fromisoformat(document["measured_at"])
            tables = tables_from_json(document["tables"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s is not used and will be overwritten: %s: %s", path, type(error).__name__, error)
            return None
        logger.info("operations were measured %s ago, see %s", timedelta(seconds=round(age.total_seconds())), path)
        return tables

    def store(self, facts: Facts, tables: Tables) -> None:
        """In the place of what was measured before."""
        path = self._path(facts)
        document = {
            "format": _FORMAT,
            "facts": self._all(facts),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "tables": tables_to_json(tables),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
                json.dump(document, file)
            os.replace(file.name, path)  # A reader sees the old file or the new one.
        except OSError as error:
            logger.warning("measured operations are not kept: %s", error)
            return
        logger.info("measured operations are kept in %s", path)

    def _path(self, facts: Facts) -> Path:
        text = json.dumps(self._all(facts), sort_keys=True)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}.json"

    def _all(self, facts: Facts) -> dict[str, object]:
        """As they come back from a file."""
        every = json.loads(json.dumps({**self._machine, **facts}))
        assert isinstance(every, dict)
        return every


def processor_name() -> str:
    """Model and features, which decide which kernel runs."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return "unknown"
    return "; ".join(line.partition(":")[2].strip() for line in lines if line.startswith(wanted))


def digest(paths: Iterable[Path]) -> str:
    """Of the files' contents, to tell one build of the kernels from the next."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.read_bytes())
    return total.hexdigest()
