"""A planner as it serves, over an executor that computes nothing and takes as long as its tables say.

Beside the simulator it shows what the simulator leaves out, free of a noisy machine's processors: the planner's own
time, gRPC, the order of events, streams.
"""

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from gpu_svc.executor import Status
from gpu_svc.kv_cache import KvShape
from gpu_svc.limits import Limits
from gpu_svc.servicer import ExecutorServicer
from gpu_svc.tables import Tables
from neoflex import Client
from neoflex.placement import to_toml
from neoflex.v1 import executor_pb2_grpc
from planner_svc.simulator.executor import SimulatedExecutor
from svc_common.config import Config, parse
from svc_common.grpc_server import GrpcServer
from svc_common.model.spec import ModelSpec
from svc_common.plan import ExecutionError, IterationPlan, IterationResult
from svc_common.policy import ExecutionPolicy

_READY_S = 120.0


class PacedExecutor:
    """What ExecutorServicer asks of an Executor. Its thread sleeps through each iteration."""

    def __init__(
        self, played: SimulatedExecutor, tables: Tables, spec: ModelSpec, shape: KvShape, num_gpu_blocks: int
    ) -> None:
        self.decoder = SimpleNamespace(device=SimpleNamespace(type="cpu"), weight_dtype=shape.dtype, spec=spec)
        self.kv_shape = shape
        self.last_epoch = 0
        self.memory = self.grammars = None
        self.resident_layers = self.streamed_bytes = self.link_bytes_per_s = 0
        self.weight_bytes = self.buffer_bytes = self.host_weight_bytes = 0
        self.streamed_layers = range(0)
        self._played = played
        self._tables = tables
        self._num_gpu_blocks = num_gpu_blocks

    def num_gpu_blocks(self, policy: ExecutionPolicy) -> int:
        return self._num_gpu_blocks

    def fitting(self, policy: ExecutionPolicy) -> ExecutionPolicy:
        """All of them fit: there are no weights."""
        return policy

    def close_epoch(self) -> None:
        """Nothing is held."""

    def open_epoch(self, number: int, limits: Limits, host: None, policy: ExecutionPolicy) -> None:
        self.last_epoch = number

    def profile(self) -> Tables:
        return self._tables

    def run(self, plan: IterationPlan, received_ns: int, begun: Callable[[], None]) -> IterationResult:
        start_s = time.perf_counter()
        begun()
        seconds, result = self._played.run(plan)
        time.sleep(max(0.0, start_s + seconds - time.perf_counter()))
        return result

    def fail(self, epoch: int, iteration: int, kind: ExecutionError, message: str) -> IterationResult:
        return IterationResult(epoch, iteration, error=kind, error_message=message)

    def status(self) -> Status:
        return Status(self.last_epoch, 0, 0, 0, 0, 0, 0, False)


@contextmanager
def running(stack: Config, executor: PacedExecutor) -> Iterator[str]:
    """The address of a planner process that serves by `executor` as that of `stack` does, on the GPU alone."""
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:
        planner_address, gpu_address = f"unix:{directory}/planner.sock", f"unix:{directory}/gpu.sock"
        planner_values = stack.planner.model_dump(exclude_none=True)
        config = parse(
            {
                "model": stack.model.model_dump(),
                "planner": {**planner_values, "listen": planner_address, "mode": "gpu_only"},
                "gpu": {"listen": gpu_address},
                "cpu_attn": {"kv_bytes": 0},
            },
            "benchmark",
        )
        path = Path(directory) / "config.toml"
        path.write_text(to_toml(config))
        command = (sys.executable, "-P", "-m", "planner_svc", "--config", str(path))
        with _serving(executor, gpu_address), subprocess.Popen(command, stderr=subprocess.DEVNULL) as planner:
            try:
                with Client(planner_address) as client:
                    client.wait_until_ready(_READY_S)
                yield planner_address
            finally:
                planner.terminate()


@contextmanager
def _serving(executor: PacedExecutor, address: str) -> Iterator[None]:
    """ExecutorService, on an event loop in a thread of its own."""
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        with ThreadPoolExecutor(1) as thread:
            server = GrpcServer(address, [])
            servicer = ExecutorServicer(cast(Any, executor), thread, ())
            server.register(executor_pb2_grpc.add_ExecutorServiceServicer_to_server, servicer)
            await server.start()
            started.set()
            await stop.wait()
            await server.stop(0)

    serving = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    serving.start()
    started.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        serving.join()
        loop.close()
