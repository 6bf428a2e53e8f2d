"""Which KV blocks of the GPU or of a host pool are free. The planner owns this; workers obey the ids."""

from collections.abc import Iterable


class BlockAllocator:
    """Hands out `num_blocks` from `first_block` on, the last freed first: its memory is the likeliest to be warm."""

    def __init__(self, num_blocks: int, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self._first_block = first_block
        self._free = list(range(first_block + num_blocks - 1, first_block - 1, -1))
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
            self._is_free[block - self._first_block] = 0
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Raises ValueError for a block that is free already."""
        for block in blocks:
            if self._is_free[block - self._first_block]:
                raise ValueError(f"block {block} is free already")
            self._is_free[block - self._first_block] = 1
            self._free.append(block)
