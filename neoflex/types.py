"""What the client library takes and returns, as values; `wire.py` converts them to and from protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model's end token, a stop token or a stop text."""
    LENGTH = "length"
    """max_tokens or the model's context length."""
    TIME_LIMIT = "time_limit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. What is absent takes the server's default."""

    token_ids: Sequence[int]
    """The prompt as token ids, used as they are; in place of text."""
    messages: Sequence[Message | Mapping[str, str]]
    """The prompt as a conversation, rendered with the model's chat template; in place of text."""
    request_id: str
    """Unique among running requests; made up where absent."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    """Taken from the logits of tokens that the answer contains."""
    frequency_penalty: float
    """The same, for each time that it contains them."""
    repetition_penalty: float
    """Divides the logits of tokens that prompt or answer contain; 1 changes nothing."""
    logit_bias: Mapping[int, float]
    """Added to logits, by token id."""
    json_schema: str | Mapping[str, object] | bool
    """The answer is a JSON value that it describes. At most one of this and the next four."""
    json_object: bool
    """The answer is any JSON object."""
    regex: str
    """The whole answer matches it."""
    ebnf: str
    """The answer is of this grammar, in GBNF, with a rule named "root"."""
    choice: Sequence[str]
    """The answer is one of these texts."""
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    time_limit_s: float
    """Ends the request with the text so far; `timeout` ends it with an error."""
    cache_salt: str
    """KV is shared only with requests that have the same; "" is one, too."""
    logprobs: int
    """0 for the chosen token only, n for the n likeliest too."""
    prompt_logprobs: int
    """The same for the prompt's tokens."""
    service_class: str
    """One of the server's (`ServerInfo.service_classes`)."""
    ttft_s: float
    """Target of the time to the first token; the class's where absent."""
    tpot_s: float
    """Target of the mean time from each token to the next; the class's where absent."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """Most likely first."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    matched: str | int | None = None
    """The stop text, or the end or stop token, where reason is STOP."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted, and where the time went, by the server's clock."""

    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_s: float
    duration_s: float
    recomputations: int
    cached_tokens: int = 0
    """Of the prompt, whose KV was found in the prefix cache."""
    targets_met: bool | None = None
    """Whether its tokens came when they were due; None where nothing was due."""

    @property
    def time_per_output_token_s(self) -> float:
        """Mean time between tokens after the first; 0 where there was at most one."""
        if self.completion_tokens < 2:
            return 0.0
        return (self.duration_s - self.time_to_first_token_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and new tokens. Text may lag behind the tokens."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """All in the first delta with a token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish: Finish
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each token of the prompt but the first, where asked for."""


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
