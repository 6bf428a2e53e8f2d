"""The timeline of an iteration whose first layers the CPU computes; pure arithmetic over seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """What one sub-batch takes on either processor, over all layers that it passes there."""

    cpu_prompts_s: float = 0.0
    """Prompts in the CPU layers, where the GPU goes on with them in layers that are the CPU's for decodes."""
    cpu_last_s: float = 0.0
    """Decodes in the CPU layers, and prompts where these have as many."""
    gpu_prompts_s: float = 0.0
    """Prompts in those layers on the GPU."""
    gpu_upper_s: float = 0.0
    """All of it in the layers above, waits for attention on the CPU included."""


@dataclass(frozen=True, slots=True)
class LayersTimeline:
    gpu_s: float
    """The GPU's work."""
    wait_s: float
    """In which the GPU waits for the CPU layers."""
    cpu_s: float
    """The CPU layers."""

    @property
    def overlap_s(self) -> float:
        """In which both work."""
        return max(0.0, self.cpu_s - self.wait_s)


def timeline(first: PassSeconds, second: PassSeconds) -> LayersTimeline:
    """As gpu_svc/pipeline.py runs it: all is handed over at once, prompts pass the CPU first.

    The CPU: prompts of 0, prompts of 1, decodes of 0, decodes of 1. The GPU: prompts of 0 and 1 in their layers, each
    when it is through the CPU's; then either sub-batch in the upper layers, one without work for the CPU first.
    """
    batches = (first, second)
    cpu_s = gpu_end_s = 0.0
    for batch in batches:
        cpu_s += batch.cpu_prompts_s
        gpu_end_s = max(gpu_end_s, cpu_s if batch.cpu_prompts_s else 0.0) + batch.gpu_prompts_s
    ready = []
    for batch in batches:
        cpu_s += batch.cpu_last_s
        ready.append((cpu_s if batch.cpu_last_s else 0.0, batch))
    if second.cpu_last_s == 0 and second.gpu_upper_s > 0:
        ready.reverse()
    for ready_s, batch in ready:
        gpu_end_s = max(gpu_end_s, ready_s) + batch.gpu_upper_s
    gpu_s = sum(batch.gpu_prompts_s + batch.gpu_upper_s for batch in batches)
    return LayersTimeline(gpu_s, gpu_end_s - gpu_s, cpu_s)
