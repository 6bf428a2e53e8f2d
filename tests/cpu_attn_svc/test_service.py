"""The real service in a process of its own, driven as gpu_svc drives it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.cpu_attention import TOLERANCE, Service, attention, decode, encode

from cpu_attn_svc import _attention
from neoflex.v1 import cpu_attention_pb2 as pb
from svc_common.tensor_plane import CpuSubBatch, PeerLostError, PlaneError, RegionShape, Report, TensorPlane

SHAPE = RegionShape(
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=32,
    block_tokens=4,
    kv_dtype="fp32",
    exchange_dtype="fp32",
    max_sequences=8,
    softmax_scale=0.2,
    sliding_window=0,
)
TIMEOUT_S = 10.0


class Decodes:
    """Sequences that grow by a token each iteration, in two sub-batches, beside the same in float64."""

    def __init__(self, plane: TensorPlane, shape: RegionShape, num_sequences: tuple[int, int], seed: int = 0) -> None:
        self.plane = plane
        self.shape = shape
        self.random = np.random.default_rng(seed)
        self.iteration = 0
        stride = 16
        blocks = self.random.permutation(plane.num_blocks)[: sum(num_sequences) * stride].astype(np.int32)
        tables = blocks.reshape(-1, stride)
        self.tables = [tables[: num_sequences[0]], tables[num_sequences[0] :]]
        self.contexts = [self.random.integers(0, 10, n).astype(np.int32) for n in num_sequences]
        plane.pool[:] = encode(self.random.standard_normal(plane.pool.shape), shape.kv_dtype)
        self.pool = decode(plane.pool)

    def submit(self, slot: int) -> tuple[int, np.ndarray]:  # type: ignore[type-arg]
        """Fills the slot for one layer; returns what is needed to compare."""
        plane, shape, n = self.plane, self.shape, len(self.contexts[slot])
        q = encode(self.random.standard_normal((n, shape.num_q_heads, shape.head_dim)), shape.exchange_dtype)
        kv = encode(self.random.standard_normal((2, n, shape.num_kv_heads, shape.head_dim)), shape.exchange_dtype)
        plane.q(slot)[:n], plane.k(slot)[:n], plane.v(slot)[:n] = q, kv[0], kv[1]
        plane.submit(slot)
        return n, np.concatenate([decode(q), *decode(kv)], axis=1)

    def check(self, slot: int, layer: int, sent: np.ndarray) -> None:  # type: ignore[type-arg]
        """`out` of a completed submit, and the new token in the pool."""
        shape, context, tables = self.shape, self.contexts[slot], self.tables[slot]
        q, k, v = np.split(sent, [shape.num_q_heads, shape.num_q_heads + shape.num_kv_heads], axis=1)
        kv = decode(encode(np.stack([k, v], axis=1), shape.kv_dtype))
        last = context - 1
        blocks = tables[np.arange(len(context)), last // shape.block_tokens]
        self.pool[layer, blocks, :, :, last % shape.block_tokens] = kv
        want = attention(q, self.pool[layer], tables, context, shape.softmax_scale, shape.sliding_window)
        got = decode(self.plane.out(slot)[: len(context)])
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[shape.exchange_dtype])

    def run_iteration(self) -> Report:
        """Both sub-batches, the second submitted while the first is computed."""
        self.iteration += 1
        for context in self.contexts:
            context += 1
        slots = [slot for slot in (1, 0) if len(self.contexts[slot])]
        self.plane.begin(
            self.iteration,
            [CpuSubBatch(s, self.contexts[s], self.tables[s]) for s in slots],
            sum(map(len, self.tables)),
        )
        for layer in range(self.shape.num_layers):
            sent = {slot: self.submit(slot)[1] for slot in slots}
            for slot in slots:
                self.plane.wait(slot, TIMEOUT_S)
                self.check(slot, layer, sent[slot])
        report = self.plane.finish(TIMEOUT_S)
        np.testing.assert_array_equal(decode(self.plane.pool), self.pool, "nothing else was written")
        return report


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
        {"kv_dtype": "fp16", "sliding_window": 7},
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


EXECUTOR = """
import sys, time
import numpy as np
from svc_common.tensor_plane import CpuSubBatch, RegionShape, TensorPlane
plane = TensorPlane.attach(sys.argv[1], sys.argv[2], 8, RegionShape(**eval(sys.argv[3])))
plane.begin(1, [CpuSubBatch(0, np.array([1], np.int32), np.array([[0]], np.int32))], 1)
plane.submit(0)
plane.wait(0, 10.0)
print("inside an iteration", flush=True)
time.sleep(600)
"""


def test_a_killed_executor_frees_its_region(service: Service) -> None:
    opened = service.open(8, SHAPE)
    command = [sys.executable, "-c", EXECUTOR, opened.path, opened.descriptor_endpoint, repr(asdict(SHAPE))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        assert executor.stdout.readline() == "inside an iteration\n"
        assert service.status().epoch == 8
        shared = psutil.Process(service.process.pid).memory_maps()
        assert any("region" in one.path for one in shared)
        executor.kill()
        service.until(lambda s: s.status().epoch == 0)
    service.until(lambda s: all("region" not in m.path for m in psutil.Process(s.process.pid).memory_maps()))
    status = service.status()
    assert (status.pool_bytes, status.num_blocks, status.blocks_used, status.iterations) == (0, 0, 0, 0)
    plane = service.attach(9, SHAPE)
    Decodes(plane, SHAPE, (1, 1)).run_iteration()
    plane.close()


def test_an_executor_that_closes_frees_its_region(service: Service) -> None:
    service.attach(4, SHAPE).close()
    service.until(lambda s: s.status().epoch == 0)


def test_memory_stays_within_the_configured_bytes(start_service: Callable[..., Service]) -> None:
    kv_bytes = 48 * 2**20
    service = start_service(kv_bytes=kv_bytes).wait_ready()
    process = psutil.Process(service.process.pid)
    before = process.memory_info()
    opened = service.open(1, SHAPE)
    status = service.status()
    assert kv_bytes - SHAPE.block_bytes < status.pool_bytes <= kv_bytes
    assert status.pool_bytes == status.num_blocks * SHAPE.block_bytes
    assert status.num_blocks == opened.num_blocks
    slots_bytes = 2 * 4 * 8 * 32 * (6 + 2 + 2 + 6)
    assert opened.region_bytes <= kv_bytes + slots_bytes + 3 * 4096
    plane = TensorPlane.attach(opened.path, opened.descriptor_endpoint, 1, SHAPE)
    plane.pool[:] = 1
    # Every block of the pool is read and written by the service too.
    per_sequence = opened.num_blocks // 8
    tables = np.arange(8 * per_sequence, dtype=np.int32).reshape(8, -1)
    plane.begin(1, [CpuSubBatch(0, np.full(8, per_sequence * 4, np.int32), tables)], 0)
    for _ in range(SHAPE.num_layers):
        plane.submit(0)
        plane.wait(0, TIMEOUT_S)
    plane.finish(TIMEOUT_S)
    after = process.memory_info()
    assert 0.9 * kv_bytes < after.shared - before.shared <= opened.region_bytes + 2**20
    assert after.rss - before.rss <= opened.region_bytes + 8 * 2**20
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
        ({"sliding_window": -1}, "sliding_window"),
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
    request = pb.OpenRegionRequest(epoch=7, **asdict(replace(SHAPE, num_layers=4096)))
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.OpenRegion(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "cpu_attn.kv_bytes: a pool of 4194304 bytes holds no block: one takes 8388608" in str(caught.value.details())
    assert service.segments() == []


def test_sigterm_leaves_no_file(start_service: Callable[..., Service]) -> None:
    service = start_service().wait_ready()
    service.open(1, SHAPE)  # nobody attaches: the names are still there
    assert len(service.segments()) == 3
    service.process.terminate()
    assert service.process.wait(20) == 0
    assert service.segments() == []


def test_sigterm_in_an_iteration(start_service: Callable[..., Service]) -> None:
    service = start_service().wait_ready()
    plane = service.attach(1, SHAPE)
    plane.begin(1, [CpuSubBatch(0, np.array([1], np.int32), np.array([[0]], np.int32))], 1)
    plane.submit(0)
    plane.wait(0, TIMEOUT_S)
    plane.submit(0)
    plane.wait(0, TIMEOUT_S)
    service.process.terminate()
    with pytest.raises(PeerLostError):
        plane.finish(TIMEOUT_S)
    assert service.process.wait(20) == 0
    plane.close()


def test_a_kill_leaves_nothing_once_attached_and_the_next_start_removes_the_rest(
    start_service: Callable[..., Service],
) -> None:
    service = start_service().wait_ready()
    plane = service.attach(1, SHAPE)
    service.until(lambda s: s.segments() == [])
    service.open(2, SHAPE)
    assert len(service.segments()) == 3
    service.process.kill()
    service.process.wait()
    assert len(service.segments()) == 3
    again = start_service().wait_ready()
    assert again.segments() == []
    plane.close()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"instruction_set": "neon"}, 'cpu_attn.instruction_set: instruction set "neon" does not run here'),
        ({"kv_bytes": 0}, "cpu_attn.kv_bytes is 0"),
        ({"segment_dir": "/nowhere"}, "cpu_attn.segment_dir: /nowhere is no directory"),
    ],
)
def test_what_cannot_be_had_ends_the_start(tmp_path: Path, section: dict[str, object], message: str) -> None:
    if section.get("instruction_set") in _attention.runnable_instruction_sets():
        pytest.skip("this machine has it")
    config = tmp_path / "config.toml"
    config.write_text("[cpu_attn]\n" + "\n".join(f"{key} = {value!r}" for key, value in section.items()))
    command = [sys.executable, "-m", "cpu_attn_svc", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
