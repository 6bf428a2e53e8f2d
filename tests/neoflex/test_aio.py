"""The asyncio client: that it does as the blocking one."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.inference import InferenceServer

from neoflex import (
    AsyncClient,
    DeadlineExceededError,
    Delta,
    Finish,
    FinishReason,
    InvalidArgumentError,
    Message,
    NeoflexError,
    UnavailableError,
)


@pytest.fixture
async def client(server: InferenceServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as connected:
        yield connected


async def test_a_whole_answer(client: AsyncClient, server: InferenceServer) -> None:
    answer = await client.generate(
        messages=[Message("user", "u")], temperature=0, stop=["x", "y"], service_class="chat", ttft_s=1, tpot_s=1
    )
    assert (answer.text, answer.token_ids, answer.finish) == ("a b c", (7, 8, 9), Finish(FinishReason.STOP, "END"))
    request = server.servicer.last_request
    assert request is not None
    assert (request.request_id, list(request.stopping.stop)) == (answer.request_id, ["x", "y"])
    assert (request.service_class, request.targets.ttft.seconds, answer.usage.targets_met) == ("chat", 1, True)


async def test_a_stream(client: AsyncClient) -> None:
    async with client.stream("hello") as stream:
        deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["a ", "b c"]
    assert deltas[1] == Delta("b c", (8, 9))
    assert stream.prompt_tokens == 5
    assert stream.finish == Finish(FinishReason.STOP, "END")
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 3


async def test_leaving_a_stream_ends_the_request(client: AsyncClient, server: InferenceServer) -> None:
    server.servicer.stream_cancelled.clear()
    async with client.stream("never") as stream:
        assert (await anext(stream)).text == "a "
    assert await asyncio.to_thread(server.servicer.stream_cancelled.wait, 10)
    assert [delta async for delta in stream] == []


async def test_a_cancelled_task_ends_the_request(client: AsyncClient, server: InferenceServer) -> None:
    server.servicer.stream_cancelled.clear()
    first = asyncio.Event()

    async def read() -> None:
        async with client.stream("never") as stream:
            async for _ in stream:
                first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.servicer.stream_cancelled.wait, 10)


async def test_closing_from_another_task_ends_the_iteration(client: AsyncClient) -> None:
    stream = client.stream("never")
    await anext(stream)
    asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(stream.aclose()))
    assert [delta async for delta in stream] == []


async def test_errors_are_typed(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate("malformed")
    assert caught.value.violations[0].field == "request.sampling.top_p"
    stream = client.stream("lost midway")
    await anext(stream)
    with pytest.raises(UnavailableError) as lost:
        await anext(stream)
    assert (lost.value.reason, lost.value.retry_after_s) == ("CPU_ATTENTION_LOST", 0.5)
    with pytest.raises(NeoflexError, match="DATA_LOSS"):
        [delta async for delta in client.stream("cut short")]
    words = f"^DEADLINE_EXCEEDED: no complete answer from {client.address} within 0.05 s$"
    with pytest.raises(DeadlineExceededError, match=words):
        await client.generate("never", timeout=0.05)
    with pytest.raises(DeadlineExceededError, match=words):
        [delta async for delta in client.stream("never", timeout=0.05)]


async def test_a_misspelt_option_is_named(client: AsyncClient) -> None:
    options = {"max_token": 3}
    with pytest.raises(TypeError, match=r"^unknown option: max_token; there are: "):
        await client.generate("hello", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^unknown option: max_token; there are: "):
        client.stream("hello", **options)  # type: ignore[arg-type]


async def test_the_small_calls(client: AsyncClient) -> None:
    await client.wait_until_ready(5)
    assert await client.abort("a", "unknown") == ("a",)
    assert await client.tokenize("hi") == (104, 105)
    assert await client.detokenize([104, 105]) == "hi"
    assert (await client.model_info()).eos_token_ids == (2, 3)
    assert (await client.server_info()).gpu_blocks == 64
    assert (await client.load()).host_blocks_used == 5


async def test_nobody_there() -> None:
    async with AsyncClient("unix:/nonexistent/socket") as client:
        assert not await client.is_ready()
        with pytest.raises(DeadlineExceededError, match="was not ready within"):
            await client.wait_until_ready(0.2)


async def test_a_refused_call_comes_back_when_the_server_says(server: InferenceServer) -> None:
    async with AsyncClient(server.address) as client:
        server.servicer.num_refused = 0
        assert (await client.generate("busy twice")).text == "a b c"
        assert server.servicer.num_refused == 2
        server.servicer.num_refused = 0
        assert "".join([delta.text async for delta in client.stream("busy twice")]) == "a b c"
        assert server.servicer.num_refused == 2


async def test_there_are_no_more_retries_than_allowed(server: InferenceServer) -> None:
    server.servicer.num_refused = 0
    async with AsyncClient(server.address, max_retries=1) as client:
        with pytest.raises(UnavailableError):
            [delta async for delta in client.stream("busy twice")]
    assert server.servicer.num_refused == 2
