"""The executor as its watchdog and its health see it: an iteration that runs for too long makes no progress."""

from gpu_svc.servicer import ExecutorServicer
from svc_common.grpc_server import GrpcServer
from svc_common.worker_watch import WorkerWatch


class ExecutorWatch(WorkerWatch):
    """Ready once the model is loaded and until it is to stop."""

    def __init__(self, server: GrpcServer, servicer: ExecutorServicer, stall_s: float) -> None:
        super().__init__(server)
        self._servicer = servicer
        self._stall_s = stall_s

    def stall(self) -> str | None:
        return self._servicer.stall(self._stall_s)

    def report(self) -> str:
        return self._servicer.report()

    @property
    def is_ready(self) -> bool:
        return self._servicer.is_ready
