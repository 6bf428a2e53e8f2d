"""Spans: which are kept, and how their context crosses between processes (W3C Trace Context)."""

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes


class LinkedSampler(Sampler):
    """As the parent was sampled; of spans without one a share, and all that are linked to one that was sampled.

    An iteration has no parent, for it belongs to all its requests; it is kept where one of these is.
    """

    def __init__(self, ratio: float) -> None:
        self._by_parent = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        is_linked = any(link.context.trace_flags.sampled for link in links or ())
        sampler = ALWAYS_ON if is_linked else self._by_parent
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return "linked, or as the parent, or a share"
