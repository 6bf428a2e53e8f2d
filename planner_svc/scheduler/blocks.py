"""Which KV blocks of one tier are free. The planner owns this; workers obey the ids."""

from collections.abc import Iterable


class BlockAllocator:
    """Hands out the blocks 0 .. num_blocks - 1, the last freed first: its memory is the likeliest to be warm."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Raises ValueError where fewer are free: callers look first."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked of {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Raises ValueError for a block that is free already."""
        for block in blocks:
            if self._is_free[block]:
                raise ValueError(f"block {block} is free already")
            self._is_free[block] = 1
            self._free.append(block)
