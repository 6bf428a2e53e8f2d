"""The planner chooses where layers run: what it asks the executor for at the start, and as the load changes."""

from dataclasses import replace
from typing import Any

import pytest
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import SPEC, StartRig, request

from neoflex.v1 import executor_pb2
from neoflex.v1 import inference_pb2 as pb
from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.executor_client import DeviceMemory, EpochLimits, HostPool, Placement
from planner_svc.policy_keeper import PolicyKeeper
from planner_svc.scheduler import Demand
from svc_common.config import parse
from svc_common.policy import ExecutionPolicy

NUM_LAYERS = 6
LAYER_BYTES = 1_000_000
CONFIG = parse({"gpu": {"kv_bytes": "1MiB"}, "cpu_attn": {"kv_bytes": "64MiB"}}, "test")
TABLES = OperationTables(
    linear=(LinearPoint(1, 0.001), LinearPoint(100, 0.002)),
    prefill=(PrefillPoint(100, 0, 0.001),),
    gpu_decode=(DecodePoint(1, 100, 0.0001),),
    cpu_decode=(DecodePoint(1, 100, 0.0002),),
    head=(LinearPoint(1, 0.001),),
    swap_bytes_per_s=1e8,
    iteration_s=0.001,
    cpu_linear=(LinearPoint(1, 0.003), LinearPoint(16, 0.003), LinearPoint(100, 0.2)),
    cpu_prefill=(PrefillPoint(100, 0, 0.1),),
    link_bytes_per_s=2e7,
)
"""A layer takes 50 ms over the link, on the CPU 3 ms for up to 16 tokens and 200 ms for 100."""


def placement(**changes: Any) -> Placement:
    base = Placement(
        device="cpu",
        compute_dtype="fp32",
        kv_dtype="fp32",
        block_bytes=1000,
        host_kv_dtype="fp32",
        host_block_bytes=1000,
        gpu_blocks=64,
        pools=(HostPool(num_blocks=64, num_threads=1, error=""),),
        memory=DeviceMemory(5 * LAYER_BYTES + 2**20, LAYER_BYTES, LAYER_BYTES),
        policy=ExecutionPolicy(2),
        resident_layers=2,
        streamed_layers=4,
        streamed_bytes=4 * LAYER_BYTES,
    )
    return replace(base, **changes)


def keeper() -> PolicyKeeper:
    spec = replace(SPEC, num_layers=NUM_LAYERS)
    return PolicyKeeper(CONFIG, spec, EpochLimits(64, 4096, 1000), 2**40)


def test_only_streamed_layers_beside_a_host_are_a_choice() -> None:
    assert keeper().to_measure(placement(streamed_layers=0)) is None
    assert keeper().to_measure(placement(pools=())) is None
    assert keeper().to_measure(placement()) == ExecutionPolicy(2, 1, 1)


def test_without_measured_layers_nothing_is_chosen() -> None:
    chooses = keeper()
    assert chooses.measured(placement(), replace(TABLES, cpu_linear=())) is None
    assert chooses.measured(placement(memory=None), TABLES) is None
    assert chooses.tables is None
    assert chooses.consider(Demand(8, 100.0, 100.0), 100.0) is None


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_weights_of_any_type_cost_what_the_executor_says_they_take(dtype: str) -> None:
    chosen = keeper().measured(placement(compute_dtype=dtype), TABLES)
    assert chosen is not None
    assert chosen == keeper().measured(placement(), TABLES)


def test_it_begins_with_a_partition_of_decodes_and_changes_with_the_load() -> None:
    chooses = keeper()
    first = chooses.measured(placement(), TABLES)
    assert first is not None
    assert (first.prefill_cpu_layers, first.decode_cpu_layers > 0) == (0, True)
    assert chooses.tables is TABLES
    assert chooses.to_measure(placement()) is None
    chooses.opened(placement(policy=first), 0.0)
    # Of many sequences the CPU's arithmetic takes longer than their weights over the link.
    many = Demand(64, 64.0, 256.0, computed_tokens=64)
    answers = [chooses.consider(many, 100.0 + second) for second in range(30)]
    changes = [(second, policy) for second, policy in enumerate(answers) if policy is not None]
    assert changes[0][0] == 10  # The third time that it was looked at, every five seconds.
    assert changes[0][1].decode_cpu_layers < first.decode_cpu_layers
    chooses.opened(placement(policy=changes[0][1]), 130.0)
    assert [chooses.consider(many, 130.0 + 5 * turn) for turn in range(10)] == [None] * 10


def test_an_idle_service_changes_nothing() -> None:
    chooses = keeper()
    chooses.measured(placement(), TABLES)
    assert [chooses.consider(Demand(0, 64.0, 256.0), 100.0 + 5 * turn) for turn in range(10)] == [None] * 10


class SmallExecutor(FakeExecutor):
    """A device without room for its layers, which does as it is told."""

    async def OpenEpoch(self, request: Any, context: Any) -> executor_pb2.OpenEpochResponse:  # noqa: N802
        response = await super().OpenEpoch(request, context)
        response.policy.resident_layers = request.policy.resident_layers
        response.policy.prefill_cpu_layers = request.policy.prefill_cpu_layers
        response.policy.decode_cpu_layers = request.policy.decode_cpu_layers
        cpu_layers = request.policy.prefill_cpu_layers
        response.streamed_layers = self.num_layers - cpu_layers - response.policy.resident_layers
        memory = executor_pb2.DeviceMemory(
            memory_bytes=2**30,
            layer_bytes=2**29,
            other_bytes=2**20,
            kv_bytes=2**29,
            activation_bytes=3000,
            graph_bytes=400,
            spare_bytes=50,
        )
        response.memory.CopyFrom(memory)
        if request.profile:
            response.tables.link_bytes_per_s = 1e8
            if request.policy.decode_cpu_layers:
                points = [executor_pb2.LinearPoint(num_tokens=num, seconds=0.001 * num) for num in (1, 64)]
                response.tables.cpu_linear.extend(points)
        return response


async def test_the_planner_measures_both_sides_and_opens_the_chosen_epoch(start_rig: StartRig) -> None:
    rig = await start_rig(SmallExecutor(gpu_blocks=64, host_blocks=64), FakeHost())
    answer = await rig.stub.Generate(request("the", max_tokens=3))
    assert len(answer.token_ids) == 3
    asked = rig.executor.epochs
    assert [epoch.profile for epoch in asked] == [True, True, False]
    assert not asked[0].HasField("policy")
    assert (asked[1].policy.prefill_cpu_layers, asked[1].policy.decode_cpu_layers) == (1, 1)
    # 512 MB over the link take 5 s, each token of a layer on the CPU 1 ms.
    assert asked[2].policy.decode_cpu_layers == rig.executor.num_layers
    use = (await rig.stub.GetServerInfo(pb.GetServerInfoRequest())).memory_use
    assert (use.device_memory_bytes, use.device_activation_bytes, use.device_graph_bytes) == (2**30, 3000, 400)
    placement = rig.server._loop.placement
    assert placement is not None
    assert placement.memory is not None
    assert (placement.memory.placed_bytes, placement.memory.kv_bytes) == (2**30 - 3450, 2**29)
