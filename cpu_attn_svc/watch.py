"""The service as its watchdog and its health see it: a layer that is computed for too long makes no progress.

Waiting for the executor is no stall, however long: that is the executor's.
"""

from cpu_attn_svc.host import AttentionHost
from cpu_attn_svc.servicer import CpuAttentionServicer
from svc_common.grpc_server import GrpcServer
from svc_common.worker_watch import WorkerWatch


class AttentionWatch(WorkerWatch):
    """Ready until it is to stop."""

    def __init__(self, server: GrpcServer, host: AttentionHost, servicer: CpuAttentionServicer, stall_s: float) -> None:
        super().__init__(server)
        self._host = host
        self._servicer = servicer
        self._stall_s = stall_s

    def stall(self) -> str | None:
        computing_s = self._host.computing_s
        return f"a layer is being computed for {computing_s:.1f} s" if computing_s > self._stall_s else None

    def report(self) -> str:
        host, status = self._host, self._host.status()
        return (
            f"{status}; in use {host.is_in_use}, stopping {self._servicer.is_stopping}\n"
            f"{host.num_threads} threads of at most {host.max_threads}; in a layer for {host.computing_s:.3f} s"
        )

    @property
    def is_ready(self) -> bool:
        return not self._servicer.is_stopping
