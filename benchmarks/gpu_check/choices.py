"""What the executor chose at its start, by what it says in its log, and where its graphs don't come to be: as rows."""

import logging
from collections.abc import Callable

from gpu_check.rows import Report
from gpu_check.setting import Setting
from gpu_svc.executor import Executor
from gpu_svc.graph_keys import GraphKey
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits

NO_GRAPHS = "device cpu has no graphs"
NO_STREAM = "device cpu has no streams that could ring"
_GRAPHS = ("gpu_svc.graphs", "gpu_svc.executor")
_CHOICES = (
    "gpu_svc.device_kernels",
    "gpu_svc.attention",
    "gpu_svc.cuda.driver",
    "gpu_svc.cuda.pinned",
    "gpu_svc.cuda.streams",
)
"""Loggers that tell of them."""
_MOST_LINES = 6


class Heard(logging.Handler):
    """Lines of gpu_svc's log in this process, of which some say what was chosen, and why."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[str, str]] = []
        logging.getLogger("gpu_svc").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.getMessage()))

    def text(self, loggers: tuple[str, ...]) -> str:
        """The first lines of these and the last, which are then forgotten."""
        lines = list(dict.fromkeys(line for name, line in self._lines if name in loggers))
        self._lines = [(name, line) for name, line in self._lines if name not in loggers]
        return "; ".join(lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "...", lines[-1]])

    def graphs_text(self) -> str:
        """Of the epoch that was opened last."""
        return self.text(_GRAPHS) or "no room for graphs beside weights and KV"


def captured(executor: Executor) -> list[GraphKey]:
    """Iterations of the open epoch that are replayed."""
    epoch = executor._epoch
    return epoch._graphs.keys if epoch is not None and epoch._graphs is not None else []


def report_host(report: Report, host: HostTier, log: Heard) -> None:
    """One row on doorbells, swaps and pinning; after a first region was attached."""
    side = host.only_pool.on_device
    by = {True: "the device's streams", False: "the executor's thread"}
    streams = {"doorbells": host.uses_stream_doorbells, "swaps": side is not None and side.blocks is not None}
    pinned = side is not None
    detail = ", ".join(f"{what} by {by[chosen]}" for what, chosen in streams.items())
    detail += f", the pool is {'' if pinned else 'not '}pinned"
    said = log.text(_CHOICES)
    report.figure("what was chosen", f"{detail}{'; ' if said else ''}{said}", by_stream=streams, pinned=pinned)


def captured_text(executor: Executor) -> str:
    keys = captured(executor)
    num_mixed = sum(key.has_cpu_work for key in keys)
    return f"captured are {len(keys) - num_mixed} sizes on the GPU alone, {num_mixed} with CPU work"


def report_graphs(setting: Setting, report: Report, executor: Executor, log: Heard) -> None:
    """One row on those of the open epoch."""
    if not setting.on_cuda:
        report.not_run("graphs", NO_GRAPHS)
        return
    keys = captured(executor)
    if not keys:
        report.not_run("graphs", log.graphs_text())
        return
    num_mixed = sum(key.has_cpu_work for key in keys)
    report.figure("graphs", log.graphs_text(), on_gpu=len(keys) - num_mixed, with_cpu_work=num_mixed)


def open_epoch(
    report: Report, executor: Executor, number: int, limits: Limits, attach: Callable[[], HostTier | None]
) -> HostTier | None:
    """With what `attach` gives. Where a capture beside the CPU has ended it, a row says so, and it is opened anew, now
    eager beside the CPU: as the planner does.
    """
    host = attach()
    try:
        executor.open_epoch(number, limits, host)
    except Exception as error:
        if executor._graphs is None:
            raise
        report.broke("graphs with CPU work", False, f"{type(error).__name__}: {error}; from here on these are eager")
        executor.close_epoch()
        executor._graphs.with_cpu_work = False
        host = attach()
        executor.open_epoch(number, limits, host)
    return host
