"""[logging]."""

from pathlib import Path
from typing import Literal

from svc_common.config.types import Section


class LoggingConfig(Section):
    """What the services say of themselves on standard error. Prompts and answers are never in it."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or a JSON object a line."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least severe that is written."""
    access: bool = True
    """A line of planner_svc for each request that ended or was refused, with its tokens and latencies, and one of
    gateway_svc for each HTTP request."""
    dump_dir: Path | None = None
    """Where a service writes its state when nothing moves or on SIGUSR1, one file each time; default: the run directory
    of `neoflex up`, and elsewhere the log alone, which has it in any case."""
