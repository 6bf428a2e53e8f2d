"""Numbers in sentences."""

from svc_common.wording import as_long, counted, times


def test_one_and_many() -> None:
    assert [counted(number, "request") for number in (0, 1, 2, 1200)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "1,200 requests",
    ]
    assert [times(number) for number in (0, 1, 2, 3, 1000)] == ["0 times", "once", "twice", "3 times", "1,000 times"]


def test_what_takes_longer() -> None:
    assert [as_long(ratio) for ratio in (1.0, 1.004, 1.006, 20.04)] == [
        "about as long",
        "about as long",
        "1.01 times as long",
        "20 times as long",
    ]
