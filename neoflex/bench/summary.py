"""What a run was like: latencies as percentiles, throughput, and the share that was in time."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from neoflex.bench.load import Sent
from neoflex.bench.record import Outcome, Record


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency, in seconds; linear between ranks."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values_s: Iterable[float]) -> "Percentiles | None":
        """None of nothing."""
        array = np.fromiter(values_s, np.float64)
        if not len(array):
            return None
        return cls(float(array.mean()), *(float(value) for value in np.percentile(array, (50, 90, 95, 99))))


@dataclass(frozen=True, slots=True)
class Targets:
    """When tokens should come, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one run. Latencies are those of finished requests."""

    load: str
    """How it was sent, in words."""
    level: float
    """Requests a second, or concurrent ones."""
    num_requests: int
    num_finished: int
    num_refused: int
    num_failed: int
    errors: dict[str, int]
    """Requests that did not finish, by what was said."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Of prompts and answers."""
    ttft: Percentiles | None
    tpot: Percentiles | None
    inter_token: Percentiles | None
    """From each piece of an answer to the next, over all answers."""
    end_to_end: Percentiles | None
    in_time: float | None = None
    """Share of all requests that met both targets, where there are targets."""
    goodput_per_s: float | None = None
    """Requests a second that met both."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(sent: Sent, load: str, level: float, targets: Targets | None) -> Summary:
    finished = [record for record in sent.records if record.outcome is Outcome.FINISHED]
    outcomes = Counter(record.outcome for record in sent.records)
    output_tokens = sum(record.output_tokens for record in finished)
    prompt_tokens = sum(record.prompt_tokens for record in finished)
    in_time = _num_in_time(sent.records, targets) if targets else None
    return Summary(
        load=load,
        level=level,
        num_requests=len(sent.records),
        num_finished=len(finished),
        num_refused=outcomes[Outcome.REFUSED],
        num_failed=outcomes[Outcome.FAILED],
        errors=dict(Counter(record.error for record in sent.records if record.error).most_common()),
        duration_s=sent.duration_s,
        requests_per_s=len(finished) / sent.duration_s,
        output_tokens_per_s=output_tokens / sent.duration_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) / sent.duration_s,
        ttft=Percentiles.of(record.ttft_s for record in finished),
        tpot=Percentiles.of(record.tpot_s for record in finished if record.tpot_s is not None),
        inter_token=Percentiles.of(gap for record in finished for gap in record.gaps_s),
        end_to_end=Percentiles.of(record.end_to_end_s for record in finished),
        in_time=None if in_time is None else in_time / len(sent.records),
        goodput_per_s=None if in_time is None else in_time / sent.duration_s,
    )


def _num_in_time(records: list[Record], targets: Targets) -> int:
    return sum(record.is_in_time(targets.ttft_s, targets.tpot_s) for record in records)
