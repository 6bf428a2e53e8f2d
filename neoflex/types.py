"""What a server tells of itself, as values; `wire.py` converts them from protobuf. Requests: generation.py."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    architecture: str
    vocabulary_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    compute_dtype: str
    kv_dtype: str
    """On the GPU."""
    host_kv_dtype: str


@dataclass(frozen=True, slots=True)
class Counters:
    """What was done since the planner started; meanings as in ServerCounters of the proto."""

    gpu_only_iterations: int
    asymmetric_iterations: int
    same_layer_iterations: int
    decoupled_iterations: int
    gpu_attended_tokens: int
    cpu_attended_tokens: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    preemptions: int
    recomputed_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    accepted_requests: int
    finished_requests: int
    refused_requests: int
    executor_busy_ns: int
    cpu_wait_ns: int
    cpu_attention_ns: int
    planning_ns: int
    cpu_threads_grown: int
    cpu_threads_shrunk: int
    cached_tokens: int
    """Of prompts, found in the prefix cache."""
    stalls: int
    executor_losses: int
    """Times gpu_svc was lost while it was to serve."""

    @property
    def offloading_iterations(self) -> int:
        """Those with sequences attended on the CPU, whatever the mode."""
        return self.asymmetric_iterations + self.same_layer_iterations + self.decoupled_iterations

    def since(self, earlier: "Counters") -> "Counters":
        """What was done between two looks."""
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """How requests of a class are served, and how that went since the planner started."""

    name: str
    is_default: bool
    ttft_s: float | None
    """Targets of requests that bring none; both None or neither."""
    tpot_s: float | None
    priority: int
    share: float
    refuses_late: bool
    """Refuses a request at once that would miss its targets."""
    requests_in_time: int
    requests_late: int
    requests_refused: int


@dataclass(frozen=True, slots=True)
class HostPool:
    """KV in host memory beside one CPU attention service."""

    num_blocks: int
    """0 while the service is not attached."""
    num_threads: int
    min_threads: int
    """Within these the planner changes them; 0 where it leaves their number alone."""
    max_threads: int
    error: str
    """Why the service is not attached."""


@dataclass(frozen=True, slots=True)
class CalibrationFactors:
    """By what the planner multiplies each part of the cost that it was told at the start; 1: as told."""

    weights: float
    """Linear operations: what a single token takes."""
    tokens: float
    """Linear operations: what further tokens add."""
    prefill: float
    gpu_decode: float
    overhead: float
    """Of an iteration, and of trips to the CPU on the GPU's side."""
    contention: float
    """A share: by how much of the time in which both processors work the GPU's work gets longer. 0: as told."""
    cpu_decode: float
    """In the first host pool."""
    head: float
    swap: float
    further_pools: Mapping[int, float]
    """As cpu_decode, by the pool's number; missing while nothing is known."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by what they are for and where they lie. On device "cpu" both are the host's memory."""

    device_weight_bytes: int
    device_buffer_bytes: int
    """That weights are streamed through."""
    device_kv_bytes: int
    host_weight_bytes: int
    """There once for all who stream from there or compute with them."""
    host_kv_bytes: int
    device_activation_bytes: int = 0
    """Of the largest batch."""
    device_graph_bytes: int = 0
    """At most."""
    device_memory_bytes: int = 0
    """For all of these; 0 where it is not known."""

    @property
    def device_bytes(self) -> int:
        placed = self.device_weight_bytes + self.device_buffer_bytes + self.device_kv_bytes
        return placed + self.device_graph_bytes + self.device_activation_bytes

    @property
    def host_bytes(self) -> int:
        """Without what lies on a device "cpu"."""
        return self.host_weight_bytes + self.host_kv_bytes


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    uptime_s: float
    device: str
    block_tokens: int
    block_bytes: int
    """Bytes of a KV block over all layers on the GPU."""
    host_block_bytes: int
    gpu_blocks: int
    host_blocks: int
    """0 while no CPU attention service is attached."""
    cpu_attention_threads: int
    cpu_attention_min_threads: int
    """Within these the planner changes them; 0 where it leaves their number alone."""
    cpu_attention_max_threads: int
    counters: Counters
    service_classes: tuple[ServiceClass, ...] = ()
    """By name."""
    host_pools: tuple[HostPool, ...] = ()
    """One for each CPU attention service, in the order of the configuration."""
    calibration: CalibrationFactors | None = None
    """None before the executor's first epoch."""
    memory_use: MemoryUse | None = None
    """None before the executor's first epoch."""
    not_ready: str = ""
    """Why no request would be served now; empty where one would be."""
    cpu_attention_addresses: tuple[str, ...] = ()
    """Where the planner reaches the CPU attention services, in the order of the configuration."""


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Requests of one service class."""

    name: str
    waiting_requests: int
    running_requests: int


@dataclass(frozen=True, slots=True)
class Load:
    waiting_requests: int
    running_requests: int
    max_waiting_requests: int
    gpu_blocks_used: int
    gpu_blocks_total: int
    host_blocks_used: int
    host_blocks_total: int
    classes: tuple[ClassLoad, ...] = ()
    """By name."""
    host_pool_blocks_used: tuple[int, ...] = ()
    """By pool."""
