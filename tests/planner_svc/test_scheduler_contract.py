"""The real executor's own bookkeeping accepts every plan of the scheduler, as it comes over the wire."""

import pytest
from support.loads import run_load
from support.planning import NUM_TOKEN_IDS, FakeExecutor

from gpu_svc.cohort import CohortSteps
from gpu_svc.limits import Limits
from gpu_svc.sequences import SequenceTable
from gpu_svc.wire import plan_from_pb
from planner_svc.wire import plan_to_message
from svc_common.plan import IterationPlan, IterationResult, Mode


class BothExecutors(FakeExecutor):
    """Takes tokens from the fake one; the real table raises InvalidPlanError where it disagrees."""

    def run(self, plan: IterationPlan, total_ns: int = 1_000_000) -> IterationResult:
        if not hasattr(self, "table"):
            size = self.capacity
            self.table = SequenceTable(
                Limits(size.max_sequences, size.max_batch_tokens, size.max_sequence_tokens),
                block_tokens=size.block_tokens,
                num_gpu_blocks=size.gpu_blocks,
                host_pools=size.host_pools,
                vocab_size=NUM_TOKEN_IDS,
            )
            self.cohort_steps = CohortSteps(self.table, self.num_layers)
        received = plan_from_pb(plan_to_message(plan))
        self.cohort_steps.check_changes(received)
        self.table.apply(received)
        self.table.check_work(received)
        self.cohort_steps.check_work(received)
        for sub_batch in received.sub_batches:
            self.table.advance(sub_batch)
        if received.cohort:
            self.cohort_steps.advance(received.cohort)
        result = super().run(plan, total_ns)
        assert set(self.table.slot_of) == set(self.sequences)
        return result


@pytest.mark.parametrize("first_seed", [1000, 1020])
def test_every_plan_is_accepted(first_seed):
    counters = [run_load(seed, BothExecutors) for seed in range(first_seed, first_seed + 20)]
    assert sum(each["swaps_out"] for each in counters) > 0
    for mode in (Mode.GPU_ONLY, Mode.SAME_LAYER, Mode.DECOUPLED):
        assert sum(each[f"{mode.value}_iterations"] for each in counters) > 0
