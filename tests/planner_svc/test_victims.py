"""Who yields its blocks, and whether it is moved or computed again."""

from dataclasses import replace

import pytest
from support.planning import make_capacity, make_estimator

from planner_svc.estimator import Calibration
from planner_svc.scheduler import SequenceRequest, ServiceClass
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.pools import HostPools
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.victims import Victims
from svc_common.plan import Sampling, Tier

CAPACITY = make_capacity(100, 20, max_batch_tokens=512)
"""Of 4 tokens and 1 KiB to the block; a link of 1 GB/s takes 2 us for a block and back."""
ESTIMATOR = make_estimator()
"""Four knees are 420 tokens: 2 layers of 4.2 ms and 0.18 ms of attention, 0.2 ms of overhead and head."""
IMPORTANT = ServiceClass("important", priority=1)
PLAIN = ServiceClass("plain")


class Pool:
    """Residents of the GPU unless told otherwise, by arrival."""

    def __init__(self, estimator=ESTIMATOR, capacity=CAPACITY):
        self.residency = Residency(capacity)
        self.costs = Costs(capacity, Calibration(estimator))
        self.pools = HostPools(capacity, self.residency, estimator, 0.0)
        self.sequences: list[Sequence] = []

    def add(self, num_tokens, num_computed=None, service_class=PLAIN, tier=Tier.GPU, is_late=False):
        request = SequenceRequest((1,) * num_tokens, 9, Sampling(), frozenset(), service_class=service_class)
        sequence = Sequence(len(self.sequences) + 1, request)
        self.residency.admit(sequence, tier)
        sequence.advance_to(num_tokens if num_computed is None else num_computed)
        sequence.is_late = is_late
        self.sequences.append(sequence)
        self.residency.take_changes()

    def victims(self):
        return Victims(self.residency, self.pools, self.costs)

    def take(self, num_blocks, beneficiary=1):
        """Of the GPU."""
        victims = self.victims().take(None, num_blocks, self.sequences[beneficiary - 1])
        return None if victims is None else [victim.sequence_id for victim in victims]


def test_what_things_cost():
    pool = Pool()
    assert pool.costs.swap_block_s == pytest.approx(2 * 1024 / 1e9)
    pool.add(100)
    assert pool.costs.recompute_s(pool.sequences[0]) == pytest.approx(100 * 8.96e-3 / (0.8 * 420), rel=0.01)


def test_of_equals_the_latest_yields():
    pool = Pool()
    for _ in range(3):
        pool.add(8)
    assert pool.take(1) == [3]
    assert pool.take(3) == [2, 3]


def test_none_older_than_the_beneficiary_yields_whatever_it_is_worth():
    pool = Pool()
    pool.add(8, is_late=True)
    pool.add(8, is_late=True)
    pool.add(8, service_class=IMPORTANT)
    assert pool.take(1, beneficiary=2) == [3]
    assert pool.take(3, beneficiary=2) is None
    assert pool.take(1, beneficiary=3) is None


def test_a_lower_priority_yields_before_a_late_one_and_a_late_one_before_another():
    pool = Pool()
    pool.add(8)
    pool.add(8)
    pool.add(8, is_late=True)
    pool.add(8, is_late=True, service_class=IMPORTANT)
    pool.add(8, service_class=IMPORTANT)
    assert pool.take(1) == [3]
    assert pool.take(4) == [2, 3]
    assert pool.take(6) == [4, 2, 3]


def test_the_cheapest_to_bring_back_yields_first():
    """Nothing of the third's prompt is computed yet, and its four blocks are all to be had; no room on the host."""
    pool = Pool(capacity=make_capacity(100, 0))
    pool.add(8)
    pool.add(8)
    pool.add(16, num_computed=0)
    pool.add(7)
    assert pool.take(1) == [3]
    assert pool.take(5) == [4, 3]


def test_who_is_not_needed_after_all_stays():
    """The fourth is the cheapest, but without the third all its blocks are not enough, and with it not needed."""
    pool = Pool(capacity=make_capacity(100, 0))
    pool.add(8)
    pool.add(40)
    pool.add(8, num_computed=2)
    assert pool.take(1) == [3]
    assert pool.take(3) == [2]


def test_moving_costs_less_than_computing_again_or_not():
    pool = Pool()
    pool.add(8)
    pool.add(8, num_computed=0)
    assert pool.victims().refuge(pool.sequences[0]) == 0
    assert pool.victims().refuge(pool.sequences[1]) is None  # it would carry nothing
    large = Costs(replace(CAPACITY, block_bytes=10**8), Calibration(ESTIMATOR))
    victims = Victims(pool.residency, pool.pools, large)
    assert victims.refuge(pool.sequences[0]) is None  # 0.4 s on the link against 0.2 ms


def test_what_cannot_move_is_computed_again():
    pool = Pool(capacity=make_capacity(100, 2))
    pool.add(12)
    assert pool.victims().refuge(pool.sequences[0]) is None  # no room
    pool.add(4, tier=Tier.HOST)
    assert pool.victims().refuge(pool.sequences[1]) is None  # it is there
    pool.residency.move(pool.sequences[1], Tier.GPU)
    assert pool.victims().refuge(pool.sequences[1]) is None  # this plan moves it already


def test_in_one_plan_nobody_is_offered_twice_and_who_moved_is_offered_where_it_went():
    pool = Pool()
    for _ in range(4):
        pool.add(8)
    pool.add(8, tier=Tier.HOST)
    victims = pool.victims()
    oldest, second = pool.sequences[:2]
    assert victims.take(0, 100, oldest) is None
    [moved] = victims.take(None, 2, oldest)
    pool.residency.move(moved, Tier.HOST)
    victims.arrive_on_host(moved)
    assert [item.sequence_id for item in victims.take(None, 1, oldest)] == [3]
    assert {item.sequence_id for item in victims.take(0, 4, second)} == {4, 5}
    assert victims.take(None, 1, second) is None
