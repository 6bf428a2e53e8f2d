"""TraceService: relays traces of iterations for as long as a call lasts."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from neoflex.v1 import trace_pb2 as pb
from neoflex.v1 import trace_pb2_grpc
from planner_svc.traces import Traces
from svc_common.trace_wire import trace_to_message


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def TraceIterations(
        self, request: pb.TraceIterationsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.TraceIterationsResponse]:
        async with aclosing(self._traces.listen()) as traces:
            async for trace in traces:
                yield pb.TraceIterationsResponse(trace=trace_to_message(trace))
