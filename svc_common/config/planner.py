"""[planner] and its service classes."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from svc_common.config.types import Address, Group, Section

Mode = Literal["auto", "gpu_only", "asymmetric", "same_layer", "decoupled"]
PhasePolicy = Literal["auto", "resident", "offload", "partition", "cpu_only"]
_MAX_CLASSES = 32
_CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TARGET_S = 86_400.0


class ClassConfig(Section):
    """A service class: how its requests are served beside others'. [planner.classes.NAME]"""

    ttft_s: Annotated[float, Field(gt=0, le=MAX_TARGET_S)] | None = None
    """Target of the time from arrival to the first token. Together with `tpot_s` or not at all: a class without targets
    gets what throughput allows."""
    tpot_s: Annotated[float, Field(gt=0, le=MAX_TARGET_S)] | None = None
    """Target of the mean time from each token to the next."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Among prompts that wait, those of a higher priority go first, and they are preempted last. A prompt that has
    waited 20 times its `ttft_s` (of 60 s where it has none; of a target that it brings itself, no less than the class's
    or 1 s) goes with the highest priority that waits."""
    share: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """Among classes of one priority that all have prompts waiting, tokens of prompts and answers are shared out in
    proportion to this. A class that needs less leaves the rest to the others, and saves up nothing."""
    on_overload: Literal["queue", "refuse"] = "queue"
    """A request that by prediction will miss its targets waits behind those that can keep theirs, or is refused at once
    with RESOURCE_EXHAUSTED and the time after which to try again."""

    @model_validator(mode="after")
    def _has_both_targets_or_none(self) -> "ClassConfig":
        if (self.ttft_s is None) != (self.tpot_s is None):
            missing = "ttft_s" if self.ttft_s is None else "tpot_s"
            raise ValueError(f"ttft_s and tpot_s go together, {missing} is missing")
        return self


def _checked_classes(classes: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
    if not 1 <= len(classes) <= _MAX_CLASSES:
        raise ValueError(f"must be from 1 to {_MAX_CLASSES} classes, are {len(classes)}")
    for name in classes:
        if not _CLASS_NAME.fullmatch(name):
            raise ValueError(f"a name must be of 1 to 64 letters, digits, - and _, is {name!r}")
    return classes


class PlannerConfig(Section):
    """planner_svc: the door, the queues and the scheduler."""

    listen: Address = "127.0.0.1:50051"
    """Address of the public gRPC service; `host:port` or `unix:path`."""
    api_keys_file: Path | None = None
    """API keys, one a line, "#" begins a comment; read again when it changes. All calls but those of the health service
    then need `authorization: Bearer KEY` in their metadata. Default: whoever reaches the address may call."""
    client_certificates: bool = False
    """With TLS, refuses whoever shows no certificate of `tls.ca`."""
    socket_group: Group | None = None
    """Group that may connect where `listen` is a Unix socket; default: the service's own user alone."""
    mode: Mode = "auto"
    """"auto" chooses each iteration by predicted throughput. The others force how sequences on the host decode: not at
    all, in two sub-batches where both have work, in one batch, or as a cohort at its own pace."""
    prefill_policy: PhasePolicy = "auto"
    """Where the model's layers run for prompts: on the device, "resident" or "offload", which streams the weights of
    those that don't fit there; the first `cpu_layers` in cpu_attn_svc, "partition"; or all of them there, "cpu_only",
    with embedding, head and sampling still in gpu_svc. "auto": on the device; for both phases, where not all fit
    there, the planner chooses, by what it measured and by the requests that come."""
    decode_policy: PhasePolicy = "auto"
    """The same for decodes, which must have at least as many layers in cpu_attn_svc as prompts."""
    cpu_layers: Annotated[int, Field(ge=0)] = 0
    """Layers of a "partition" that cpu_attn_svc computes; from 1 to one less than the model has."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait; further ones are refused."""
    max_running_sequences: Annotated[int, Field(ge=1, le=4096)] = 256
    """Sequences that hold KV blocks at a time."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Tokens one iteration computes at most: decodes and prefill chunks together."""
    max_sequence_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and answer together; default: the model's context length."""
    executor_wait_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """So long requests in hand wait for a gpu_svc that was lost to come back, its model loaded; then they are computed
    again from prompt and answer so far, and go on. Later they end with UNAVAILABLE. New ones are refused meanwhile."""
    classes: Annotated[dict[str, ClassConfig], AfterValidator(_checked_classes)] = Field(
        default_factory=lambda: {"default": ClassConfig()}
    )
    """Service classes by name, at most 32. Where the file has none there is one, "default", without targets."""
    default_class: str = "default"
    """Class of requests that name none; one of `classes`."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that requests in hand may go on for after SIGTERM. The other services wait a few seconds longer, and
    whoever stops the processes must wait 10 s longer before he kills them."""
    watchdog_s: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """Seconds without progress, with work to do, after which a service is not alive any more and writes its state. More
    than any iteration takes, weights that it streams included."""
