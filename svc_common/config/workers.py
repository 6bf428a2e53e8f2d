"""[gpu] and [cpu_attn]."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from svc_common.config.telemetry import HostPort
from svc_common.config.types import Address, Group, Section, Size, SizeOrAuto


class GpuConfig(Section):
    """gpu_svc: the device and what lies on it."""

    listen: Address = "127.0.0.1:50052"
    """Address of the executor's gRPC service."""
    metrics_listen: HostPort | None = None
    """Address of an HTTP server with /metrics for Prometheus; port 0 takes a free one. Default: none."""
    socket_group: Group | None = None
    """Group that may connect where `listen` is a Unix socket; default: the service's own user alone."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto": cuda where there is one."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """Type to compute in; "auto" measures fp32 and 16 bits at start-up. "int8" and "int4" are types of the weights
    alone, on device "cpu" only: less memory, faster decodes, and other tokens; see docs/performance.md."""
    kv_bytes: SizeOrAuto = ByteSize(512 * 2**20)
    """Cap of the GPU KV cache. 0 keeps all KV on the host. "auto" takes what all else leaves of `memory_bytes`, which
    then has to be set on device "cpu"."""
    memory_bytes: Size | None = None
    """Cap of weights, buffers for weights, graphs, activations and KV on the device together; default: what is free on
    the device at start. Layers that do not fit beside the others stay in host memory and are streamed to the device in
    each iteration."""
    graph_bytes: Size | None = None
    """On device "cuda": most that captured iterations of decodes take of its memory (CUDA graphs), which are launched
    at once, not kernel by kernel; default: a 32nd of the memory. 0: none. Device "cpu" has none."""
    link_bytes_per_s: Size = ByteSize(0)
    """On device "cpu": bandwidth of the emulated link, each way, that streamed weights and swapped KV cross; 0: as fast
    as copies go."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads of torch on the CPU device; 0: the cores this process may use, less those of cpu_attn_svc."""
    profile: Literal["auto", "always"] = "auto"
    """Operations are measured at start-up, which takes seconds to minutes. "auto" keeps what was measured in the user's
    cache directory, and takes it from there where machine, model and limits are the same; "always" measures at each
    start and keeps nothing."""

    @model_validator(mode="after")
    def _has_quantised_weights_on_the_cpu_only(self) -> "GpuConfig":
        if self.device == "cuda" and self.dtype in ("int8", "int4"):
            raise ValueError(f'dtype "{self.dtype}" is for device "cpu"; on cuda it is not built')
        return self

    @model_validator(mode="after")
    def _asks_of_the_cpu_what_it_has(self) -> "GpuConfig":
        if self.device != "cpu":
            return self
        if self.graph_bytes:
            raise ValueError(f'graph_bytes is {int(self.graph_bytes)}, device "cpu" has no graphs: leave it out')
        if self.kv_bytes == "auto" and self.memory_bytes is None:
            raise ValueError('kv_bytes "auto" on device "cpu" needs memory_bytes: all else here shares its memory')
        return self


class CpuAttnConfig(Section):
    """cpu_attn_svc: the host tier. Of several services, say one for each NUMA node, each has a table of its own,
    [[cpu_attn]], and holds whole sequences."""

    listen: Address = "127.0.0.1:50053"
    """Address of the control gRPC service."""
    metrics_listen: HostPort | None = None
    """Address of an HTTP server with /metrics for Prometheus; port 0 takes a free one. Default: none."""
    socket_group: Group | None = None
    """Group that may connect where `listen` is a Unix socket; default: the service's own user alone."""
    kv_bytes: Size = ByteSize(1024 * 2**20)
    """Size of the service's pool of host KV. 0, of a single one, runs without the service."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Threads at start; changes live by RPC."""
    elastic: bool = False
    """The planner raises the number of threads while the executor waits for them, and lowers it while they idle.

    Not by default: where the device is the CPU, threads beyond `num_threads` run on cores that gpu_svc computes on.
    """
    min_threads: Annotated[int, Field(ge=1)] = 1
    """Fewest threads that the planner leaves."""
    max_threads: Annotated[int, Field(ge=0)] = 0
    """Most threads, by the planner or by RPC; 0: the cores this process may use."""
    instruction_set: Literal["auto", "scalar", "avx2", "avx512", "avx512_bf16", "neon"] = "auto"
    """Kernel to use; "auto": the best this processor runs."""
    segment_dir: Path = Path("/dev/shm")
    """Directory of the shared region."""
    segment_group: Group | None = None
    """Group that may map the shared region, where gpu_svc runs as another user; default: the service's own user alone.
    The service must belong to it."""

    @model_validator(mode="after")
    def _has_threads_within_limits(self) -> "CpuAttnConfig":
        most = self.max_threads or max(self.num_threads, self.min_threads)
        if self.elastic and not self.min_threads <= self.num_threads <= most:
            raise ValueError(
                f"with elastic, num_threads must be from min_threads, {self.min_threads}, "
                f"to max_threads, {self.max_threads or 'the cores there are'}; is {self.num_threads}"
            )
        return self
