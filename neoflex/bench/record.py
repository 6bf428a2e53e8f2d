"""One request as its client saw it."""

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    FINISHED = "finished"
    REFUSED = "refused"
    """The server had too much to do and said so."""
    FAILED = "failed"


@dataclass(slots=True)
class Record:
    """Times are seconds of the client's clock; what no token reached has none."""

    due_s: float
    """When it was to be sent. Latencies count from here: a client that lags must not flatter the server."""
    prompt_tokens: int
    piece_s: list[float] = field(default_factory=list)
    """When each piece of the answer came; a piece holds one token or more."""
    output_tokens: int = 0
    outcome: Outcome = Outcome.FAILED
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.due_s

    @property
    def end_to_end_s(self) -> float:
        return self.piece_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time from each token to the next; None where there is no next."""
        if self.output_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """From each piece to the next."""
        return [later - earlier for earlier, later in zip(self.piece_s, self.piece_s[1:], strict=False)]

    def is_in_time(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it finished within both targets."""
        if self.outcome is not Outcome.FINISHED or self.ttft_s > ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= tpot_s
