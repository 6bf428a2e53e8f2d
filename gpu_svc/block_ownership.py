"""Which blocks of a tier are owned, as the plans say. Decides nothing; catches contradictions."""

import numpy as np

from gpu_svc.limits import Int32Array, InvalidPlanError
from svc_common.plan import Tier


class BlockOwnership:
    """One tier's blocks."""

    def __init__(self, tier: Tier, num_blocks: int) -> None:
        self._tier = tier.name.lower()
        self._owned = np.zeros(num_blocks, np.bool_)
        self.num_used = 0

    def claim(self, blocks: Int32Array, sequence_id: int) -> None:
        """Raises InvalidPlanError where a block does not exist, is owned, or is listed twice."""
        if not len(blocks):
            return
        low, high = int(blocks.min()), int(blocks.max())
        if low < 0 or high >= len(self._owned):
            raise InvalidPlanError(
                f"sequence {sequence_id} gets {self._tier} blocks {low} to {high}; there are {len(self._owned)}"
            )
        taken = blocks[self._owned[blocks]]
        if len(taken):
            raise InvalidPlanError(f"sequence {sequence_id} gets {self._tier} blocks owned already: {taken.tolist()}")
        if len(np.unique(blocks)) != len(blocks):
            raise InvalidPlanError(f"sequence {sequence_id} gets a {self._tier} block twice: {blocks.tolist()}")
        self._owned[blocks] = True
        self.num_used += len(blocks)

    def release(self, blocks: Int32Array) -> None:
        """Blocks must be owned."""
        self._owned[blocks] = False
        self.num_used -= len(blocks)
