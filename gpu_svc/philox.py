"""Random numbers by counter: draw number i of a sequence's stream needs no state and knows no neighbour."""

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]

# Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """counter [n, 4], key [n, 2] -> words [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for step in range(_ROUNDS):
        if step:
            k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & _LOW, (k1 + np.uint64(_KEY_STEPS[1])) & _LOW
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: NDArray[np.uint64], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, draw) pair: 53 bits of the block that the pair addresses."""
    numbers = draws.astype(np.uint64)
    zeros = np.zeros_like(numbers)
    words = philox4x32(
        np.stack([numbers & _LOW, numbers >> _32, zeros, zeros], axis=1).astype(np.uint32),
        np.stack([seeds & _LOW, seeds >> _32], axis=1).astype(np.uint32),
    ).astype(np.uint64)
    return ((words[:, 0] >> np.uint64(5)) * 2.0**26 + (words[:, 1] >> np.uint64(6))) / 2.0**53
