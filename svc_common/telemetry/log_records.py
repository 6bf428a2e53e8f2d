"""The services' log, as it is, over OTLP: each record with the trace it belongs to."""

import logging
import traceback

from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.context import get_current
from opentelemetry.util.types import AnyValue

_OWN = "opentelemetry"
_SEVERITIES = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
    logging.ERROR: SeverityNumber.ERROR,
    logging.CRITICAL: SeverityNumber.FATAL,
}
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class OtlpHandler(logging.Handler):
    """Beside the one that writes to standard error. The SDK's own records stay out: sending them would make more."""

    def __init__(self, logger: Logger) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] == _OWN:
            return
        attributes: dict[str, AnyValue] = {
            "logger.name": record.name,
            "code.function.name": record.funcName,
            "code.line.number": record.lineno,
            # What a caller of `logging` gave as `extra`.
            **{key: item for key, item in vars(record).items() if key not in _STANDARD and _is_plain(item)},
        }
        if record.exc_info and record.exc_info[0] is not None:
            attributes["exception.type"] = record.exc_info[0].__name__
            attributes["exception.message"] = str(record.exc_info[1])
            attributes["exception.stacktrace"] = "".join(traceback.format_exception(*record.exc_info))
        self._logger.emit(
            LogRecord(
                timestamp=int(record.created * 1e9),
                context=get_current(),
                severity_text=record.levelname,
                severity_number=_SEVERITIES.get(record.levelno, SeverityNumber.UNSPECIFIED),
                body=record.getMessage(),
                attributes=attributes,
            )
        )


def _is_plain(item: object) -> bool:
    return isinstance(item, str | int | float | bool)
