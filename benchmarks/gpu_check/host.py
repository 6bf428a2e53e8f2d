"""The real CPU attention worker in a process of its own, and its pool as the executor's host tier."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from gpu_check.setting import Setting
from gpu_svc.cpu_attention_client import host_pool, region_shape
from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostPool, HostTier
from gpu_svc.limits import Limits
from svc_common.cores import usable_cores
from svc_common.decoder.dtypes import dtype_name
from svc_common.memory import usable_memory_bytes
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import TensorPlane

_SHARED_MEMORY = Path("/dev/shm")
_POOL_BYTES = 8 * 2**30
_TINY_POOL_BYTES = 4 * 2**20


class WorkerError(Exception):
    """The worker ended, or could not make the region."""


class Worker:
    """Holds one region at a time."""

    def __init__(self, num_threads: int, kv_bytes: int, directory: Path, without: Sequence[str]) -> None:
        self.num_threads = num_threads
        self.kv_bytes = kv_bytes
        self.instruction_set = ""
        options = {"num_threads": num_threads, "directory": str(directory), "without": list(without)}
        command = [sys.executable, "-m", "gpu_check.worker", json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def attach(
        self,
        executor: Executor,
        epoch: int,
        limits: Limits,
        policy: ExecutionPolicy | None = None,
        model: str = "",
        by_thread: bool = False,
    ) -> HostTier:
        """A new region for an epoch. `by_thread`: a GPU is to do nothing with it by itself. `model`: a directory with a
        shape, where the policy has CPU layers.
        """
        decoder = executor.decoder
        shape = region_shape(decoder, executor.kv_shape, limits, policy, executor.num_gpu_blocks(policy))
        wanted = {
            "epoch": epoch,
            "shape": asdict(shape),
            "kv_bytes": self.kv_bytes,
            "model": model,
            "weight_dtype": dtype_name(decoder.weight_dtype),
            "digest": decoder.spec.digest,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise WorkerError("the CPU attention worker has ended, see gpu_check.log") from error
        if "error" in answer:
            raise WorkerError(f"the CPU attention worker: {answer['error']}")
        self.instruction_set = answer["instruction_set"]
        plane = TensorPlane.attach(answer["path"], answer["endpoint"], epoch, shape)
        if by_thread:
            return HostTier([HostPool(plane, self.num_threads)])
        return HostTier([host_pool(plane, self.num_threads, decoder.device)])

    def end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # It has ended.
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def cpu_attention(setting: Setting) -> Iterator[Worker]:
    """With as many threads and as much memory as the machine can spare beside the executor."""
    directory = Path(tempfile.mkdtemp(prefix="nfx-", dir=_directory(setting)))
    num_threads = 1 if setting.tiny else max(1, usable_cores() - 2)
    worker = Worker(num_threads, _pool_bytes(setting, directory), directory, setting.without)
    try:
        yield worker
    finally:
        worker.end()
        shutil.rmtree(directory, ignore_errors=True)


def _directory(setting: Setting) -> Path:
    """Shared memory where it holds a pool; containers often have 64 MB of it, and then it is a disk."""
    wanted = _TINY_POOL_BYTES if setting.tiny else _POOL_BYTES // 4
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) and _free(_SHARED_MEMORY) > 2 * wanted:
        return _SHARED_MEMORY
    return setting.scratch


def _pool_bytes(setting: Setting, directory: Path) -> int:
    if setting.tiny:
        return _TINY_POOL_BYTES
    return min(_POOL_BYTES, _free(directory) // 2, usable_memory_bytes() // 4) // 4096 * 4096


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free
