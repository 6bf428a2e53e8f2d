"""Which iterations of decodes are captured, by their numbers of rows; others are padded to one of these, or eager."""

from dataclasses import dataclass
from itertools import pairwise, product

_STEP = 8
_LARGEST = 512
"""Decodes of a captured iteration: beyond, a layer takes longer than its launches."""
_MIXED_SIZES = (4, 16, 64, 128, 256)
"""Of each kind of rows where several come together: of finer ones there would be thousands of combinations."""
_LARGEST_MIXED = 256
"""Rows of all kinds together."""
_MOST_PADDING = 4
"""Rows of a captured iteration for each that is needed: with more, eager launches cost less."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Decodes of an iteration: how many rows it has, for sequences or padded."""

    gpu_rows: int
    """All in the first sub-batch."""
    cpu_rows: tuple[int, ...]
    """By sub-batch, of which there are one or two."""

    @property
    def num_rows(self) -> int:
        return self.gpu_rows + sum(self.cpu_rows)

    @property
    def has_cpu_work(self) -> bool:
        return any(self.cpu_rows)

    def can_hold(self, other: "GraphKey") -> bool:
        """Whether batches of the other's size may be padded to this one.

        Only beside CPU decodes there may be padded ones: without any the CPU is told of no sub-batch.
        """
        mine, others = (self.gpu_rows, *self.cpu_rows), (other.gpu_rows, *other.cpu_rows)
        return (
            len(mine) == len(others)
            and self.num_rows <= _MOST_PADDING * other.num_rows
            and all(rows >= least and bool(rows) == bool(least) for rows, least in zip(mine, others, strict=True))
        )


def decode_keys(most: int) -> list[GraphKey]:
    """Of up to `most` decodes on the GPU alone, largest first: 1, 2, 4, then in steps of 8 or an eighth."""
    most = min(most, _LARGEST)
    sizes, size = [1, 2, 4], _STEP
    while size < most:
        sizes.append(size)
        size = max(size + _STEP, size * 9 // 8 // _STEP * _STEP)
    return [GraphKey(rows, (0,)) for rows in sorted({most, *(size for size in sizes if size < most)}, reverse=True)]


def mixed_keys(most: int, with_gpu_rows: bool) -> list[GraphKey]:
    """With CPU decodes in one sub-batch or two, of up to `most` sequences together; largest first."""
    sizes = [size for size in _MIXED_SIZES if size < most] + ([most] if most <= _LARGEST_MIXED else [])
    # The fewest rows that are padded to each.
    least = {0: 0} | {size: before + 1 for before, size in pairwise([0, *sizes])}
    on_gpu = (0, *sizes) if with_gpu_rows else (0,)
    one = [GraphKey(gpu, (cpu,)) for gpu, cpu in product(on_gpu, sizes)]
    two = [GraphKey(gpu, (first, second)) for gpu, first, second in product(on_gpu, (0, *sizes), sizes)]
    useful = [
        key
        for key in one + two
        if key.num_rows <= _LARGEST_MIXED
        and least[key.gpu_rows] + sum(least[rows] for rows in key.cpu_rows) <= most
        and (key.gpu_rows or key.cpu_rows[0])
    ]
    return sorted(useful, key=lambda key: key.num_rows, reverse=True)
