"""How many threads a cpu_attn_svc computes with: asked for, and changed while it runs."""

from dataclasses import dataclass

import grpc

from neoflex.access import Access
from neoflex.errors import from_call
from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc


@dataclass(frozen=True, slots=True)
class Threads:
    """Of one service."""

    num_threads: int
    """From its next iteration on."""
    max_threads: int
    """That its configuration and its cores allow."""


def threads(address: str, wanted: int | None, timeout_s: float, access: Access) -> Threads:
    """What the service at `host:port` or `unix:path` has, after a change to `wanted` where that is given.

    Raises NeoflexError where nobody answers, and where `wanted` is below 1 or above what the service allows;
    AccessError where a file of `access` can't be read.
    """
    with access.channel(address) as channel:
        stub = cpu_attention_pb2_grpc.CpuAttentionServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            if wanted is not None:
                stub.SetThreads(cpu_attention_pb2.SetThreadsRequest(num_threads=wanted), timeout=timeout_s)
            status = stub.GetCpuAttentionStatus(cpu_attention_pb2.GetCpuAttentionStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_call(error, address, timeout_s, access.greeting) from error
    return Threads(status.num_threads, status.max_threads)
