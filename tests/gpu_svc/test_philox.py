"""The generator against the known answers that come with Random123, and uniforms for shape."""

import numpy as np

from gpu_svc.philox import philox4x32, uniforms


def words(*values: int) -> np.ndarray:
    return np.array([values], np.uint32)


def test_known_answers() -> None:
    ones = 0xFFFFFFFF
    cases = (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    )
    for counter, key, expected in cases:
        assert tuple(philox4x32(words(*counter), words(*key))[0]) == expected


def test_draws_do_not_depend_on_the_batch() -> None:
    seeds = np.array([7, 2**64 - 1, 7, 2**40], np.uint64)
    draws = np.array([0, 3, 1, 2**33], np.int64)
    together = uniforms(seeds, draws)
    alone = [uniforms(seeds[i : i + 1], draws[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_uniforms_are_uniform() -> None:
    """Chi-square over 64 bins; 63 degrees of freedom, 0.999 quantile 103.4."""
    values = uniforms(np.full(20_000, 99, np.uint64), np.arange(20_000))
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, 64, (0, 1))[0]
    expected = 20_000 / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 103.4
