"""Lines of text and of JSON, and what goes with them: the request, the span, the caller's own values."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext
from support.stacks import own_environment

from svc_common.config import LoggingConfig
from svc_common.logs import CONTEXT, JsonFormatter, TextFormatter, configure_logging, fields, log_about, refuse_start


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, left as it was."""
    root = logging.getLogger()
    before, level, hook = root.handlers[:], root.level, sys.excepthook
    yield root
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook = hook


def record_of(text: str, **values: object) -> logging.LogRecord:
    record = logging.getLogger("some.module").makeRecord(
        "some.module", logging.INFO, "file.py", 1, "%s", (text,), None, extra=fields(**values)
    )
    CONTEXT.filter(record)
    return record


def test_text_says_what_goes_with_it() -> None:
    line = TextFormatter("planner_svc").format(record_of("request finished", tokens=3, ttft_s=0.12345678, slo_met=None))
    assert line.partition(" planner_svc ")[2] == "INFO request finished tokens=3 ttft_s=0.123457"


def test_a_callers_id_cannot_pass_for_more_than_it_is() -> None:
    forged = 'x\n2026-01-01 00:00:00,000 planner_svc INFO stopped key="y" a=b'
    line = TextFormatter("planner_svc").format(record_of("request refused", request_id=forged))
    assert "\n" not in line
    assert line.endswith(f"request_id={json.dumps(forged)}")


def test_json_is_one_object_a_line() -> None:
    try:
        raise ValueError("not so")
    except ValueError:
        record = record_of("two\nlines", tokens=3)
        record.exc_info = sys.exc_info()
    line = JsonFormatter("gpu_svc").format(record)
    assert "\n" not in line
    values = json.loads(line)
    assert values.pop("exception").endswith("ValueError: not so")
    assert values.pop("time").endswith("Z")
    assert values == {
        "level": "INFO",
        "service": "gpu_svc",
        "logger": "some.module",
        "message": "two\nlines",
        "tokens": 3,
    }


async def test_each_task_has_its_own_request() -> None:
    async def handle(request_id: str) -> str:
        log_about(request_id)
        await asyncio.sleep(0)
        return str(vars(record_of("taken up"))["request_id"])

    assert await asyncio.gather(handle("a"), handle("b")) == ["a", "b"]
    assert "request_id" not in vars(record_of("nobody's"))
    log_about("a")
    assert vars(record_of("of another", request_id="b"))["request_id"] == "b"


def test_the_current_span_is_told() -> None:
    span = NonRecordingSpan(SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False))
    with trace.use_span(span):
        record = record_of("within")
    assert (vars(record)["trace_id"], vars(record)["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert "trace_id" not in vars(record_of("without"))


def test_what_is_less_severe_is_left_out(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("planner_svc", LoggingConfig(format="json", level="WARNING"))
    logging.getLogger("some").info("fine")
    logging.getLogger("uvicorn.error").warning("not so", extra={"color_message": "?"})
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "not so"
    assert "color_message" not in json.loads(line)


def test_a_process_that_ends_with_an_exception_says_so_in_the_same_form() -> None:
    script = (
        "from svc_common.config import LoggingConfig\n"
        "from svc_common.logs import configure_logging\n"
        "configure_logging('gpu_svc', LoggingConfig(format='json'))\n"
        "import warnings; warnings.warn('old')\n"
        "raise KeyError('gone')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=own_environment()
    )
    assert ended.returncode == 1
    warned, died = map(json.loads, ended.stderr.splitlines())
    assert (warned["level"], warned["logger"]) == ("WARNING", "py.warnings")
    assert (died["level"], died["message"]) == ("CRITICAL", "ends with an exception")
    assert died["exception"].endswith("KeyError: 'gone'")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_start_that_cannot_be_ends_with_one_line_of_the_logs_form(
    form: str, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("planner_svc", LoggingConfig.model_validate({"format": form}))
    with pytest.raises(SystemExit) as ended:
        refuse_start("planner_svc", "planner.listen: taken")
    assert ended.value.code == 2
    line = capsys.readouterr().err
    if form == "text":
        assert line == "planner_svc: planner.listen: taken\n"
    else:
        values = json.loads(line)
        assert (values["service"], values["level"], values["message"]) == (
            "planner_svc",
            "CRITICAL",
            "planner.listen: taken",
        )
