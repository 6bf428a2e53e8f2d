"""Who comes back from the host, and when."""

from support.planning import make_capacity, make_estimator

from planner_svc.estimator import Calibration
from planner_svc.scheduler import SequenceRequest
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.events import Tally
from planner_svc.scheduler.placement import Placement
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import Sampling, Tier

CAPACITY = make_capacity(8, 20, block_tokens=1)
COSTS = Costs(CAPACITY, Calibration(make_estimator()))


def make_sequence(sequence_id: int, num_tokens: int) -> Sequence:
    return Sequence(sequence_id, SequenceRequest((5,) * num_tokens, 10, Sampling(), frozenset()))


def swapped_in(policy, on_gpu: dict[int, int], on_host: dict[int, int], waiting: dict[int, int]) -> list[int]:
    """Arguments: tokens by sequence id. Returns which of those on the host come to the GPU."""
    residency, queue = Residency(CAPACITY), WaitingQueue()
    for tier, sizes in ((Tier.GPU, on_gpu), (Tier.HOST, on_host)):
        for sequence_id, num_tokens in sizes.items():
            sequence = make_sequence(sequence_id, num_tokens)
            residency.admit(sequence, tier)
            sequence.advance_to(num_tokens)
    for sequence_id, num_tokens in waiting.items():
        queue.put_back(make_sequence(sequence_id, num_tokens))
    residency.take_changes()
    Placement(CAPACITY, policy, residency, queue, Tally(), COSTS).swap_in()
    return [swap.sequence_id for swap in residency.take_changes().ordered_swaps()]


def test_the_oldest_comes_first_while_its_next_token_and_a_margin_fit():
    assert swapped_in("asymmetric", {1: 3}, {2: 3, 3: 1}, {}) == [2]  # 3 + 1 and a margin of 1 are free, then 2
    assert swapped_in("asymmetric", {1: 4}, {2: 3}, {}) == []


def test_an_empty_gpu_takes_whatever_fits():
    assert swapped_in("auto", {}, {2: 7}, {}) == [2]
    assert swapped_in("auto", {}, {2: 8}, {}) == []


def test_one_that_does_not_fit_holds_up_parked_ones_but_not_those_that_decode_on_the_host():
    assert swapped_in("gpu_only", {1: 3}, {2: 6, 3: 2}, {}) == []
    assert swapped_in("asymmetric", {1: 3}, {2: 6, 3: 2}, {}) == [3]


def test_a_prompt_that_can_use_the_gpu_has_first_claim_where_the_host_decodes():
    assert swapped_in("auto", {1: 3}, {2: 2}, {4: 8}) == []
    assert swapped_in("auto", {1: 3}, {2: 2}, {4: 9}) == [2]  # for the host alone


def test_parked_sequences_and_prompts_come_in_order_of_arrival():
    assert swapped_in("gpu_only", {1: 3}, {2: 2}, {4: 8}) == [2]
    assert swapped_in("gpu_only", {1: 3}, {4: 2}, {2: 8}) == []
