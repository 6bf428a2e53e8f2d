"""What the service is asked for, as the choice of a policy needs it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests in hand, and what those of late were like on average."""

    num_sequences: int = 0
    """Accepted and not ended."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    computed_tokens: int = 0
    """Of those in hand, which a new epoch computes again."""
