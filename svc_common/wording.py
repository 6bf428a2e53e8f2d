"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """ "1 request", "1,200 requests"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(number: int) -> str:
    """How often: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def as_long(ratio: float) -> str:
    """How much longer something takes: "1.23 times as long", or "about as long" where that many digits show nothing."""
    text = f"{ratio:.3g}"
    return "about as long" if text == "1" else f"{text} times as long"
