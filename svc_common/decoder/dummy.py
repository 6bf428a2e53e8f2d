"""Weights that nobody trained, for any model's shape: what a machine makes of the shape is measured without a file."""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from svc_common.decoder.names import names_of
from svc_common.model.spec import ModelSpec

DUMMY_VERSION = 1
"""Changes when the numbers do."""
_NUM_NOISE = 1_048_573
"""A prime, so that no two rows of a matrix are the same part of the noise."""
_SEED = 1


class DummyCheckpoint:
    """A `Checkpoint` that has every tensor. Norms are 1, biases 0; what is in a matrix is normal with a standard
    deviation of 1 / sqrt(columns), so that what goes through it keeps its size, layer after layer.

    A tensor is a part of one table of noise, over and over, that begins where its name says: the same numbers in every
    process and on every device, and on the host nothing of the model's size.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """`spec` is of any architecture that is supported."""
        self._norm = 1.0 - names_of(spec).norm_offset
        draw = np.random.Generator(np.random.Philox(_SEED))
        self._noise = torch.from_numpy(draw.standard_normal(_NUM_NOISE, dtype=np.float32))

    def __contains__(self, name: str) -> bool:
        return True

    def fill(self, name: str, target: Tensor) -> None:
        """See Checkpoint; `target` may have any shape."""
        if name.endswith(".bias"):
            target.zero_()
        elif target.ndim == 1:
            target.fill_(self._norm)
        else:
            self._fill_matrix(target.view(-1), target.shape[1] ** -0.5, crc32(name.encode()) % _NUM_NOISE)

    def _fill_matrix(self, flat: Tensor, deviation: float, start: int) -> None:
        """One product in fp32 and one rounding, of which no device makes anything else."""
        noise = self._noise.to(flat.device) * deviation
        done = 0
        while done < len(flat):
            piece = noise[start : start + len(flat) - done]
            flat[done : done + len(piece)].copy_(piece)
            done, start = done + len(piece), 0
