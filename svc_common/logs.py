"""How every service logs: text or JSON on standard error, each line with the request that it is about.

    configure_logging("planner_svc", config.logging)
    log_about("req-1")
    logger.info("taken up", extra=fields(prompt_tokens=12))

A line about a request never holds its prompt or its answer.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import NoReturn

from svc_common.config import LoggingConfig

Source = Callable[[], Mapping[str, object]]
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def log_about(request_id: str) -> None:
    """What this task logs from here on is about that request."""
    _request_id.set(request_id)


def fields(**values: object) -> dict[str, object]:
    """For `extra` of a call: what goes with its message by name. None stands for nothing to tell."""
    return {name: value for name, value in values.items() if value is not None}


def _of_request() -> Mapping[str, object]:
    request_id = _request_id.get()
    return {"request_id": request_id} if request_id else {}


def _of_span() -> Mapping[str, object]:
    """Of OpenTelemetry's current span, where this process has OpenTelemetry at all."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


class ContextFilter(logging.Filter):
    """Gives each record what its task knows: attributes of the record, as if they came as `extra`, which win."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Source] = [_of_request, _of_span]
        """May be added to."""

    def filter(self, record: logging.LogRecord) -> bool:
        for source in self.sources:
            vars(record).update({name: value for name, value in source().items() if not hasattr(record, name)})
        return True


CONTEXT = ContextFilter()
_OWN_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


def _context(record: logging.LogRecord) -> dict[str, object]:
    """What goes with a record."""
    return {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


class TextFormatter(logging.Formatter):
    """Time, service, level, text, and `name=value` for what goes with it."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging names it
        values = "".join(f" {name}={_plain(value)}" for name, value in _context(record).items())
        return super().formatMessage(record) + values


def _plain(value: object) -> str:
    """In quotes where it would not be read as one word, so that a caller's id can't pass for more than it is."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_word = text.isprintable() and not any(character in ' "=' for character in text) and text
    return text if is_word else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, service, logger, message, what goes with it, and the exception, if any."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            **_context(record),
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


def configure_logging(service: str, config: LoggingConfig) -> None:
    """Sends what this process logs, warnings and its last exception included, to standard error in one form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(service) if config.format == "json" else TextFormatter(service))
    handler.addFilter(CONTEXT)
    logging.basicConfig(level=config.level, handlers=[handler], force=True)
    logging.captureWarnings(True)

    def log_last_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logging.getLogger(service).critical("ends with an exception", exc_info=(kind, error, trace))

    sys.excepthook = log_last_exception


def refuse_start(service: str, text: str) -> NoReturn:
    """Ends a process that can't serve, with exit code 2: one plain line, or an object where the log is of objects."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger(service).critical("%s", text)
    else:
        print(f"{service}: {text}", file=sys.stderr)
    raise SystemExit(2)
