"""All checks, one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path

from neoflex.doctor import doors, files, processors, system
from neoflex.doctor.finding import Finding
from svc_common.config import Config

_CHECKS: tuple[Callable[[Config, Path], Iterator[Finding]], ...] = (
    processors.model,
    processors.processor,
    processors.cores,
    system.segment,
    system.huge_pages,
    system.numa,
    system.clock,
    system.governor,
    system.open_files,
    files.files,
    doors.access,
    system.num_tasks,
    doors.addresses,
    system.cache,
)


def examine(config: Config, root: Path = Path("/")) -> Iterator[Finding]:
    """Every finding, the good ones too. `root` is where /proc, /sys and the like are read."""
    gpu = processors.gpu_name()
    yield processors.gpu(config, gpu)
    yield processors.memory(config, gpu is None and config.gpu.device != "cuda", root)
    for check in _CHECKS:
        yield from check(config, root)
    if gpu is not None:
        yield processors.locked_memory(config)
