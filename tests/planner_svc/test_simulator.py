"""The simulator: its inputs, its clock, its metrics, and the policies on a small machine with hand-worked times."""

import json
from dataclasses import replace

import pytest
from support.machines import SPEC

from planner_svc.estimator import IterationLoad, SubBatchLoad, Timeline
from planner_svc.scheduler import SequenceRequest, Targets
from planner_svc.simulator.classes import one_class
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.metrics import Served, measure
from planner_svc.simulator.runs import POLICIES, find_capacity, make_policy, run
from planner_svc.simulator.simulation import Simulation, StalledError
from planner_svc.simulator.spec import Profile, parse_profile, read_profile
from svc_common.plan import IterationPlan, Mode, NewSequence, PrefillChunk, Sampling, SubBatch, Swap, Tier
from svc_common.workloads import InputError
from svc_common.workloads.workload import Arrival, Workload, at_rate, load, read_workload

PROFILE = parse_profile(SPEC, "box", "spec")


def test_a_profile_is_read():
    assert PROFILE.model.kv_bytes_per_token_layer == 1024
    assert PROFILE.offload_gpu_blocks == 60 * 4 // 5
    assert PROFILE.host_blocks == 2**29 // (16 * 1024 * 4)
    assert PROFILE.targets == Targets(0.5, 0.05)
    assert PROFILE.capacity(60, (10,)).block_bytes == 16 * 1024 * 4
    assert PROFILE.estimator.num_layers == 4


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("shed", {}, "--profile: 'shed' is not in spec; it has box"),
        ("box", {"eta_f": 0}, "spec: profiles.box.eta_f: must be greater than 0 and at most 1e+18, is 0"),
        ("box", {"t_hop": -1}, "spec: profiles.box.t_hop: must be at least 0 and at most 1e+18, is -1"),
        ("box", {"bs": 0.5}, "spec: profiles.box.bs: must be at least 1 and at most 1e+18, is 0.5"),
        ("box", {"bs": 1.5}, "spec: profiles.box.bs: must be a whole number, is 1.5"),
        (
            "box",
            {"gpu_blocks": float("inf")},
            "spec: profiles.box.gpu_blocks: must be at least 1 and at most 1e+18, is inf",
        ),
        ("box", {"bs": None}, "spec: profiles.box.bs: must be a number, is None"),
        ("box", {"model": "huge"}, "spec: profiles.box.model: 'huge' is not among the models"),
    ],
)
def test_a_bad_profile_is_refused_with_its_field_and_limit(name, changes, message):
    document = SPEC | {"profiles": {"box": SPEC["profiles"]["box"] | changes}}
    with pytest.raises(InputError) as refusal:
        parse_profile(document, name, "spec")
    assert str(refusal.value) == message


def test_a_spec_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    with pytest.raises(InputError, match="No such file"):
        read_profile(path, "box")
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_profile(path, "box")
    path.write_text("[]")
    with pytest.raises(InputError, match='must hold the objects "profiles" and "models"'):
        read_profile(path, "box")


def test_formats_of_workloads(tmp_path):
    path = tmp_path / "workload"
    path.write_text("[[0.0, 5, 2], [1.5, 7, 3]]")
    assert read_workload(path) == [Arrival(0.0, 5, 2), Arrival(1.5, 7, 3)]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,480,10\n"
        "2023-11-16 18:17:05.9799600,318,0\n"
        "2023-11-16 18:17:07.9799600,31,8\n"
        "2023-11-16 18:17:13.9799600,32,9\n"
    )
    # 10 s for two gaps: one a second is five times as fast. Nothing was generated for one of them.
    azure = [Arrival(0.0, 480, 10), Arrival(pytest.approx(0.8), 31, 8), Arrival(pytest.approx(2.0), 32, 9)]
    assert read_workload(path) == azure
    assert read_workload(path, limit=2) == [Arrival(0.0, 480, 10), Arrival(pytest.approx(1.0), 31, 8)]
    path.write_text("\N{BOM}TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4,1\n")
    assert read_workload(path) == [Arrival(0.0, 4, 1)]
    path.write_text(
        '{"timestamp": 0, "input_length": 6, "output_length": 5}\n'
        '{"timestamp": 3000, "input_length": 7, "output_length": 4}\n'
        "\n"
    )
    assert read_workload(path) == [Arrival(0.0, 6, 5), Arrival(1.0, 7, 4)]
    path.write_text(json.dumps([{"prompt": 9, "max_tokens": 4}] * 400))
    assert load(path).own_rate is None
    poisson = read_workload(path)
    assert {(item.prompt_tokens, item.output_tokens) for item in poisson} == {(9, 4)}
    assert poisson[-1].at_s == pytest.approx(400, rel=0.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "not of a known format"),
        ("[[0, 5]]", "not of a known format"),
        ("[]", "holds no request"),
        ("[[0, 5, 1], [1, 0, 5]]", "request 1: prompt and output must be at least 1 token, are 0 and 5"),
        ("[[0, Infinity, 5]]", "not of a known format"),
        pytest.param("[" * 200_000, "not of a known format", id="deep"),
        ("[[NaN, 5, 1]]", "request 0: arrival must be from 0 to .* s, is nan"),
        ("[[-1, 5, 1]]", "request 0: arrival must be from 0 to .* s, is -1"),
        ("[[1e308, 5, 1]]", r"request 0: arrival must be from 0 to 1e\+09 s, is 1e\+308"),
    ],
)
def test_bad_workloads_are_refused(tmp_path, text, message):
    path = tmp_path / "workload"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_workload(path)


def test_a_record_keeps_its_rate_and_counts_what_it_leaves_out(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{second:02}.0000000,50,{second % 3}" for second in range(0, 12, 2)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    # Of 0, 2, ... 10 those at 0 and 6 generated nothing; four requests from 2 to 10 s.
    workload = load(path)
    assert (workload.name, workload.own_rate, workload.num_empty) == ("trace.csv", 3 / 8, 2)
    assert [item.at_s for item in workload.arrivals] == pytest.approx([0.0, 0.75, 2.25, 3.0])
    assert load(path, limit=1) == Workload("trace.csv", [Arrival(0.0, 50, 2)], None, 1)
    path.write_text("[[0, 5, 1], [4, 5, 1]]")
    assert load(path).own_rate == 1.0


def test_rates():
    arrivals = [Arrival(0.0, 5, 2), Arrival(1.5, 7, 3)]
    assert at_rate(arrivals, 3.0) == [Arrival(0.0, 5, 2), Arrival(0.5, 7, 3)]
    assert at_rate(arrivals, 0) == [Arrival(0.0, 5, 2), Arrival(0.0, 7, 3)]


def test_the_executor_prices_what_a_plan_does():
    executor = SimulatedExecutor(PROFILE.estimator, PROFILE.estimator.kv_bytes_per_token)
    new = (NewSequence(1, (0,) * 30, Tier.GPU, ()), NewSequence(2, (0,) * 40, Tier.HOST, ()))
    batch = SubBatch(prefills=(PrefillChunk(1, 0, 30), PrefillChunk(2, 0, 25)))
    seconds, result = executor.run(IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=new, sub_batches=(batch,)))
    load = SubBatchLoad(((30, 0), (25, 0)), host_prefill_tokens=25, num_outputs=1)
    assert seconds == PROFILE.estimator.iteration_s(IterationLoad(load))
    assert result.tokens == ((1, 0),)
    assert result.timings.total_ns == round(seconds * 1e9)
    swaps = (Swap(1, Tier.HOST, ()),)
    batches = (SubBatch(prefills=(PrefillChunk(2, 25, 15),)), SubBatch(cpu_decodes=(1,)))
    seconds, result = executor.run(IterationPlan(1, 2, Mode.ASYMMETRIC, swaps=swaps, sub_batches=batches))
    first = SubBatchLoad(((15, 25),), host_prefill_tokens=15, host_past_tokens=25, num_outputs=1)
    second = SubBatchLoad(num_cpu_decodes=1, cpu_context_tokens=31, num_outputs=1)
    out_bytes = 30 * PROFILE.estimator.kv_bytes_per_token
    assert seconds == PROFILE.estimator.iteration_s(IterationLoad(first, second, out_bytes, 0))
    assert result.tokens == ((2, 0), (1, 0))
    assert executor.run(IterationPlan(1, 3, Mode.GPU_ONLY, released=(1, 2)))[0] == 0


def test_the_executor_takes_a_cached_beginning_for_computed():
    executor = SimulatedExecutor(PROFILE.estimator, PROFILE.estimator.kv_bytes_per_token)
    new = (NewSequence(1, (0,) * 40, Tier.GPU, (), num_cached_tokens=32),)
    batch = SubBatch(prefills=(PrefillChunk(1, 32, 8),))
    seconds, result = executor.run(IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=new, sub_batches=(batch,)))
    assert seconds == PROFILE.estimator.iteration_s(IterationLoad(SubBatchLoad(((8, 32),), num_outputs=1)))
    assert result.tokens == ((1, 0),)


def test_pools_divide_the_host_and_its_speed():
    whole, parts = PROFILE, read_spec_with_pools(3)
    assert (whole.host_blocks, whole.host_pools, parts.host_pools) == (8192, (8192,), (2731, 2731, 2730))
    one, three = (profile.estimator.cpu_decode_s(6, 3000) - PROFILE.hardware.cpu_hop_s for profile in (whole, parts))
    assert three == pytest.approx(3 * one)
    # A third of the sequences in each: as fast as the whole CPU.
    pools = ((2, 1000),) * 3
    load = IterationLoad(SubBatchLoad(num_cpu_decodes=6, cpu_context_tokens=3000, num_outputs=6, cpu_pools=pools))
    undivided = IterationLoad(SubBatchLoad(num_cpu_decodes=6, cpu_context_tokens=3000, num_outputs=6))
    assert parts.estimator.iteration_s(load) == pytest.approx(whole.estimator.iteration_s(undivided))


def test_pools_share_the_load():
    profile = read_spec_with_pools(2)
    used = []

    def note(start_s, plan, timeline, policy):
        used.append(policy.num_by_pool)

    load = arrivals(100, prompt=150, output=60)
    divided = run("neoflex", profile, load, 25.0, observer=note)
    assert (divided.unfinished, divided.slo) == (0, 1.0)
    sums = [sum(column) for column in zip(*used, strict=True)]
    assert sums[0] == pytest.approx(sums[1], rel=0.2)
    assert sums[0] > 0
    with pytest.raises(InputError, match="--elastic: profile box must have 1 host pool, has 2"):
        run("neoflex", profile, load, 1.0, threads=(1, 2))
    assert run("neo", profile, load, 25.0) == run("neo", PROFILE, load, 25.0)


def read_spec_with_pools(num_pools: int) -> Profile:
    return parse_profile(SPEC | {"profiles": {"box": SPEC["profiles"]["box"] | {"pools": num_pools}}}, "box", "spec")


def test_metrics():
    requests = [Served(0.0, 3), Served(1.0, 2), Served(2.0, 2), Served(3.0, 1)]
    for index, times in enumerate(((0.4, 0.44, 0.48), (1.6, 1.65), (2.1, 2.3), (3.5,))):
        for now in times:
            requests[index].take_token(now)
    metrics = measure(requests, Targets(0.5, 0.05), Timeline(3.0, 1.75, 0.7, 0.35, 0.07))
    # The second's first token is late, the third's second one.
    assert metrics.slo == 0.5
    assert metrics.thr_makespan == pytest.approx(4 / 3.5)
    assert metrics.thr_mid == pytest.approx(1 / (2.3 - 1.65))
    assert metrics.pertok_mean == pytest.approx((0.65 / 2 + 0.3 / 2 + 0.5) / 3)
    assert metrics.goodput == pytest.approx(2 / 3.5)
    assert metrics.tokens_per_s == pytest.approx(8 / 3.5)
    assert metrics.gap_max == pytest.approx(0.2)
    assert (metrics.ttft_p95, metrics.ttft_p99) == pytest.approx((0.6, 0.6))
    assert (metrics.tpot_p50, metrics.tpot_p95, metrics.tpot_p99) == pytest.approx((0.05, 0.2, 0.2))
    assert metrics.ttft_p50 == pytest.approx(0.5)
    busy = (metrics.gpu_busy, metrics.cpu_busy, metrics.link_out_busy, metrics.link_in_busy)
    assert busy == pytest.approx((0.5, 0.2, 0.1, 0.02))
    assert metrics.unfinished == 0


def arrivals(num: int, prompt: int = 100, output: int = 20) -> list[Arrival]:
    return [Arrival(number * 1.0, prompt, output + number % 3) for number in range(num)]


def test_one_request_alone_takes_what_its_iterations_take():
    estimator = PROFILE.estimator
    expected_s = estimator.iteration_s(IterationLoad(SubBatchLoad(((60, 0),), num_outputs=1)))
    for context in (61, 62):
        expected_s += estimator.iteration_s(
            IterationLoad(SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=context, num_outputs=1))
        )
    for name in POLICIES:
        metrics = run(name, PROFILE, [Arrival(0.0, 60, 3)], rate=1.0)
        assert metrics.thr_makespan == pytest.approx(1 / expected_s), name
        assert metrics.slo == 1.0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rate", [0.0, 2.0, 20.0])
def test_every_policy_serves_every_request(name, rate):
    metrics = run(name, PROFILE, arrivals(60), rate)
    assert metrics.unfinished == 0
    assert metrics.gap_max < 60


def test_the_host_adds_to_what_is_served_in_time():
    load = arrivals(300, prompt=150, output=60)
    both, alone = (run(name, PROFILE, load, rate=25.0).slo for name in ("neoflex", "gpu-only-slo"))
    assert both > 0.9
    assert alone < 0.5


def test_a_simulation_repeats_itself():
    assert run("neoflex", PROFILE, arrivals(80), 12.0) == run("neoflex", PROFILE, arrivals(80), 12.0)


def test_a_lone_request_larger_than_neos_gpu_stalls_neo_alone():
    """Swapped out, it can't be brought back, and CPU decodes only run beside GPU work: one of NEO's traps."""
    load = [Arrival(0.0, 700, 200)]
    with pytest.raises(StalledError, match="1 of 1 requests are never planned"):
        run("neo", PROFILE, load, 1.0)
    assert run("neo", PROFILE, load, 1.0, may_stall=True).unfinished == 1
    assert run("neoflex", PROFILE, load, 1.0).unfinished == 0


def test_a_request_that_can_never_fit_is_refused_by_name():
    with pytest.raises(InputError, match=r"request 0: prompt and output are 1000 tokens; .* holds at most 960"):
        run("gpu-only", PROFILE, [Arrival(0.0, 990, 10)], 1.0)


def test_the_capacity_is_found_within_a_hundredth():
    for true_rate in (0.013, 3.7, 90.0):
        found = find_capacity(lambda rate, limit=true_rate: rate <= limit, 1.0)
        assert true_rate / 1.011 <= found <= true_rate
    assert find_capacity(lambda rate: False, 1.0) == 0.0
    tried = []
    found = find_capacity(lambda rate: tried.append(rate) or rate <= 3.7, 1.0, tolerance=0.2)
    assert found == 3.5
    assert tried == [1.0, 2.0, 4.0, 3.0, 3.5]


@pytest.mark.parametrize(
    ("figure", "ratio"),
    [
        ("linear_efficiency", 0.7),
        ("attention_efficiency", 0.7),
        ("gpu_bytes_per_s", 0.7),
        ("gpu_bytes_per_s", 1.3),
        ("cpu_bytes_per_s", 0.7),
        ("link_bytes_per_s", 0.7),
        ("launch_s", 1.3),
        ("cpu_sequence_s", 1.3),
        ("cpu_hop_s", 1.3),
        ("iteration_s", 1.3),
    ],
)
def test_the_scheduler_learns_what_the_machine_is(figure, ratio):
    """A figure of the machine is not what is believed: nearly as many requests come in time as if it were known."""
    hardware = replace(PROFILE.hardware, **{figure: ratio * getattr(PROFILE.hardware, figure)})
    truth = replace(PROFILE, hardware=hardware)
    load = at_rate(arrivals(60, prompt=150, output=40), 12.0)

    def share_in_time(believed):
        executor = SimulatedExecutor(truth.estimator, truth.estimator.kv_bytes_per_token)
        simulation = Simulation(make_policy("neoflex", believed), executor)
        requests = simulation.run(load, one_class(truth.targets))
        return measure(requests, truth.targets, executor.worked).slo

    assert share_in_time(PROFILE) >= 0.9 * share_in_time(truth) > 0


def test_plans_are_made_one_ahead():
    """As the engine does it: an arrival during an iteration can't join the one after it, which is planned already."""
    policy = make_policy("neoflex", PROFILE)
    request = SequenceRequest((0,) * 10, 5, Sampling(), frozenset(), PROFILE.targets)
    policy.add(request, 0.0)
    assert policy.plan(0.0) is not None
    assert policy.plan(0.0) is not None
    policy.add(request, 0.001)
    assert policy.plan(0.001) is None
