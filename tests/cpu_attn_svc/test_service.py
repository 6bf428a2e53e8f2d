"""The real service in a process of its own: what it computes and what it refuses."""

from collections.abc import Callable
from dataclasses import asdict, replace

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.cpu_attention import Service
from support.cpu_decodes import SHAPE, TIMEOUT_S, Decodes

from neoflex.v1 import cpu_attention_pb2 as pb
from svc_common.tensor_plane import CpuSubBatch, PeerLostError, PlaneError


def violated_fields(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None
    request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(request) for detail in status.details)
    return [violation.field for violation in request.field_violations]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kv_dtype": "bf16", "exchange_dtype": "bf16"},
        {"kv_dtype": "fp16", "sliding_windows": (7, 7, 7)},
        {"softcap": 1.5, "sliding_windows": (0, 3, 7)},
        {"kv_dtype": "int8"},
        {"kv_dtype": "int8", "exchange_dtype": "bf16", "block_tokens": 5, "sliding_windows": (7, 7, 7)},
        {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 80, "block_tokens": 5, "exchange_dtype": "fp16"},
    ],
)
def test_iterations_equal_the_reference(service: Service, change: dict[str, object]) -> None:
    shape = replace(SHAPE, **change)  # type: ignore[arg-type]
    plane = service.attach(5, shape)
    decodes = Decodes(plane, shape, (3, 2))
    for _ in range(9):
        report = decodes.run_iteration()
        assert report.iteration == decodes.iteration
        assert report.compute_ns > 0
    status = service.status()
    assert (status.epoch, status.iterations, status.blocks_used) == (5, 9, 5)
    plane.begin(10, [], 0)
    service.until(lambda s: s.status().blocks_used == 0)
    assert service.status().iterations == 9
    plane.close()


def test_a_token_takes_several_iterations(service: Service) -> None:
    """Some layers each; none but those are written."""
    plane = service.attach(5, SHAPE)
    decodes = Decodes(plane, SHAPE, (3, 2))
    for layers in (range(2), range(2, 3), range(1), range(1, 2), range(2, 3), range(3)):
        decodes.run_iteration(layers)
    assert service.status().iterations == 6
    plane.close()


@pytest.mark.parametrize("layers", [range(4), range(2, 4), range(3, 4), range(-1, 1), range(0)])
def test_layers_that_are_none_are_refused(service: Service, layers: range) -> None:
    plane = service.attach(6, SHAPE)
    plane.begin(1, [CpuSubBatch(0, np.array([1], np.int32), np.array([[0]], np.int32))], 1, layers=layers)
    plane.submit(0)
    with pytest.raises(PlaneError, match=f"{len(layers)} layers from layer {layers.start} on, of 3"):
        plane.wait(0, TIMEOUT_S)
    plane.close()


def test_threads_change_between_iterations(start_service: Callable[..., Service]) -> None:
    service = start_service(kv_bytes=16 * 2**20, max_threads=2).wait_ready()
    limit = service.status().max_threads
    # Enough work per layer that helpers are woken.
    shape = replace(SHAPE, head_dim=256, block_tokens=16, num_layers=2)
    plane = service.attach(1, shape)
    decodes = Decodes(plane, shape, (7, 0))
    decodes.contexts[0] += 200
    for num_threads in (1, limit, 1, limit):
        assert service.stub.SetThreads(pb.SetThreadsRequest(num_threads=num_threads)).num_threads == num_threads
        assert service.status().num_threads == num_threads
        decodes.run_iteration()
        helpers = psutil.Process(service.process.pid).num_threads()
        decodes.run_iteration()
        assert psutil.Process(service.process.pid).num_threads() == helpers
    for num_threads in (0, -1, limit + 1):
        with pytest.raises(grpc.RpcError) as caught:
            service.stub.SetThreads(pb.SetThreadsRequest(num_threads=num_threads))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert violated_fields(caught.value) == ["num_threads"]
    plane.close()


def test_a_new_region_ends_the_old_ones_work(service: Service) -> None:
    old = service.attach(1, SHAPE)
    Decodes(old, SHAPE, (2, 0)).run_iteration()
    old.begin(2, [CpuSubBatch(0, np.array([3], np.int32), np.array([[0]], np.int32))], 1)
    old.submit(0)
    old.wait(0, TIMEOUT_S)  # the worker is inside the iteration now, waiting for the second layer
    new = service.attach(2, SHAPE)
    with pytest.raises(PeerLostError):
        old.finish(TIMEOUT_S)
    assert not old.peer_alive()
    Decodes(new, SHAPE, (2, 2)).run_iteration()
    assert (service.status().epoch, service.status().iterations) == (2, 1)
    old.close()
    new.close()


def test_what_is_out_of_range_is_refused_before_memory_is_touched(service: Service) -> None:
    plane = service.attach(3, SHAPE)
    decodes = Decodes(plane, SHAPE, (2, 0))
    decodes.run_iteration()
    before = plane.pool.copy()
    one, table = np.array([1], np.int32), np.array([[0]], np.int32)
    nine = np.ones(9, np.int32), np.zeros((9, 1), np.int32)
    for batches, message in [
        ([CpuSubBatch(0, one, table + plane.num_blocks)], f"block {plane.num_blocks} of {plane.num_blocks}"),
        ([CpuSubBatch(0, one, table), CpuSubBatch(1, one + 4, table)], "context of 5 tokens beside a table of 1"),
        ([CpuSubBatch(0, *nine)], "9 sequences in a sub-batch, allowed are 1 to 8"),
        ([CpuSubBatch(0, one[:0], table[:0])], "0 sequences"),
        ([CpuSubBatch(1, one, table), CpuSubBatch(1, one, table)], "slot 1 twice"),
    ]:
        decodes.iteration += 1
        plane.begin(decodes.iteration, batches, 1)
        plane.submit(batches[0].slot)
        with pytest.raises(PlaneError, match=message):
            plane.wait(batches[0].slot, TIMEOUT_S)
    np.testing.assert_array_equal(plane.pool, before)
    # Submits of refused iterations are skipped, and the region is as good as before.
    decodes.run_iteration()
    assert service.status().iterations == 2
    plane.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epoch": 0}, "epoch"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_q_heads": 5}, "num_kv_heads"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_dim": 257}, "head_dim"),
        ({"block_tokens": 2**30}, "block_tokens"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"exchange_dtype": ""}, "exchange_dtype"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"sliding_windows": (0, -1, 0)}, "sliding_windows"),
        ({"sliding_windows": (4, 4)}, "sliding_windows"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("inf")}, "softcap"),
        ({"num_layers": 257}, "num_layers"),
    ],
)
def test_impossible_shapes_name_the_field(service: Service, change: dict[str, object], field: str) -> None:
    plane = service.attach(6, SHAPE)
    request = pb.OpenRegionRequest(**{"epoch": 7, **asdict(SHAPE), **change})  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.OpenRegion(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(caught.value) == [field]
    assert service.status().epoch == 6, "a refused request leaves the open region alone"
    plane.close()


def test_a_pool_too_small_for_one_block_is_said(service: Service) -> None:
    request = pb.OpenRegionRequest(epoch=7, **asdict(replace(SHAPE, block_tokens=4096)))
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.OpenRegion(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "cpu_attn.kv_bytes: a pool of 4194304 bytes holds no block: one takes 6291456" in str(caught.value.details())
    assert service.segments() == []
