"""What an epoch has to work with, and how the mode may be chosen; handed to the scheduler by the engine."""

from dataclasses import dataclass
from typing import Literal

from svc_common.plan import Tier

ModePolicy = Literal["auto", "gpu_only", "asymmetric", "same_layer", "decoupled"]
"""As PlannerConfig.mode: chosen each iteration, or forced."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of one epoch, from OpenEpoch of the executor."""

    gpu_blocks: int
    host_pools: tuple[int, ...]
    """Blocks of each host pool, by its number; 0 where its service is not attached. A sequence lies in one of them."""
    block_tokens: int
    max_sequences: int
    """That hold blocks at a time."""
    max_batch_tokens: int
    """That one iteration computes."""
    max_sequence_tokens: int
    """Prompt and answer together."""
    block_bytes: int
    """Of one block over all layers on the host: what moves when it is swapped."""
    has_cpu_layers: bool = False
    """Some layers of all sequences are the CPU's: none of them can then go at a pace of its own."""

    @property
    def host_blocks(self) -> int:
        """Of all pools."""
        return sum(self.host_pools)

    def most_blocks(self, tier: Tier) -> int:
        """That one sequence can have in a tier."""
        return self.gpu_blocks if tier is Tier.GPU else max(self.host_pools, default=0)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_tokens)
