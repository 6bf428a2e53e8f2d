"""KV blocks of the GPU or of a host pool: who owns them, and what free ones still hold. The planner owns this."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Key = bytes
"""Of a full block's content: its tokens and all before them, see prefix.py."""


class BlockAllocator:
    """Hands out `num_blocks` from `first_block` on, the last freed first: its memory is the likeliest to be warm.

    A block whose content has a key may have several owners. Without one it stays to be found until its room is needed:
    what was used the longest time ago goes first, and of a prefix its end before its beginning.
    """

    def __init__(self, num_blocks: int, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self._first_block = first_block
        self._free = list(range(first_block + num_blocks - 1, first_block - 1, -1))
        self._num_owners = array("i", bytes(4 * num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks without an owner whose content has a key, the longest unused first."""
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """To be had: those that are kept, too."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Raises ValueError where fewer are free: callers look first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked of {self.num_free} free")
        blocks = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for block in blocks:
            self._num_owners[block - self._first_block] = 1
        return blocks

    def _forget_oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._by_key[self._keys.pop(block)]
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each, in order of their tokens. Raises ValueError for a block that has none."""
        for block in reversed([*blocks]):
            place = block - self._first_block
            if self._num_owners[place] == 0:
                raise ValueError(f"block {block} is free already")
            self._num_owners[place] -= 1
            if self._num_owners[place] == 0:
                if block in self._keys:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def num_owned_alone(self, blocks: Iterable[int]) -> int:
        """Of blocks with an owner: those that are free when it leaves."""
        return sum(self._num_owners[block - self._first_block] == 1 for block in blocks)

    # --- content

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Blocks that hold the first of these contents, as many in a row as there are."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_owned(self, blocks: Iterable[int]) -> int:
        """Those that have an owner: sharing them takes no room."""
        return sum(self._num_owners[block - self._first_block] > 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One owner more for each of these found blocks."""
        for block in blocks:
            self._kept.pop(block, None)
            self._num_owners[block - self._first_block] += 1

    def note_content(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """What the first blocks of a sequence hold from now on; a content that is known elsewhere stays there."""
        for block, key in zip(blocks, keys, strict=False):
            if block not in self._keys and key not in self._by_key:
                self._keys[block] = key
                self._by_key[key] = block

    def forget_content(self, blocks: Iterable[int]) -> None:
        """What these blocks, each with an owner, hold is not to be found any more."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._by_key[key]
