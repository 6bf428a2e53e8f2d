"""Many requests on little memory: all finish, the pipeline runs, and memory stays within its caps."""

import asyncio

from support.executor import executor_status
from support.processes import mapped_bytes, private_bytes

from neoflex import AsyncClient

NUM_REQUESTS = 64
PROMPT_TOKENS, NEW_TOKENS = 96, 32


def test_64_requests_with_a_tenth_of_the_kv_on_the_gpu(start, prompts):
    gpu_kv_bytes = NUM_REQUESTS * (PROMPT_TOKENS + NEW_TOKENS) * 46_080 // 10
    host_kv_bytes = 400 * 2**20
    stack = start(planner={"mode": "auto"}, gpu={"kv_bytes": gpu_kv_bytes}, cpu_attn={"kv_bytes": host_kv_bytes})
    private_before = {name: private_bytes(pid) for name, pid in stack.pids.items()}

    async def run() -> list[int]:
        async with AsyncClient(stack.address) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(
                        token_ids=prompts[-1][i : i + PROMPT_TOKENS],
                        max_tokens=NEW_TOKENS,
                        ignore_eos=True,
                        timeout=300,
                    )
                    for i in range(NUM_REQUESTS)
                )
            )
            return [len(answer.token_ids) for answer in answers]

    assert asyncio.run(run()) == [NEW_TOKENS] * NUM_REQUESTS
    info = stack.server_info()
    assert info.counters.offloading_iterations > 0
    assert info.counters.cpu_attended_tokens > 0

    # Accounting: what the processes say they hold.
    assert info.gpu_blocks * info.block_bytes <= gpu_kv_bytes
    assert info.host_blocks * info.block_bytes <= host_kv_bytes
    assert executor_status(stack).gpu_kv_bytes <= gpu_kv_bytes
    # What the kernel says: shared memory is the pool and its exchange slots, private memory grows by buffers only.
    cpu_attn = stack.pids["cpu_attn_svc"]
    assert mapped_bytes(cpu_attn, "neoflex-") <= host_kv_bytes + 16 * 2**20
    assert private_bytes(cpu_attn) - private_before["cpu_attn_svc"] <= 64 * 2**20
    assert private_bytes(stack.pids["gpu_svc"]) - private_before["gpu_svc"] <= gpu_kv_bytes + 400 * 2**20
