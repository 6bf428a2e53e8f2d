"""The real service in a process of its own: what it holds, and what is left when either side ends."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from support.cpu_attention import Service
from support.cpu_decodes import SHAPE, TIMEOUT_S, Decodes
from support.processes import mapped_bytes, private_bytes

from neoflex.health import complaint
from svc_common.cpu_kernels import runnable_instruction_sets
from svc_common.tensor_plane import CpuSubBatch, PeerLostError, TensorPlane

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
    private_before = private_bytes(service.process.pid)
    opened = service.open(1, SHAPE)
    status = service.status()
    assert kv_bytes - SHAPE.block_bytes < status.pool_bytes <= kv_bytes
    assert status.pool_bytes == status.num_blocks * SHAPE.block_bytes
    assert status.num_blocks == opened.num_blocks
    # All of it is there already, in whichever pages this machine gives.
    assert kv_bytes < mapped_bytes(service.process.pid, opened.path) <= opened.region_bytes
    assert 0 <= status.huge_page_bytes <= opened.region_bytes
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
    assert 0.9 * kv_bytes < mapped_bytes(service.process.pid, opened.path) <= opened.region_bytes
    assert private_bytes(service.process.pid) - private_before <= 8 * 2**20
    plane.close()


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


def test_an_executor_is_served_until_it_lets_go(start_service: Callable[..., Service]) -> None:
    service = start_service(drain_s=600).wait_ready()
    plane = service.attach(1, SHAPE)
    Decodes(plane, SHAPE, (1, 1)).run_iteration()
    assert complaint(service.listen, "readiness", 20) is None
    service.process.terminate()
    service.until(lambda s: s.status().stopping)
    assert complaint(service.listen, "readiness", 20) == f"{service.listen}: readiness is NOT_SERVING"
    assert complaint(service.listen, "liveness", 20) is None
    with pytest.raises(grpc.RpcError) as refused:
        service.open(2, SHAPE)
    assert refused.value.details() == "the service has been told to stop"
    Decodes(plane, SHAPE, (5, 2)).run_iteration()  # What runs ends, and so does what comes.
    assert service.process.poll() is None
    plane.close()
    assert service.process.wait(20) == 0
    assert service.segments() == []


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
        ({"segment_dir": "/proc/self"}, "cpu_attn.segment_dir: nothing can be made in /proc/self: "),
        ({"kv_bytes": "8000TiB"}, "cpu_attn.kv_bytes is 8796093022208000 bytes, "),
        ({"segment_group": "nobody-s"}, "cpu_attn.segment_group: there is no group 'nobody-s' here"),
        ({"socket_group": "0"}, "cpu_attn.socket_group has no effect: cpu_attn.listen is 127.0.0.1:50053"),
        ({"listen": "unix:/nowhere/s"}, "cpu_attn.listen: cannot listen on unix:/nowhere/s"),
    ],
)
def test_what_cannot_be_had_ends_the_start(tmp_path: Path, section: dict[str, object], message: str) -> None:
    if section.get("instruction_set") in runnable_instruction_sets():
        pytest.skip("this machine has it")
    config = tmp_path / "config.toml"
    config.write_text("[cpu_attn]\n" + "\n".join(f"{key} = {value!r}" for key, value in section.items()))
    command = [sys.executable, "-m", "cpu_attn_svc", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "1"], "cpu_attn[1].segment_dir: /nowhere is no directory"),
        (["--index", "2"], "--index must be from 0 to 1, is 2"),
        (["--index", "x"], "usage: python -m cpu_attn_svc --config FILE.toml [--index NUMBER]"),
    ],
)
def test_a_process_is_one_of_several_services(tmp_path: Path, arguments: list[str], message: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[[cpu_attn]]\nlisten = "unix:/a"\n[[cpu_attn]]\nlisten = "unix:/b"\nsegment_dir = "/nowhere"\n')
    command = [sys.executable, "-m", "cpu_attn_svc", "--config", str(config), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
