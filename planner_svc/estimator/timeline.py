"""How long each of four lanes works that run side by side: GPU, CPU, and the link each way."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds in which each lane works, in one iteration or in many; the rest of `total_s` are its bubbles."""

    total_s: float = 0.0
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    link_out_s: float = 0.0
    """From the GPU to the host."""
    link_in_s: float = 0.0

    def __add__(self, other: "Timeline") -> "Timeline":
        """One after the other."""
        return Timeline(
            self.total_s + other.total_s,
            self.gpu_s + other.gpu_s,
            self.cpu_s + other.cpu_s,
            self.link_out_s + other.link_out_s,
            self.link_in_s + other.link_in_s,
        )
