"""Every stream ends with its own tokens, whatever the load.

Wider and less patient than the state machine beside it, which finds the smallest failing case.
"""

from collections import Counter

import pytest
from support.loads import run_load

from svc_common.plan import Mode


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_every_request_gets_its_tokens_whatever_the_load(first_seed):
    totals = sum((run_load(seed) for seed in range(first_seed, first_seed + 50)), Counter())
    # The loads are worth their time only while they exercise all of it.
    modes = [f"{mode.value}_iterations" for mode in Mode]
    for name in (*modes, "preemptions", "swaps_out", "swaps_in", "recomputed_tokens"):
        assert totals[name] > 10, name
