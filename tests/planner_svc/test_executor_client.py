"""Whatever becomes of a call, what the planner hears is that the executor is lost."""

import pytest

from planner_svc.executor_client import ExecutorClient, ExecutorLostError
from svc_common.plan import IterationPlan, Mode

PLAN = IterationPlan(1, 1, Mode.GPU_ONLY)


async def test_plans_for_an_executor_that_is_not_there() -> None:
    client = ExecutorClient("127.0.0.1:1")
    stream = client.execute()
    with pytest.raises(ExecutorLostError, match="UNAVAILABLE"):
        await stream.send(PLAN)
    # The call has ended, and nobody has read that from its results.
    with pytest.raises(ExecutorLostError):
        await stream.send(PLAN)
    stream.close()
    with pytest.raises(ExecutorLostError):
        await stream.send(PLAN)
    await client.close()


async def test_a_stream_that_ends_after_its_first_plan() -> None:
    """The connection is there no longer when the next one is sent."""
    client = ExecutorClient("127.0.0.1:1")
    stream = client.execute()
    stream._is_connected = True
    for _ in range(2):
        with pytest.raises(ExecutorLostError):
            await stream.send(PLAN)
    await client.close()
