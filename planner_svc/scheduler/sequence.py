"""A request once admitted to the queues: its tokens, where its KV lies, and how far it is scheduled."""

from dataclasses import dataclass, field, replace
from enum import Enum

from svc_common.plan import Sampling, Tier


@dataclass(frozen=True, slots=True)
class Targets:
    """When a request's tokens are due (its SLO)."""

    ttft_s: float
    """From arrival to the first token."""
    tpot_s: float
    """From each token to the next, on average over the request."""


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Requests that are served alike; see [planner.classes] of the configuration."""

    name: str
    targets: Targets | None = None
    """Of a request that brings none of its own."""
    priority: int = 0
    """Higher waits less, and yields last."""
    share: float = 1.0
    """Weight among classes of the same priority."""
    refuses_late: bool = False
    """Refuses a request at once that would come too late."""


DEFAULT_CLASS = ServiceClass("default")


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """What a caller wants generated."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    end_token_ids: frozenset[int]
    targets: Targets | None = None
    """None: as soon as throughput allows."""
    service_class: ServiceClass = DEFAULT_CLASS
    cache_salt: str | None = None
    """Its KV may be shared with sequences that begin alike and have the same; None: with none."""


class State(Enum):
    """Where a sequence stands. `finish` and `reset` lead out of each."""

    WAITING = "waiting"
    """Holds no blocks. Before its first prompt token, or preempted and to be recomputed."""
    RUNNING = "running"
    """Holds blocks in exactly one tier."""
    STEPPING = "stepping"
    """Holds blocks on the host and is in a cohort's step: neither moved nor released before it ends."""
    DRAINING = "draining"
    """Every token is scheduled and the blocks are freed; the last results are still to come."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Scheduled work counts as done: `num_computed_tokens` and `num_in_flight` include plans not yet applied."""

    sequence_id: int
    """Also the order of arrival."""
    request: SequenceRequest
    state: State = State.WAITING
    outputs: list[int] = field(default_factory=list)
    """Tokens of applied results."""
    num_in_flight: int = 0
    """Tokens that plans not yet applied will yield."""
    tier: Tier = Tier.GPU
    """Where its blocks are; of the last stay where it holds none."""
    pool: int = 0
    """Host pool of its blocks, where these are on the host."""
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Of its first full blocks, as far as asked for; see prefix.py."""
    num_cached_tokens: int = 0
    """Of its prompt, found computed when it was first admitted."""
    num_prefill_tokens: int = 0
    """To compute before the first decode of this stay: the prompt and, after a recomputation, outputs."""
    num_computed_tokens: int = 0
    """With KV in `blocks`."""
    num_passed_over: int = 0
    """Plans in a row that could have run it and did not, to keep the processors in balance."""
    num_recomputations: int = 0
    arrival_s: float = 0.0
    due_s: float = 0.0
    """When the next token that is not yet scheduled should come."""
    first_token_s: float | None = None
    """When the first token came or, while it is in flight, is expected. Kept only with targets."""
    is_late: bool = False
    """Its targets can't be met any more."""
    num_once_computed_tokens: int = 0
    """The furthest any stay came: what lies before it is recomputed."""
    num_losses: int = 0
    """Of the executor, while it computed this one; see trials.py."""
    num_losses_in_a_row: int = 0
    """The last ones, without a token in between."""
    num_outputs_at_loss: int = -1
    """At the last of them; -1 before any."""

    @property
    def num_unscheduled(self) -> int:
        """Tokens that may still be asked of the executor."""
        return self.request.max_new_tokens - len(self.outputs) - self.num_in_flight

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and outputs. Whole only while nothing is in flight."""
        return (*self.request.prompt, *self.outputs)

    @property
    def remaining_sampling(self) -> Sampling:
        """Without what was delivered with the first token and is wanted once."""
        sampling = self.request.sampling
        return replace(sampling, num_prompt_logprobs=-1) if self.outputs else sampling

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.outputs)

    def advance_to(self, num_computed_tokens: int) -> None:
        """Its KV is scheduled up to here."""
        self.num_computed_tokens = num_computed_tokens
        self.num_once_computed_tokens = max(num_computed_tokens, self.num_once_computed_tokens)

    def await_recomputation(self) -> None:
        """Forgets everything that an executor held for it. Only applied tokens remain."""
        self.state = State.WAITING
        self.num_in_flight = 0
        self.blocks = []
        self.num_prefill_tokens = 0
        self.num_computed_tokens = 0
        self.num_passed_over = 0
