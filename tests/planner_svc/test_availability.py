"""What callers are told while there is no executor, by a clock that the test sets."""

import grpc
import pytest

from planner_svc import availability as availability_module
from planner_svc.availability import Availability
from svc_common.errors import ServiceError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(availability_module, "time", clock)
    return clock


def refusal(availability: Availability) -> tuple[grpc.StatusCode, str, str, float | None]:
    with pytest.raises(ServiceError) as caught:
        availability.check()
    error = caught.value
    return error.code, error.reason, error.text, error.retry_after_s


def test_callers_come_back_after_as_long_as_it_took_the_last_time(clock: Clock) -> None:
    availability = Availability()
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert refusal(availability) == (unavailable, "LOADING", "the model is being loaded", 1.0)
    clock.now_s += 12.0
    availability.open()
    availability.check()
    clock.now_s += 1000.0
    availability.close()
    text = "the executor was lost and is awaited"
    assert refusal(availability) == (unavailable, "EXECUTOR_LOST", text, 12.0)
    clock.now_s += 5.0
    availability.close()  # Given up: nothing new.
    assert refusal(availability)[3] == 7.0
    clock.now_s += 60.0
    assert refusal(availability)[3] == 1.0
    availability.open()
    availability.close()
    assert refusal(availability)[3] == 30.0  # It took 65 s.


def test_trouble_is_told_until_it_is_over_and_is_news_once(clock: Clock) -> None:
    availability = Availability()
    assert availability.explain("no room")
    assert not availability.explain("no room")
    assert refusal(availability)[2] == "the model is being loaded: no room"
    assert availability.explain("another model")
    assert availability.explain("")
    assert refusal(availability)[2] == "the model is being loaded"
    assert availability.explain("no room")
    availability.open()
    availability.close()
    assert refusal(availability)[2] == "the executor was lost and is awaited"


def test_who_drains_says_so_open_or_not(clock: Clock) -> None:
    availability = Availability()
    availability.open()
    availability.is_draining = True
    assert refusal(availability) == (
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        "the server is shutting down",
        1.0,
    )
    availability.close()
    assert refusal(availability)[1] == "DRAINING"
