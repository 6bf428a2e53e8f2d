"""Takes traces of iterations from a running server while they happen."""

import grpc

from neoflex import errors
from neoflex.access import Access
from neoflex.v1 import trace_pb2 as pb
from neoflex.v1.trace_pb2_grpc import TraceServiceStub
from svc_common.trace import IterationTrace
from svc_common.trace_wire import trace_from_message


def record(
    address: str, seconds: float, num_iterations: int | None = None, access: Access | None = None
) -> list[IterationTrace]:
    """Iterations that run at `address` in the next `seconds`, or the first `num_iterations` of them.

    Raises NeoflexError where nobody answers there, or where the server goes away meanwhile.
    """
    traces: list[IterationTrace] = []
    access = access or Access()
    with access.channel(address) as channel:
        stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        access.bring_key(stub)
        call = stub.TraceIterations(pb.TraceIterationsRequest(), timeout=seconds)
        try:
            while num_iterations is None or len(traces) < num_iterations:
                traces.append(trace_from_message(next(call).trace))
        except StopIteration:
            raise errors.cut_short(address) from None
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # Its own end.
                raise errors.from_call(error, address, greeting=access.greeting) from error
        finally:
            call.cancel()
    return traces
