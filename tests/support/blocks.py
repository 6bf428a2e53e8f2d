"""KV blocks in use, as every process of a stack counts them."""

from neoflex import Client
from neoflex.supervisor import LocalStack
from support.executor import cpu_attention_status, executor_status


def blocks_held(stack: LocalStack) -> tuple[int, ...]:
    """Planner's GPU and host, executor's GPU and host, CPU attention's."""
    with Client(stack.address) as client:
        load = client.load()
    executor = executor_status(stack)
    return (
        load.gpu_blocks_used,
        load.host_blocks_used,
        executor.gpu_blocks_used,
        executor.host_blocks_used,
        cpu_attention_status(stack).blocks_used,
    )
