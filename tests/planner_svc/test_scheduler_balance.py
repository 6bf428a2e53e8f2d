"""How CPU decodes are shared out, which prompts are held back, and which mode wins."""

from support.planning import Loop, make_capacity

from planner_svc.estimator import Calibration, DecodePoint, LinearPoint, OperationTables, TableEstimator
from planner_svc.scheduler import SequenceRequest
from planner_svc.scheduler.balance import MAX_PASSED_OVER, Balance
from planner_svc.scheduler.batch import Batch, Chunk
from planner_svc.scheduler.decision import decide
from planner_svc.scheduler.placement import Decodes
from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import Mode, Sampling, Tier


def make_tables(*, linear_s=1e-3, knee=100, cpu_token_s=1e-5, gpu_token_s=1e-6) -> TableEstimator:
    """Linear operations take `linear_s` up to the knee, then in proportion; one layer, nothing else costs anything."""

    def decode(token_s):
        return tuple(DecodePoint(n, n * mean, n * mean * token_s) for n in (1, 100) for mean in (1, 1000))

    linear = (LinearPoint(1, linear_s), LinearPoint(knee, linear_s), LinearPoint(2 * knee, 2 * linear_s))
    return TableEstimator(
        OperationTables(linear, (), decode(gpu_token_s), decode(cpu_token_s), (), 0.0, 0.0), num_layers=1
    )


def decoding(sequence_id: int, context: int, tier: Tier = Tier.HOST, passed_over: int = 0) -> Sequence:
    """A sequence whose next decode attends `context` tokens."""
    return Sequence(
        sequence_id,
        SequenceRequest((0,) * (context - 1), 100, Sampling(), frozenset()),
        state=State.RUNNING,
        tier=tier,
        num_prefill_tokens=context - 1,
        num_computed_tokens=context - 1,
        num_passed_over=passed_over,
    )


def admission(sequence_id: int, num_tokens: int, passed_over: int = 0) -> Chunk:
    """A prompt that would be admitted to the host, whole."""
    request = SequenceRequest((0,) * num_tokens, 10, Sampling(), frozenset())
    return Chunk(Sequence(sequence_id, request, num_passed_over=passed_over), 0, num_tokens, num_tokens, Tier.HOST)


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


def place(estimator, candidates, gpu_decodes=(), chunks=(), waive=False) -> tuple[list[int], list[int]]:
    batch = Batch(list(chunks), list(gpu_decodes))
    Balance(estimator, batch).place_cpu_decodes(candidates, waive)
    return ids(batch.cpu_decodes[0]), ids(batch.cpu_decodes[1])


def test_cpu_decodes_go_where_the_slack_is():
    """lin0 = 1 ms hides 100 context tokens of the second sub-batch; then lin1 + gdec0 = 1.02 ms hide the first's."""
    gpu = [decoding(1, 20, Tier.GPU)]
    candidates = [decoding(number, 60) for number in range(2, 7)]
    first, second = place(make_tables(), candidates, gpu)
    # 2 into the second (0.6 of 1 ms); the first has the more slack then, and takes 3; 0.4 are left in both.
    assert (first, second) == ([3], [2])


def test_one_that_breaks_a_constraint_is_skipped_and_a_shorter_one_still_fits():
    gpu = [decoding(1, 20, Tier.GPU)]
    candidates = [decoding(2, 150), decoding(3, 90), decoding(4, 200), decoding(5, 80)]
    first, second = place(make_tables(), candidates, gpu)
    assert (first, second) == ([5], [3])


def test_without_gpu_work_the_constraints_are_waived_and_the_halves_balanced():
    candidates = [decoding(number, 500) for number in range(1, 7)]
    first, second = place(make_tables(cpu_token_s=1e-3), candidates, waive=True)
    assert (first, second) == ([1, 3, 5], [2, 4, 6])


def test_an_aged_one_runs_first_and_in_any_case():
    gpu = [decoding(1, 20, Tier.GPU)]
    candidates = [decoding(2, 90), decoding(3, 5000, passed_over=MAX_PASSED_OVER)]
    first, second = place(make_tables(), candidates, gpu)
    assert second == [3]
    assert first == [2]


def hold_back(estimator, chunks, residents, cpu_decodes=(), gpu_decodes=()) -> tuple[list[int], list[int]]:
    """(prompts that stay, prompts held back)"""
    batch = Batch(list(chunks), list(gpu_decodes))
    balance = Balance(estimator, batch)
    balance.place_cpu_decodes(list(cpu_decodes), waive=False)
    held_back = balance.hold_back_host_prompts(list(residents))
    return [chunk.sequence.sequence_id for chunk in batch.chunks], ids(held_back)


def test_prompts_for_an_idle_cpu_are_welcome_as_far_as_it_can_hide_them():
    gpu = [decoding(1, 20, Tier.GPU)]
    chunks = [admission(number, 90) for number in (2, 3, 4)]
    # A decode iteration takes 1 + 1 + 0.02 ms; two contexts of 90 tokens take 1.8 ms of the CPU, three 2.7.
    assert hold_back(make_tables(), chunks, gpu, gpu_decodes=gpu) == ([2, 3], [4])


def test_prompts_stay_where_they_hide_the_cpu():
    """NEO's rule 5: without the 300 tokens of the last prompt, linear work would no longer cover the CPU."""
    gpu = [decoding(1, 20, Tier.GPU)]
    host = [decoding(2, 250)]
    chunks = [admission(3, 200), admission(4, 300)]
    stayed, held_back = hold_back(make_tables(), chunks, [*gpu, *host], cpu_decodes=host, gpu_decodes=gpu)
    assert (stayed, held_back) == ([3, 4], [])
    stayed, held_back = hold_back(make_tables(), [admission(3, 400), admission(4, 300)], host, host, gpu)
    assert (stayed, held_back) == ([3], [4])


def test_a_prompt_held_back_too_often_is_let_in():
    gpu = [decoding(1, 20, Tier.GPU)]
    slow = make_tables(cpu_token_s=1e-2)
    assert hold_back(slow, [admission(2, 90)], gpu, gpu_decodes=gpu) == ([], [2])
    assert hold_back(slow, [admission(2, 90, MAX_PASSED_OVER)], gpu, gpu_decodes=gpu) == ([2], [])


def test_a_prompt_is_let_in_when_nothing_else_can_run():
    assert hold_back(make_tables(cpu_token_s=1e-2), [admission(1, 90), admission(2, 90)], []) == ([1], [2])


def choose(estimator, num_gpu, num_host, context=50, policy="auto", passed_over=0, calibration=None):
    gpu = [decoding(number, context, Tier.GPU) for number in range(num_gpu)]
    host = [decoding(100 + number, context, passed_over=passed_over) for number in range(num_host)]
    decision = decide(estimator, calibration or Calibration(), policy, [], Decodes(gpu, host), [*gpu, *host], 0)
    return decision.batch.mode, *map(len, decision.batch.cpu_decodes), len(decision.passed_over)


def test_a_cpu_too_slow_to_help_is_left_alone():
    assert choose(make_tables(cpu_token_s=1e-2), num_gpu=4, num_host=4) == (Mode.GPU_ONLY, 0, 0, 4)


def test_few_cpu_decodes_join_one_batch():
    """4 tokens in 1.2 ms; 6 in 2 ms (one batch); 6 in 2.2 ms (two): the second read of the weights does not pay."""
    assert choose(make_tables(gpu_token_s=1e-6), num_gpu=4, num_host=1) == (Mode.ASYMMETRIC, 1, 0, 0)


def test_many_cpu_decodes_pipeline_in_two_sub_batches():
    """One batch: 1 + 2 ms for 8; two: 1 + 1.2 ms for 8, the CPU's 2 ms all hidden."""
    assert choose(make_tables(), num_gpu=4, num_host=4) == (Mode.ASYMMETRIC, 2, 2, 0)


def test_cpu_decodes_alone_are_split():
    """One batch: 1 + 2 ms; two: 1 + 1 ms, though the CPU is not always hidden."""
    assert choose(make_tables(), num_gpu=0, num_host=4) == (Mode.ASYMMETRIC, 2, 2, 0)
    assert choose(make_tables(cpu_token_s=1e-4), num_gpu=0, num_host=4) == (Mode.ASYMMETRIC, 2, 2, 0)


def test_a_calibrated_estimate_changes_the_choice():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(Mode.GPU_ONLY, 1.0, 1.0)
        calibration.observe(Mode.ASYMMETRIC, 1.0, 4.0)
    assert choose(make_tables(), num_gpu=4, num_host=4, calibration=calibration) == (Mode.GPU_ONLY, 0, 0, 4)


def test_aged_cpu_decodes_rule_gpu_only_out():
    mode, first, second, passed_over = choose(
        make_tables(cpu_token_s=1e-2), num_gpu=4, num_host=4, passed_over=MAX_PASSED_OVER
    )
    assert (mode, first + second, passed_over) == (Mode.ASYMMETRIC, 4, 0)


def test_asymmetric_forced_runs_them_all():
    mode, first, second, passed_over = choose(make_tables(cpu_token_s=1e-2), num_gpu=4, num_host=4, policy="asymmetric")
    assert (mode, first + second, passed_over) == (Mode.ASYMMETRIC, 4, 0)


def test_auto_never_pipelines_where_all_fits_on_the_gpu():
    loop = Loop(make_capacity(1000, 1000), "auto")
    for _ in range(8):
        loop.add(20, max_new_tokens=20)
    loop.run_until_idle()
    assert loop.scheduler.counters.asymmetric_iterations == 0


def test_auto_uses_a_fast_cpu_when_the_gpu_is_full():
    loop = Loop(make_capacity(12, 1000), "auto", make_tables(cpu_token_s=1e-7))
    for _ in range(12):
        loop.add(16, max_new_tokens=20)
    loop.run_until_idle()
    assert loop.scheduler.counters.asymmetric_iterations >= 19
