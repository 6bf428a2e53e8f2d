"""How much the CPU works beside the executor, iteration by iteration; CoreController decides by it."""

from dataclasses import dataclass

_BUSY = 0.5
"""Share of the iterations' time. A CPU that works less does not hold back the sequences that were left out."""
_LEFT_OUT = 0.1
"""Share of the host's sequences."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One iteration."""

    total_s: float
    cpu_wait_s: float
    """The executor waited for attention on the CPU."""
    cpu_attention_s: float
    """The CPU attended."""
    cpu_tokens: int
    """Context tokens attended on the CPU."""
    num_attended: int
    """Sequences with their KV on the host that were in it."""
    num_left_out: int
    """Sequences with their KV on the host that were not."""


@dataclass(slots=True)
class Window:
    """Sums over iterations with attention on the CPU."""

    start_s: float
    num_iterations: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_attended: int = 0
    num_left_out: int = 0

    def add(self, sample: Sample) -> None:
        self.num_iterations += 1
        self.total_s += sample.total_s
        self.wait_s += sample.cpu_wait_s
        self.cpu_s += sample.cpu_attention_s
        self.num_tokens += sample.cpu_tokens
        self.num_attended += sample.num_attended
        self.num_left_out += sample.num_left_out

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.total_s

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.total_s

    @property
    def hidden_share(self) -> float:
        """Seconds of attention that were not waited for, to a second of the executor's own work; 0 to 1."""
        own_s = self.total_s - self.wait_s
        return min(1.0, max(0.0, (self.cpu_s - self.wait_s) / own_s)) if own_s > 0 else 1.0

    @property
    def leaves_out(self) -> bool:
        """The CPU is too slow for sequences that could use it."""
        is_busy = self.cpu_share >= _BUSY
        return is_busy and self.num_left_out > _LEFT_OUT * (self.num_attended + self.num_left_out)

    @property
    def tokens_per_s(self) -> float:
        """Attended in a second of the executor: what more threads are to raise."""
        return self.num_tokens / self.total_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Attended in a second of attention: how fast the threads are."""
        return self.num_tokens / self.cpu_s
