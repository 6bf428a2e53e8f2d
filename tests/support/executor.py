"""Asks the inner services of a running stack what they hold."""

import grpc

from neoflex.supervisor import LocalStack
from neoflex.v1 import cpu_attention_pb2, cpu_attention_pb2_grpc, executor_pb2, executor_pb2_grpc


def executor_status(stack: LocalStack) -> executor_pb2.GetExecutorStatusResponse:
    with grpc.insecure_channel(stack.config.gpu.listen) as channel:
        return executor_pb2_grpc.ExecutorServiceStub(channel).GetExecutorStatus(
            executor_pb2.GetExecutorStatusRequest(), timeout=10
        )


def cpu_attention_status(stack: LocalStack, index: int = 0) -> cpu_attention_pb2.GetCpuAttentionStatusResponse:
    with grpc.insecure_channel(stack.config.cpu_attn[index].listen) as channel:
        return cpu_attention_pb2_grpc.CpuAttentionServiceStub(channel).GetCpuAttentionStatus(
            cpu_attention_pb2.GetCpuAttentionStatusRequest(), timeout=10
        )
