"""An iteration as four lanes that work side by side: GPU, CPU, and the link each way."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds in which each lane works; the rest of the iteration is its bubble."""

    total_s: float
    gpu_s: float
    cpu_s: float
    link_out_s: float
    """From the GPU to the host."""
    link_in_s: float

    @property
    def gpu_bubble_s(self) -> float:
        """Waiting for the CPU or the link, and the iteration's fixed cost."""
        return self.total_s - self.gpu_s

    @property
    def cpu_bubble_s(self) -> float:
        return self.total_s - self.cpu_s
