"""When a running service changes its policy, and when it lets it be."""

from support.policies import estimator

from planner_svc.policy import PolicyChooser, PolicySearch, RequestMix
from svc_common.policy import ExecutionPolicy

LONG = RequestMix(2000, 32, 4, 16_384)
STREAMED = ExecutionPolicy(2)


def search():
    """Where a partition decodes several times as fast as streaming."""
    return PolicySearch(estimator(6, gpu_bytes=6e9, host_bytes=20e9, cpu_per_s=50e9))


def test_a_better_policy_is_taken_when_it_stays_better():
    chooser = PolicyChooser(search(), STREAMED)
    assert chooser.consider(LONG, 0, 1.0) is None
    assert chooser.consider(LONG, 0, 2.0) is None
    change = chooser.consider(LONG, 0, 3.0)
    best = search().compare(LONG).best
    assert change is not None
    assert change.policy == best.policy
    assert change.gain == search().estimator.predict(STREAMED, LONG).total_s / best.total_s > 1.1
    chooser.changed(change.policy, 3.0)
    assert all(chooser.consider(LONG, 0, 40.0 + second) is None for second in range(10))


def test_the_best_policy_stays():
    chooser = PolicyChooser(search(), search().compare(LONG).best.policy)
    assert all(chooser.consider(LONG, 0, float(second)) is None for second in range(10))


def test_one_odd_mix_in_between_starts_the_count_anew():
    chooser = PolicyChooser(search(), search().compare(LONG).best.policy)
    short = RequestMix(1, 64, 1, 16_384)
    resident = search().compare(short).best
    assert chooser.consider(short, 0, 1.0) is None
    assert chooser.consider(short, 0, 2.0) is None
    assert chooser.consider(LONG, 0, 3.0) is None
    assert chooser.consider(short, 0, 4.0) is None
    assert resident.memory.num_host_sequences == 0


def test_a_change_that_loses_more_than_it_saves_is_not_made():
    chooser = PolicyChooser(search(), STREAMED)
    many = 10_000_000  # Tokens to compute again: longer than the horizon.
    assert chooser.cost_s(search().compare(LONG).best.policy, LONG, many) > 60
    assert all(chooser.consider(LONG, many, float(second)) is None for second in range(10))


def test_cost_is_loading_and_computing_again():
    chooser = PolicyChooser(search(), STREAMED)
    assert chooser.cost_s(ExecutionPolicy(0), LONG, 0) == 0
    assert chooser.cost_s(ExecutionPolicy(3), LONG, 0) == 1e9 / 5e9
    prefill_s = search().estimator.predict(ExecutionPolicy(0), LONG).ttft_s
    assert chooser.cost_s(ExecutionPolicy(0), LONG, 4000) == prefill_s / 2


def test_no_change_soon_after_one():
    chooser = PolicyChooser(search(), STREAMED)
    chooser.changed(STREAMED, 10.0)
    assert all(chooser.consider(LONG, 0, 10.0 + second) is None for second in range(30))
    found = [chooser.consider(LONG, 0, 40.0 + second) for second in range(3)]
    assert [change is None for change in found] == [True, True, False]


def test_where_nothing_fits_the_policy_stays():
    chooser = PolicyChooser(search(), STREAMED)
    huge = RequestMix(100_000, 32, 64, 16_384)  # 640 GB of KV.
    assert all(chooser.consider(huge, 0, float(second)) is None for second in range(10))
    assert chooser.first(huge) == STREAMED
    assert chooser.first(LONG) == search().compare(LONG).best.policy
