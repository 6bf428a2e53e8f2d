"""Which blocks of a tier are owned, as the plans say. Decides nothing; catches contradictions."""

import numpy as np

from gpu_svc.limits import Int32Array, InvalidPlanError
from svc_common.plan import Tier


class BlockOwnership:
    """One tier's blocks."""

    def __init__(self, tier: Tier, num_blocks: int) -> None:
        self._tier = tier.name.lower()
        self._owners = np.zeros(num_blocks, np.int32)
        self.num_used = 0
        """Blocks with an owner."""

    def claim(self, blocks: Int32Array, sequence_id: int, num_shared: int = 0) -> int:
        """One owner more for each. The first `num_shared` may have others. Returns how many had none.

        Raises InvalidPlanError where a block does not exist, is owned and not to be shared, or is listed twice.
        """
        if not len(blocks):
            return 0
        low, high = int(blocks.min()), int(blocks.max())
        if low < 0 or high >= len(self._owners):
            raise InvalidPlanError(
                f"sequence {sequence_id} gets {self._tier} blocks {low} to {high}; there are {len(self._owners)}"
            )
        alone = blocks[num_shared:]
        taken = alone[self._owners[alone] > 0]
        if len(taken):
            raise InvalidPlanError(f"sequence {sequence_id} gets {self._tier} blocks owned already: {taken.tolist()}")
        if len(np.unique(blocks)) != len(blocks):
            raise InvalidPlanError(f"sequence {sequence_id} gets a {self._tier} block twice: {blocks.tolist()}")
        num_new = int(np.count_nonzero(self._owners[blocks] == 0))
        self._owners[blocks] += 1
        self.num_used += num_new
        return num_new

    def release(self, blocks: Int32Array) -> int:
        """One owner less for each, which must be owned. Returns how many have none now."""
        self._owners[blocks] -= 1
        num_free = int(np.count_nonzero(self._owners[blocks] == 0))
        self.num_used -= num_free
        return num_free
